"""A boundary of a user's own: what it brings along is in the part, and what is wrong with it is said by its name."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, around

# 3 -> 0, 4 -> 1, 5 -> 3; a part of the nodes 0 and 1.
GRAPH = Graph.from_edge_index(torch.tensor([[3, 4, 5], [0, 1, 3]]), 6)
RESIDENTS = torch.tensor([0, 1])


@dataclass(frozen=True)
class Given(Boundary):
    """Brings along what it is given."""

    hops: Any

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        found: list[Tensor] = self.hops
        return found


class Rows:
    """The graph as rows of a part."""

    sizes = GRAPH

    def edges_into(self, nodes: Tensor) -> Any:
        raise AssertionError("nobody asks")

    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        self.asked = nodes.tolist(), [hop.tolist() for hop in hops]
        return GRAPH


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_hops_are_taken_as_they_are() -> None:
    rows = Rows()
    _, nodes, is_own = around(rows, RESIDENTS, ids(1), Given([ids(3, 4), ids(5)]), 0)
    assert nodes.tolist() == [0, 1, 3, 4, 5] and is_own.tolist() == [False, True, False, False, False]
    assert rows.asked == ([0, 1, 3, 4, 5], [[0, 1], [3, 4]])


@pytest.mark.parametrize(
    ("hops", "error", "reason"),
    [
        (None, TypeError, "must return a list of vectors of int64, the ids of each hop, got None"),
        (ids(3), TypeError, "got a tensor of torch.int64 and shape (1,)"),
        ([[3, 4]], TypeError, "got a list of [3, 4]"),
        ([ids(3).int()], TypeError, "got a list of a tensor of torch.int32 and shape (1,)"),
        ([ids(3), ids(6)], ValueError, "ids of the 6 nodes of the graph, and those of its hop 2 go from 6 to 6"),
        ([ids(-1, 3)], ValueError, "and those of its hop 1 go from -1 to 3"),
        ([ids(3, 3)], ValueError, "each outside node once, in the first hop that reaches it, and no node of the part"),
        ([ids(3), ids(1)], ValueError, "got node 1 again"),
    ],
)
def test_what_is_wrong_is_said_by_name(hops: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error) as refused:
        around(Rows(), RESIDENTS, RESIDENTS, Given(hops), 0)
    assert str(refused.value).startswith("Given.around() must return ") and reason in str(refused.value)
