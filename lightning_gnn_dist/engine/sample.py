"""A sampled neighbourhood of a batch, the key under which it is drawn, and the memory that a kernel draws it in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn_dist.engine.intrinsics import RUN
from lightning_gnn_dist.engine.kernels import AT_ONCE, DAMAGED, ONE_TYPE, REPEATED_SEED, Array, Csr, Table, Work
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import GraphTypes

MAX_ENTRIES = 2**31 - 1  # seeds and edges of a batch
NO_IDS = torch.empty(0, dtype=torch.int64)
SEED_TIME = "seed_time"  # of what samples have beside their nodes, it alone has a row for each seed


class BatchKey(NamedTuple):
    """The name of a batch. What a sampler draws at random depends on these three numbers."""

    seed: int
    epoch: int
    batch: int


class Sample(NamedTuple):
    """The sampled neighbourhood of one batch.

    Row ``i`` lists the sampled in-neighbours of ``nodes[i]``. Nodes stand in the order of hops, and only the
    last hop's nodes have no row, so the CSR of every later layer is the first rows of this one. Where they have one, no
    layer computes it.

    Attributes:
        nodes: Ids of the batch's nodes, int64, the seeds first, shape ``(n,)``.
        indptr: Where each row starts, shape ``(rows + 1,)``.
        indices: The rows' entries, as positions in ``nodes``, shape ``(nnz,)``.
        num_sampled_nodes: New nodes per hop; hop 0 is the seeds.
        num_sampled_edges: Edges per hop. Those of the last hop's nodes, if there are any, are of the one before.
        edge_ids: Each edge's position in the graph's ``indices``, or None where nobody needs it.
        edge_weight: The batch's ``edge_weight``, float32, or None to keep the graph's.
        node_norm: The batch's ``node_norm``, a weight for the loss of each node, or None.
        is_constant: Whether the same sample will come again, so that what is built from it is worth keeping.
        extra: Further tensors for the batch, by name.
        edge_kinds: The type of each edge, if the sampler knows it; otherwise ``edge_ids`` tell.
        target_type: The number of the edge type of the targets, if these are edges of a typed graph.
    """

    nodes: Tensor
    indptr: Tensor
    indices: Tensor
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    edge_ids: Tensor | None
    edge_weight: Tensor | None = None
    node_norm: Tensor | None = None
    is_constant: bool = False
    extra: Mapping[str, Tensor] = MappingProxyType({})
    edge_kinds: Tensor | None = None
    target_type: int | None = None


class EdgesOfType(NamedTuple):
    """The edges of one type in a batch.

    Attributes:
        indptr: Where the row of each receiver starts; its type's nodes of all hops but the last have one, or all.
        indices: The senders, as numbers among the batch's nodes of their type.
        edge_ids: The sample's ids of these edges; nothing that can be used where it has none.
        num_sampled: The edges per hop.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor
    num_sampled: list[int]


class Apart(NamedTuple):
    """A batch by types, in the order of the graph's types.

    Attributes:
        nodes: For each node type its nodes, by their ids in it, in the order of hops.
        num_sampled: For each node type its nodes per hop.
        kinds: The number of the type of each node of the batch; nothing that can be used where there is one type.
        rows: The edges of each edge type.
    """

    nodes: list[Tensor]
    num_sampled: list[list[int]]
    kinds: Tensor
    rows: list[EdgesOfType]


def of_one_type(sample: Sample) -> Apart:
    """Return the batch of a graph of one type."""
    edge_ids = NO_IDS if sample.edge_ids is None else sample.edge_ids
    rows = EdgesOfType(sample.indptr, sample.indices, edge_ids, sample.num_sampled_edges)
    return Apart([sample.nodes], [sample.num_sampled_nodes], NO_IDS, [rows])


def refuse_repeated(seeds: Tensor, way_out: str = "Pass seeds.unique()") -> None:
    """Refuse seeds of which one is given more than once."""
    ids, counts = seeds.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"The seeds of a batch must be distinct, but node {int(ids[counts > 1][0])} is given "
            f"{int(counts[counts > 1][0])} times. {way_out}."
        )


