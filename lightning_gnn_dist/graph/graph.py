"""The graph: who sends messages to whom, and what each node and edge carries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_arrays_if_given,
    check_at_least_if_given,
    check_folder,
    check_ids,
    check_path,
    check_plain,
    check_tensor,
    check_true_or_false,
    check_word,
    shown,
)
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.rows import check_csr, check_form, senders_outside
from lightning_gnn_dist.graph.typed.build import EdgeTable, NodeTable, build, induced
from lightning_gnn_dist.graph.typed.types import EDGE, NODE, UNTYPED_ONLY, GraphTypes
from lightning_gnn_dist.names import extension

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

EDGES_AT_ONCE = 1 << 22  # bounds what a pass over a memory-mapped graph holds in RAM


class Graph:
    """One CSR whose row ``v`` lists the nodes that send messages to ``v``, and arrays beside it.

    The arrays are tensors in RAM or over a memory map. Do not change them: results are remembered. Most users call
    :meth:`from_pyg` or :meth:`open`.

    Its ``types`` are :class:`GraphTypes`, with the arrays of each type. A typed graph, made of a ``HeteroData``, has
    neither ``node_arrays`` nor ``edge_arrays``: what needs these refuses it. Another graph is of one type without name.

    Args:
        indptr: Where each row starts, int64, shape ``(N + 1,)``.
        indices: The in-neighbours, row after row, shape ``(E,)``.
        node_arrays: Arrays with one row per node: ``x``, ``y``, ``train_mask``, ...
        edge_arrays: Arrays with one row per edge, in the order of ``indices``: ``edge_weight``, ...
        path: The directory that the graph was opened from, or ``None``.
        fingerprint: A hash of edges and masks. Default: computed when it is first asked for.
        num_senders: The entries of ``indices`` must lie below this. Default: the number of rows.
    """

    indptr: Tensor
    indices: Tensor
    types: GraphTypes
    node_arrays: dict[str, Tensor]
    edge_arrays: dict[str, Tensor]
    path: Path | None
    _fingerprint: str | None

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        node_arrays: Mapping[str, Tensor] | None = None,
        edge_arrays: Mapping[str, Tensor] | None = None,
        *,
        path: Path | None = None,
        fingerprint: str | None = None,
        num_senders: int | None = None,
    ) -> None:
        check_tensor("indptr", indptr, "where each row starts")
        check_tensor("indices", indices, "in-neighbours")
        check_plain("indptr", indptr)
        check_plain("indices", indices)
        check_arrays_if_given(node_arrays=node_arrays, edge_arrays=edge_arrays)
        convert.check_names(node_arrays or {}, edge_arrays or {}, allowed=("n_id",))
        check_at_least_if_given(0, num_senders=num_senders)
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise TypeError(f"fingerprint must be a text such as Graph.fingerprint gives, got {shown(fingerprint)}.")
        check_form(indptr, indices)
        types = GraphTypes.of_one(indptr, indices, node_arrays or {}, edge_arrays or {}, num_senders)
        vars(self).update(vars(typed_graph(indptr, indices, types, path, fingerprint)))
        self.check_edges()
        convert.warn_of_overlaps(self.node_arrays)

    if not TYPE_CHECKING:  # mypy would believe in any attribute

        def __getattr__(self, name: str) -> Any:  # called where there is none of this name
            if name in ("node_arrays", "edge_arrays") and "types" in vars(self):
                raise ValueError(UNTYPED_ONLY)
            types = vars(self).get("types")  # not there while a copy is made
            if said := way_out(f"Graph.{name}"):
                raise AttributeError(said)
            raise AttributeError(f"a Graph has no attribute {name!r}{'' if types is None else types.told_of(name)}")

    @classmethod
    def from_pyg(
        cls,
        data: Data | HeteroData,
        *,
        check_features: bool = True,
        float_labels: bool = False,
        edge_ids: bool = False,
        time: str | None = None,
    ) -> Graph:
        """Build a graph from what PyG holds: its edges, and every tensor with one row per node or per edge.

        Args:
            data: A ``Data`` or ``HeteroData`` with ``edge_index``.
                Attributes that are not tensors are left out, unless another type has a tensor of their name, which is
                refused. Ids in ``train_idx``, ``val_idx`` (``valid_idx``) and
                ``test_idx`` become masks, without nodes of ``y`` NaN. Classes ``y`` of shape (N, 1), as OGB has them,
                are taken as (N,).
            check_features: Refuse NaN and infinity (one pass over ``x``, and over the edge arrays).
            float_labels: Accept a floating point ``y`` with one value per node, for regression.
            edge_ids: Give batches an ``e_id``: the place of each edge in ``data.edge_index``.
            time: Of a ``HeteroData``, the array that says when edges, or the nodes that send, were there. The edges of
                one type into a node are then in its order, see :class:`GraphTypes`.
        """
        check_true_or_false(check_features=check_features, float_labels=float_labels, edge_ids=edge_ids)
        flags = {"check_features": check_features, "float_labels": float_labels, "edge_ids": edge_ids}
        found: Graph = extension("graph of PyG").graph_of(data, time=time, **flags)
        return found

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: int,
        node_arrays: Mapping[str, Tensor] | None = None,
        edge_arrays: Mapping[str, Tensor] | None = None,
    ) -> Graph:
        """Build a graph from a list of edges, shape (2, E): ``edge_index[0]`` sends to ``edge_index[1]``."""
        check_arrays_if_given(node_arrays=node_arrays, edge_arrays=edge_arrays)
        convert.check_num_nodes(num_nodes)
        convert.check_pairs(edge_index)
        nodes = {NODE: NodeTable(int(num_nodes), node_arrays or {})}
        edges = {EDGE: EdgeTable(edge_index, edge_arrays or {})}
        convert.check_names(node_arrays or {}, edge_arrays or {}, allowed=("n_id",))
        graph = typed_graph(*build(nodes, edges))
        convert.warn_of_overlaps(graph.node_arrays)
        return graph

    def to_pyg(self) -> Data | HeteroData:
        """The graph as a PyG ``Data``, or a typed one as a ``HeteroData``. The arrays are this graph's own.

        Edges come in the order of the graph: by receiver, then by time in a typed graph that has one, then by sender.
        """
        self.check_whole()
        found: Data | HeteroData = extension("graph of PyG").to_pyg(self)
        return found

    @classmethod
    def open(cls, path: str | Path) -> Graph:
        """Open a saved graph. Its arrays are memory-mapped: this costs milliseconds and no RAM.

        The first time, all edges are read and checked; later opens rely on a mark beside them. Features are not read.

        Args:
            path: The directory that :meth:`save` wrote. Its files must not change while they are mapped.
        """
        found: Graph = extension("saved graph").open_graph(check_path("path", path))
        return found

    def save(
        self, path: str | Path, *, overwrite: bool = False, beside: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        """Write the graph to a directory that :meth:`open` reads. The directory appears when it is complete.

        ``beside`` holds further arrays for the same directory, named ``links/...``; :meth:`open` leaves them out.
        """
        path = check_folder("path", path)
        check_true_or_false(overwrite=overwrite)
        extension("saved graph").save_graph(self, path, beside, overwrite=overwrite)

    @property
    def num_nodes(self) -> int:
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @property
    def arrays(self) -> dict[str, Tensor]:
        """All arrays by the names of their files: ``indptr``, ``indices``, ``nodes/x``, ``nodes/paper/x``, ..."""
        return {"indptr": self.indptr, "indices": self.indices} | self.types.arrays

    @property
    def num_senders(self) -> int:
        """The entries of ``indices`` lie below this: the number of nodes, but for some rows of a larger graph."""
        return self.types.num_senders

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, in RAM or on disk."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def fingerprint(self) -> str:
        """A hash of the edges and of every array whose name ends in ``_mask``."""
        if self._fingerprint is None:
            arrays = {"indptr": self.indptr, "indices": self.indices, **self.types.masks}
            self._fingerprint = convert.fingerprint_of(
                (name, tensor.dtype, tensor.shape, tensor.split(EDGES_AT_ONCE)) for name, tensor in arrays.items()
            )
        return self._fingerprint

    def degrees(self) -> Tensor:
        """In-degrees, int64, shape ``(N,)``."""
        return self.indptr.diff()

    def split(self, name: str) -> Tensor:
        """The ids of the nodes that ``<name>_mask`` marks, in increasing order."""
        check_word("name", name, "train")
        if "node_arrays" not in vars(self):
            return self.types.split(name)
        mask = self.node_arrays.get(f"{name}_mask")
        if mask is None:
            masks = sorted(key for key in self.node_arrays if key.endswith("_mask"))
            raise ValueError(
                f"The graph has no {name:.60}_mask (it has: {masks}). Set data.{name:.60}_mask, a boolean per node, "
                "before Graph.from_pyg(data)"
                + (", or leave validation out, Trainer(limit_val_batches=0)." if name == "val" else ".")
            )
        convert.check_rows("node", {f"{name}_mask": mask}, self.num_nodes)
        return mask.nonzero().view(-1)

    def induced(self, nodes: Tensor) -> Graph:
        """The subgraph of ``nodes`` and the edges among them, copied into RAM.

        Node ``i`` of the result is ``nodes[i]``. Its ``node_arrays["n_id"]`` holds these ids, or this graph's own
        ``n_id`` where it has one. Takes memory in proportion to the result, also when this graph is a memory map.
        """
        nodes = self._checked(nodes)
        return typed_graph(*induced(self.indptr, self.indices, self.types, nodes))

    def with_seeds(self, node_type: str) -> Graph:
        """The same typed graph, of which nodes of this type alone are learned from and evaluated."""
        if not self.types.have_names:
            raise ValueError(f"with_seeds({shown(node_type)}) is for a graph with types, and this one has none.")
        rows = self.indptr, self.indices
        return typed_graph(*rows, self.types.with_seeds(node_type), self.path, self._fingerprint)

    def halo(self, nodes: Tensor) -> Tensor:
        """The nodes outside ``nodes`` that send messages to one of them, in increasing order."""
        return senders_outside(self.indptr, self.indices, self._checked(nodes))

    def check_edges(self) -> None:
        """Refuse edges that lead out of the graph, for instance after a file was changed: compiled loops follow them.

        Reads all of ``indptr`` and ``indices`` once, also from disk.
        """
        check_csr(self.indptr, self.indices, self.types.num_senders, EDGES_AT_ONCE)
        self.types.check_edges(self.indptr, self.indices)

    def check_whole(self) -> None:
        """Refuse some rows of a larger graph, where every sender must have a row of its own."""
        if self.types.sender_offsets is not None and self.num_senders != self.num_nodes:
            raise ValueError(
                f"The graph has rows for {self.num_nodes} nodes, and edges from {self.num_senders}: it is a shard, and "
                "the whole graph is needed here."
            )

    def _checked(self, nodes: Tensor) -> Tensor:
        """The ids as int64; an id that is no node of this graph is refused."""
        check_ids("nodes", nodes)
        nodes = nodes.to(torch.int64)
        if nodes.numel() and not (int(nodes.min()) >= 0 and int(nodes.max()) < self.num_nodes):
            raise ValueError(
                f"Node ids must lie in [0, {self.num_nodes}), got {int(nodes.min())} to {int(nodes.max())}."
            )
        return nodes

    def __repr__(self) -> str:
        where = f", path={str(self.path)!r}" if self.path else ""
        if self.types.have_names:
            held = f"node_types={list(self.types.node_types)}, edge_types={len(self.types.edge_types)}"
        else:
            held = f"node_arrays={[*self.node_arrays]}, edge_arrays={[*self.edge_arrays]}"
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, {held}{where})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory map travels between processes as its path, never as its bytes.
        if self.path is not None:
            others = None if self.num_senders == self.num_nodes else self.num_senders
            return extension("saved graph").open_graph, (self.path, others, self.types.seeds)
        return _built, (self.indptr, self.indices, self.types, self.__dict__.get("node_arrays"))


def typed_graph(
    indptr: Tensor,
    indices: Tensor,
    types: GraphTypes,
    path: Path | None = None,
    fingerprint: str | None = None,
    node_arrays: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Build a graph of checked edges and their types. A part of a typed one has ``node_arrays`` of all nodes, too."""
    graph = Graph.__new__(Graph)
    graph.indptr, graph.indices, graph.types, graph._fingerprint = indptr, indices, types, fingerprint
    graph.path = None if path is None else check_path("path", path)
    if not types.have_names:  # the same objects, as arrays may be added
        graph.node_arrays = cast(dict[str, Tensor], types.node_arrays[NODE])
        graph.edge_arrays = cast(dict[str, Tensor], types.edge_arrays[EDGE])
    elif node_arrays is not None:
        graph.node_arrays = dict(node_arrays)
    types.check_fits(graph.num_nodes, graph.num_edges)
    return graph


