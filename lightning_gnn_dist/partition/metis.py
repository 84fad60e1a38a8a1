r"""METIS: a fast and high quality multilevel scheme (Karypis & Kumar, SIAM J. Sci. Comput. 20(1), 1998).

.. math::
    \min_{\pi} \; \bigl|\{ \{u, v\} \in E : \pi(u) \ne \pi(v) \}\bigr|
    \qquad\text{such that}\qquad
    |\{ v : \pi(v) = p \}| \;\le\; (1 + \epsilon) \, \frac{N}{P} \quad\text{for every part } p
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from lightning_gnn_dist.checks import check_fields, within
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import MAX_SHARE, Partition, check_request
from lightning_gnn_dist.partition.kernels import Array
from lightning_gnn_dist.partition.multilevel import Balance, groups, refuse_beyond, repair, undirected

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

    balance: Balance = "nodes"
    imbalance: Annotated[float, within(0, MAX_SHARE, "0.03 lets a part hold 3% more than the average")] = 0.03

    def __post_init__(self) -> None:
        check_available("MetisPartitioner()", "StreamingPartitioner()")
        check_fields(self)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        shared = groups(graph, num_parts, self.balance)
        if num_parts == 1:
            return Partition(torch.zeros(graph.num_nodes, dtype=torch.int32), 1)
        start, neighbors = undirected(graph, _room)
        start = start.astype(neighbors.dtype, copy=False)
        assignment = _call_metis(start, neighbors, num_parts, self.imbalance, seed)
        repair(start, neighbors, shared, assignment, num_parts, self.imbalance)
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


def _room(start: Array) -> Array:
    """Return an array for the neighbours of a graph with these row starts, as METIS reads it."""
    limit = int(np.iinfo(pymetis.zero_copy_dtype()).max)
    refuse_beyond(limit, start.size - 1, "nodes", "METIS")
    refuse_beyond(limit, int(start[-1]), "edges, counted in both directions,", "METIS")
    return np.empty(int(start[-1]), pymetis.zero_copy_dtype())


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
