"""Ways to treat a boundary: what cannot be meant is refused, and anybody can write another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist import (
    Boundary,
    Graph,
    Isolated,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
)
from lightning_gnn_dist.boundary.boundary import EdgesInto


@dataclass(frozen=True)
class Nearest(Boundary):
    """One leaf, as somebody else might write it."""

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return [graph.halo(residents)[:1]]


def test_a_boundary_of_ones_own_is_asked_for_its_nodes() -> None:
    graph = communities(100, 2, num_features=2)
    plain, leafed = (
        PartitionedDataModule(graph, partitioner=RandomPartitioner(), boundary=boundary).part(0, 2)
        for boundary in (Isolated(), Nearest())
    )
    assert leafed.num_nodes == plain.num_nodes + 1
    assert leafed.degrees()[-1] == 0