def reopened(graph: Graph) -> Graph:
    """The graph over maps of its own, so that pages that are read go with them; itself where it is in RAM."""
    return graph if graph.path is None else Graph.open(graph.path)


def _built(indptr: Tensor, indices: Tensor, types: GraphTypes, node_arrays: Any) -> Graph:
    graph = typed_graph(indptr, indices, types, node_arrays=node_arrays)
    graph.check_edges()
    return graph


def with_arrays(graph: Graph, arrays: Mapping[str, Tensor]) -> Graph:
    """The graph with more node arrays, or others, each with a row for every node."""
    if not arrays:
        return graph
    types, of_types = graph.types, dict[str, dict[str, Tensor]]()
    for kind, known in types.node_arrays.items():
        nodes = types.nodes_of(kind)
        of_types[kind] = {**known, **{name: array[nodes.start : nodes.stop] for name, array in arrays.items()}}
    return with_arrays_of_types(graph, of_types)


def with_arrays_of_types(graph: Graph, of_types: Mapping[str, Mapping[str, Tensor]]) -> Graph:
    """The graph with these node arrays of each type."""
    types, of_all = replace(graph.types, node_arrays=of_types), vars(graph).get("node_arrays")
    return typed_graph(graph.indptr, graph.indices, types, node_arrays=of_all)


