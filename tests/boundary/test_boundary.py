"""Ways to treat a boundary: what cannot be meant is refused, and anybody can write another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from lightning_gnn_dist import (
    Boundary,
    Exchange,
    Graph,
    Halo,
    Isolated,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
)
from lightning_gnn_dist.boundary.boundary import EdgesInto


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *(({"hops": hops}, "hops must be an integer of at least 1") for hops in (0, -1, 1.5, True, None, "2")),
        *(({"bytes": limit}, "bytes must be an integer of at least 1") for limit in (0, 1e6, float("nan"), "1MB")),
        *(({"neighbors": limit}, "neighbors must be an integer of at least 1") for limit in (0, 2.5, "2")),
    ],
)
def test_a_halo_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Halo(**wrong)


@pytest.mark.parametrize("bits", [0, 4, 32, 8.0, "8", True])
def test_bits_that_nobody_packs_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits must be one of \[8, 16, None\]"):
        Exchange(bits=bits)


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
