"""Super-nodes: small METIS clusters that stay whole while parts are drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gnn_dist.checks import check_at_least
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, check_request
from lightning_gnn_dist.partition.metis import MetisPartitioner, check_available
from lightning_gnn_dist.partition.random import deal


@dataclass(frozen=True)
class SuperNodePartitioner:
    r"""Deal ``num_supernodes`` METIS clusters to the parts at random (SuperTMA, arXiv:2305.09887).

    The number of super-nodes decides where a partition lies between two extremes: one per part is
    METIS (few cut edges, parts that look different), one per node is random (many cut edges,
    parts that look alike). With a share :math:`q` of the edges inside super-nodes, a part keeps
    :math:`q + (1 - q) / P` of its edges. The parts' counts of super-nodes differ by one at most.

    Args:
        num_supernodes: How many clusters to deal. At least ``num_parts``, at most the graph's nodes.
    """

    num_supernodes: int

    def __post_init__(self) -> None:
        check_available("SuperNodePartitioner()")
        check_at_least(1, num_supernodes=self.num_supernodes)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        self._check_supernodes(graph, num_parts)
        supernodes = MetisPartitioner()(graph, self.num_supernodes, seed)  # none is empty
        part_of_supernode = deal(self.num_supernodes, num_parts, seed)
        return Partition(part_of_supernode[supernodes.assignment], num_parts)

    def _check_supernodes(self, graph: Graph, num_parts: int) -> None:
        if self.num_supernodes < num_parts:
            raise ValueError(
                f"num_supernodes ({self.num_supernodes}) must be at least num_parts ({num_parts}): "
                "every part needs a super-node."
            )
        if self.num_supernodes > graph.num_nodes:
            raise ValueError(
                f"num_supernodes ({self.num_supernodes}) must not exceed the graph's nodes "
                f"({graph.num_nodes}): every super-node needs a node."
            )
