"""Super-nodes: small clusters that stay whole while parts are drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnn_dist.checks import Count, brief, check_callable, check_fields
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, Partitioner, check_request
from lightning_gnn_dist.partition.metis import MetisPartitioner, check_available
from lightning_gnn_dist.partition.random import deal

SUPERNODES_PER_PART = 50  # 400 super-nodes for eight parts: benchmarks/accuracy.md


@dataclass(frozen=True, repr=False)
class SuperNodePartitioner:
    r"""Deal ``num_supernodes`` small clusters to the parts at random (SuperTMA, arXiv:2305.09887).

    The number of super-nodes decides where a partition lies between two extremes: one per part is
    METIS (few cut edges, parts that look different), one per node is random (many cut edges,
    parts that look alike). With a share :math:`q` of the edges inside super-nodes, a part keeps
    :math:`q + (1 - q) / P` of its edges. The parts' counts of super-nodes differ by one at most.

    Args:
        num_supernodes: How many clusters to deal. At least ``num_parts``, at most the graph's nodes. Default: 50 for
            each part, or as many as there are nodes.
        clusters: What finds the clusters. Default: ``MetisPartitioner()``. For a graph too large for METIS take
            ``StreamingPartitioner()``.
    """

    num_supernodes: Count | None = None
    clusters: Partitioner | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.clusters is None:
            check_available("SuperNodePartitioner()", "SuperNodePartitioner(clusters=StreamingPartitioner())")
        else:
            check_callable("clusters", self.clusters, "an object such as MetisPartitioner()", "graph", 2, 0)

    def __repr__(self) -> str:
        return brief(self)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        number = self.num_supernodes
        if number is None:
            number = min(SUPERNODES_PER_PART * num_parts, graph.num_nodes)
        _check_supernodes(number, graph, num_parts)
        clusters = MetisPartitioner() if self.clusters is None else self.clusters
        supernodes = clusters(graph, number, seed)
        return Partition(deal(number, num_parts, seed)[supernodes.assignment], num_parts)


def _check_supernodes(number: int, graph: Graph, num_parts: int) -> None:
    if number < num_parts:
        raise ValueError(
            f"num_supernodes ({number}) must be at least num_parts ({num_parts}): every part needs a super-node."
        )
    if number > graph.num_nodes:
        raise ValueError(
            f"num_supernodes ({number}) must not exceed the graph's nodes ({graph.num_nodes}): "
            "every super-node needs a node."
        )
