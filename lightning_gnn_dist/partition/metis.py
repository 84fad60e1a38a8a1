r"""METIS: a fast and high quality multilevel scheme (Karypis & Kumar, SIAM J. Sci. Comput. 20(1), 1998).

.. math::
    \min_{\pi} \; \bigl|\{ \{u, v\} \in E : \pi(u) \ne \pi(v) \}\bigr|
    \qquad\text{such that}\qquad
    |\{ v : \pi(v) = p \}| \;\le\; (1 + \epsilon) \, \frac{N}{P} \quad\text{for every part } p
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch

from lightning_gnn_dist.checks import check_fields, within
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition import kernels
from lightning_gnn_dist.partition.base import MAX_SHARE, Partition, check_request, part_capacity
from lightning_gnn_dist.partition.kernels import Array

try:
    import pymetis
except ImportError:  # not every machine has it
    pymetis = None  # type: ignore[assignment]

BYTES_PER_EDGE = 120  # of RAM, at most: docs/data.md
WAY_TO_METIS = 'pip install "lightning-gnn-dist[metis]", with a C++ compiler where there is no wheel of pymetis'


@dataclass(frozen=True)
class MetisPartitioner:
    r"""Few cut edges and parts of equal size.

    METIS sees the graph without directions, self loops and duplicate edges, and bisects it recursively. It
    needs that graph in RAM several times over: for a graph too large for that, use
    :class:`~lightning_gnn_dist.partition.streaming.StreamingPartitioner`.

    METIS may exceed its bound, above all on small graphs, and may leave parts empty. So a last pass moves nodes
    out of parts that are too full, first those whose move cuts fewest edges, and then into parts that are
    empty: the bounds below always hold.

    Args:
        balance: What parts hold equally many of: ``"nodes"``, or with ``"train"`` training nodes *and* nodes,
            so that ranks have equally many batches in an epoch and no part is without a training node. In a graph
            with types every part gets its share of the training nodes of each type. METIS
            itself balances nodes in both cases, and the last pass moves training nodes: its Python binding
            takes one weight per node, and a mix of both counts as that weight ended with more cut edges.
        imbalance: The share :math:`\epsilon` by which a part may exceed the average, rounded down to whole
            nodes (but never so far that not all nodes fit, in a graph with types the training nodes of each).
    """

    balance: Literal["nodes", "train"] = "nodes"
    imbalance: Annotated[float, within(0, MAX_SHARE, "0.03 lets a part hold 3% more than the average")] = 0.03

    def __post_init__(self) -> None:
        check_available("MetisPartitioner()", "StreamingPartitioner()")
        check_fields(self)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        shared = _groups(graph, num_parts, self.balance)
        if num_parts == 1:
            return Partition(torch.zeros(graph.num_nodes, dtype=torch.int32), 1)
        start, neighbors = undirected(graph)
        assignment = _call_metis(start, neighbors, num_parts, self.imbalance, seed)
        _repair(start, neighbors, shared, assignment, num_parts, self.imbalance)
        return Partition(torch.from_numpy(assignment), num_parts)


def is_available() -> bool:
    """Whether METIS is installed."""
    return pymetis is not None


def check_available(needed_by: str, instead: str) -> None:
    """Refuse what needs METIS where it is not installed, and name what does not."""
    if not is_available():
        raise ValueError(
            f"{needed_by} needs METIS, which is not installed: {WAY_TO_METIS}; or take {instead}, which needs neither."
        )


def _groups(graph: Graph, num_parts: int, balance: str) -> list[Array]:
    """The groups of nodes of which each part gets its share, each as a mask: all, or the training nodes by type."""
    if balance != "train":
        return [np.ones(graph.num_nodes, np.bool_)]
    train_nodes = graph.split("train")
    if train_nodes.numel() < num_parts:
        raise ValueError(
            f"num_parts ({num_parts}) must not exceed the training nodes ({train_nodes.numel()}) with "
            'balance="train": every part needs one. Ask for fewer parts or use balance="nodes".'
        )
    found = graph.types.splits("train").values()
    masks = [np.zeros(graph.num_nodes, np.bool_) for _ in found]
    for mask, nodes in zip(masks, found, strict=True):
        mask[nodes.numpy()] = True
    return masks


def undirected(graph: Graph) -> tuple[Array, Array]:
    """The CSR that METIS takes, row starts and neighbours: every edge both ways, no self loops, no duplicates.

    It counts before it allocates, so it takes no more memory than the result (and a sorted copy of the edges,
    if the graph's rows are not sorted).
    """
    graph.check_edges()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if not kernels.rows_are_sorted(indptr, indices):
        indices = indices.copy()
        kernels.sort_rows(indptr, indices)
    start = np.zeros(graph.num_nodes + 1, np.int64)
    one_way = kernels.count_neighbors(indptr, indices, start[1:])
    np.cumsum(start, out=start)
    integer = pymetis.zero_copy_dtype()
    for count, what in ((graph.num_nodes, "nodes"), (int(start[-1]), "edges, counted in both directions,")):
        if count > np.iinfo(integer).max:  # it would wrap around and crash
            raise ValueError(
                f"The graph has {count} {what} but this build of METIS counts up to {np.iinfo(integer).max}: "
                "use StreamingPartitioner, which has no such limit."
            )
    neighbors = np.empty(int(start[-1]), integer)
    kernels.list_neighbors(indptr, indices, one_way, start[:-1].copy(), neighbors)
    return start.astype(integer, copy=False), neighbors


def _call_metis(start: Array, neighbors: Array, num_parts: int, imbalance: float, seed: int) -> Array:
    options = pymetis.Options(
        seed=1 + int(seed) % (2**31 - 1),  # METIS calls srand(), to which 0 is the same as 1
        ufactor=max(1, round(1000 * imbalance)),  # in thousandths, at least one
    )
    result = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(start, neighbors),
        # METIS's authors advise k-way above 8 parts. Measured on citation, shopping and community graphs,
        # it cut from 6% fewer to 70% more edges, took up to 7 times as long and left small parts empty.
        recursive=True,
        options=options,
    )
    return np.asarray(result.vertex_part).astype(np.int32)


def _repair(
    start: Array, neighbors: Array, shared: list[Array], assignment: Array, num_parts: int, imbalance: float
) -> None:
    """Move nodes out of parts that have too many of a group, or too many at all, and into parts that are empty."""
    placed = np.zeros(assignment.size, np.bool_)
    for group in shared:
        load = np.bincount(assignment[group], minlength=num_parts)
        capacity = part_capacity(int(group.sum()), num_parts, imbalance)
        kernels.relieve(start, neighbors, assignment, group, load, capacity)
        if group.sum() >= num_parts:
            kernels.occupy(assignment, group, load)
        placed |= group
    kernels.occupy(assignment, placed, np.bincount(assignment[placed], minlength=num_parts))
    # These nodes stay where they are now; the others are moved to balance the node counts.
    load = np.bincount(assignment, minlength=num_parts)
    most_placed = int(np.bincount(assignment[placed], minlength=num_parts).max())
    capacity = max(part_capacity(assignment.size, num_parts, imbalance), most_placed)
    kernels.relieve(start, neighbors, assignment, ~placed, load, capacity)
