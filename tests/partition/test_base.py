"""A partition checks itself, and says what it was given."""

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Partition
from lightning_gnn_dist.partition.base import part_capacity
from tests.partition.graphs import path_graph


def assignment(*parts: int) -> Tensor:
    return torch.tensor(parts, dtype=torch.int32)


def test_nodes_and_counts() -> None:
    partition = Partition(assignment(2, 0, 2, 0, 2), num_parts=4)
    assert partition.nodes(2).tolist() == [0, 2, 4]
    assert partition.nodes(1).tolist() == []
    assert partition.counts().tolist() == [2, 0, 3, 0]


@pytest.mark.parametrize(
    ("parts", "num_parts", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), 1, r"torch\.int64 of shape \(3,\).*to\(torch\.int32\)"),
        (torch.zeros(3), 1, "torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int32), 1, r"shape \(3, 1\)"),
        (assignment(0, 1, 2), 2, r"names part 2, but there are 2 parts.*\[0, 2\)"),
        (assignment(0, -1), 2, "names part -1"),
    ],
)
def test_bad_partitions_are_refused(parts: Tensor, num_parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(parts, num_parts)


def test_a_report_is_on_the_graph_that_was_partitioned() -> None:
    with pytest.raises(ValueError, match="assigns 3 nodes, but the graph has 4"):
        Partition(assignment(0, 0, 1), 2).report(path_graph(4))


def test_capacity_is_in_whole_nodes_and_everything_fits() -> None:
    assert part_capacity(1000, 8, slack=0.05) == 131  # 131.25
    assert part_capacity(10, 3, slack=0.0) == 4


def test_nothing_changes_a_partition_that_was_made() -> None:
    assignment = torch.tensor([0, 1, 1], dtype=torch.int32)
    partition = Partition(assignment, 2)
    assignment[0] = 9
    assert partition.counts().tolist() == [1, 2]
    partition.assignment[0] = 9  # nobody does; loops must not read beyond an array all the same
    with pytest.raises(ValueError, match="assignment names part 9"):
        partition.counts()