DIRECT_NODES = 1 << 21  # a graph of up to so many nodes gets a table with a slot for every node
ENTRY_LIMIT = 1 << 32  # entries of the table are uint32

_THREAD = threading.local()


class Scratch:
    """Arrays that a thread uses again for every batch: new ones would take as long as the sampling.

    The table's ``epoch`` grows with every batch, so no batch has to clear what earlier ones wrote. A graph
    of up to ``DIRECT_NODES`` nodes has a slot for every node: 4 bytes a node, at most 8 MiB a thread. A larger
    graph, perhaps one of 10**9 nodes behind a memory map, gets a hash table: 6 to 15 bytes for every edge of
    a batch, whatever the size of the graph. Measured, direct and hashed, in ns per edge: 14 and 19 with 1M nodes,
    29 and 26 with 4M, 40 and 25 with 16M, where the direct table no longer fits the caches. The other arrays
    take about 50 bytes for every edge of the largest batch so far.
    """

    def __init__(self, dtype: npt.DTypeLike, kinds: npt.DTypeLike) -> None:
        self.dtype, self.kinds, self.capacity = np.dtype(dtype), np.dtype(kinds), 0
        self.reserve(1 << 14)
        self._entries: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._epoch = 1

    def reserve(self, entries: int) -> None:
        """Make room for so many seeds and edges of a batch, and a quarter more; refuse more than ``MAX_ENTRIES``."""
        if entries <= self.capacity:
            return
        if entries > MAX_ENTRIES:
            raise ValueError(
                f"A batch may have {MAX_ENTRIES} edges, but this one needs at least {entries}. "
                "Use fewer seeds a batch, or a limit instead of -1 in num_neighbors."
            )
        self.capacity = size = entries + entries // 4
        longs: list[Array] = [np.empty(size + AT_ONCE, np.int64) for _ in range(4)]  # starts have one more
        starts, positions, first, degree = longs
        nodes, columns = np.empty(size, self.dtype), np.empty(size, self.dtype)
        weights, kinds = np.empty(size, np.float32), np.empty(size + RUN, self.kinds)
        self.work = Work(nodes, starts, positions[:size], columns, first, degree, weights, kinds)

    def open_table(self, num_nodes: int, times: int) -> Table:
        """A table without valid entries, for a batch of a graph with ``num_nodes`` nodes.

        A kernel may open it ``times`` times, each time with an epoch that is greater by :attr:`capacity`.
        """
        # At least a third of the hash table stays free, even if every edge of the batch leads to another node.
        bits = 0 if num_nodes <= DIRECT_NODES else (self.capacity + self.capacity // 2).bit_length()
        slots = 1 << bits if bits else num_nodes
        if self._entries.size < slots or self._epoch + (times + 1) * self.capacity >= ENTRY_LIMIT:
            self._entries = np.zeros(max(slots, self._entries.size), np.uint32)
            self._epoch = 1
        epoch = self._epoch
        self._epoch += times * self.capacity
        return Table(self._entries[:slots], 64 - bits if bits else 0, epoch)


def scratch_of_thread(dtype: npt.DTypeLike, kinds: npt.DTypeLike = np.uint8) -> Scratch:
    """The calling thread's own scratch for graphs whose ``indices``, and numbers of edge types, have these types."""
    mine: dict[Any, Scratch] = _THREAD.__dict__
    name = f"{np.dtype(dtype).name} {np.dtype(kinds).name}"
    if name not in mine:
        mine[name] = Scratch(dtype, kinds)
    return mine[name]


# (csr, seeds, *settings, work, table, num_nodes, num_edges) -> needed entries of ``work``, or an error
Kernel = Callable[..., Any]


def sample_hops(
    graph: Graph,
    seeds: Tensor,
    num_hops: int,
    kernel: Kernel,
    *settings: Any,
    tables: int = 1,
    weighs: bool = False,
    with_ids: bool | None = None,
    with_kinds: bool = False,
    num_names: int | None = None,
) -> Sample:
    """Sample one batch by ``kernel``, which runs again with more memory if it had too little.

    Args:
        graph: The graph to sample.
        seeds: The batch's first nodes, as ``check_bulk`` returns them.
        num_hops: The number of hops that the kernel counts nodes and edges of.
        kernel: Samples one batch into the ``Work`` that it is given.
        settings: What else the kernel takes.
        tables: How often the kernel opens its table.
        weighs: Whether the kernel gives edges a weight.
        with_ids: Whether the sample has ``edge_ids``. Default: if the graph has edge arrays or types.
        with_kinds: Whether it has ``edge_kinds``.
        num_names: The kernel calls nodes by names of its own, int64, below this number. Default: by their ids.
    """
    kinds = graph.types.edge_type.numpy().dtype
    scratch = scratch_of_thread(graph.indices.numpy().dtype if num_names is None else np.int64, kinds)
    scratch.reserve(seeds.numel())
    num_nodes, num_edges = np.zeros((2, num_hops + 1), np.int64)
    csr = csr_of(graph)
    while True:
        table = scratch.open_table(graph.num_nodes if num_names is None else num_names, tables)
        needed = kernel(csr, seeds.numpy(), *settings, scratch.work, table, num_nodes, num_edges)
        if needed <= scratch.capacity:
            break
        scratch.reserve(needed)
    if needed == REPEATED_SEED:
        refuse_repeated(seeds)
    if needed == DAMAGED:
        raise graph_is_damaged(graph)
    with_ids = has_ids(graph) if with_ids is None else with_ids
    work, nodes_of_hops, edges_of_hops = scratch.work, num_nodes.tolist(), num_edges[:-1].tolist()
    rows, edges = sum(nodes_of_hops[:-1]), sum(edges_of_hops)
    edge_kinds = torch.from_numpy(work.kinds[:edges].copy()) if with_kinds else None
    if edge_kinds is not None and len(graph.types.edge_types) == 1:
        edge_kinds.zero_()  # a kernel notes none
    return Sample(  # in arrays of its own, as the next one overwrites the scratch
        nodes=torch.from_numpy(work.nodes[: sum(nodes_of_hops)].astype(np.int64)),
        indptr=torch.from_numpy(work.starts[: rows + 1].astype(np.int32)),
        indices=torch.from_numpy(work.columns[:edges].astype(np.int32)),
        num_sampled_nodes=nodes_of_hops,
        num_sampled_edges=edges_of_hops,
        edge_ids=torch.from_numpy(work.positions[:edges].copy()) if with_ids else None,
        edge_weight=torch.from_numpy(work.weights[:edges].copy()) if weighs else None,
        edge_kinds=edge_kinds,
    )


def csr_of(graph: Graph) -> Csr:
    """The edges of a graph as kernels take them."""
    return Csr(graph.indptr.numpy(), graph.indices.numpy())


def has_ids(graph: Graph) -> bool:
    """Whether batches of the graph need to know where their edges stand in it."""
    types = graph.types
    return len(types.node_types) > 1 or len(types.edge_types) > 1 or any(types.edge_arrays.values())


def graph_is_damaged(graph: Graph) -> Exception:
    """The error for a kernel that met an edge out of the graph; all edges are checked again, to say which."""
    try:
        graph.check_edges()
    except ValueError as error:
        where = f"The files of {graph.path} are" if graph.path else "An array of the graph was"
        return ValueError(f"{where} changed after the graph was checked: {error} Open or build the graph again.")
    return ValueError("The edges of the graph are being changed while they are sampled: sample a graph that stays.")


def edge_types_of(types: GraphTypes) -> Array:
    """The type of each edge, as kernels take it: empty where there is one type alone."""
    if len(types.edge_types) == 1:
        return ONE_TYPE
    numbers: Array = types.edge_type.numpy()
    return numbers