def bytes_per_node(graph: Graph) -> int:
    """Bytes of a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.nbytes for array in _all(graph.types.node_arrays)), graph.num_nodes)


def bytes_per_edge(graph: Graph) -> int:
    """Bytes of a row of all edge arrays; of a typed graph the mean over all edges, and the number of its type."""
    number = graph.types.edge_type.element_size() if len(graph.types.edge_types) > 1 else 0
    return _mean((array.nbytes for array in _all(graph.types.edge_arrays)), graph.num_edges) + number


def bytes_of_part(graph: Graph, num_nodes: Tensor, num_edges: Tensor) -> Tensor:
    """Bytes that parts with so many nodes and edges take in RAM, the same shape."""
    per_node, have_ids = bytes_per_node(graph), ("n_id" in arrays for arrays in graph.types.node_arrays.values())
    per_node += 0 if all(have_ids) else 8  # a part knows its nodes' ids,
    per_node += 4  # and how much of their neighbourhoods it covers
    per_edge = 4 + bytes_per_edge(graph)
    return num_nodes * (per_node + 8) + 8 + num_edges * per_edge


def numbers_per_node(graph: Graph) -> int:
    """Numbers in a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.numel() for array in _all(graph.types.node_arrays)), graph.num_nodes)


def _all(kinds: Mapping[Any, Mapping[str, Tensor]]) -> list[Tensor]:
    return [array for arrays in kinds.values() for array in arrays.values()]


def _mean(sizes: Iterable[int], count: int) -> int:
    return -(-sum(sizes) // max(count, 1))


_BYTES_OF_WHOLE = 1 << 20  # arrays up to this size are read whole
_ROWS = 64  # read of a larger array: each may be a read from the disk
_SEED = 7


def sampled_digest(arrays: Mapping[str, Tensor]) -> tuple[str, tuple[float, float]]:
    """A hash of the names, types and shapes of arrays and of some rows of them, and two numbers for those of fractions.

    The hash covers rows of those arrays that are not floating point. Another kind of processor computes other last
    digits from the same seed, which hardly change the numbers: each is a sum over the arrays of fractions, of which
    some rows are added up with random signs and divided by their norm.

    Of an array of more than a megabyte, 64 evenly spread rows are read. So a graph larger than RAM takes no longer than
    another, and a difference in a few rows of a large array is not seen.
    """
    digest, sketch = hashlib.blake2b(digest_size=16), torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        if not array.numel():
            continue
        if array.nbytes > _BYTES_OF_WHOLE:
            array = array[torch.linspace(0, len(array) - 1, _ROWS, dtype=torch.float64).long()]
        if not (array.is_floating_point() or array.is_complex()):
            digest.update(array.contiguous().view(-1).view(torch.uint8).numpy().data)
            continue
        values = (torch.view_as_real(array) if array.is_complex() else array).double().nan_to_num().flatten()
        signs = 2 * torch.randint(0, 2, (2, values.numel()), generator=generator) - 1
        sketch += signs.double() @ values / values.norm().clamp(min=1e-300)
    return digest.hexdigest(), (float(sketch[0]), float(sketch[1]))
