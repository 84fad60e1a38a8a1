"""Partitions, which put every node in exactly one part, and the partitioners that make them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_below, check_instance, check_plain, check_seed, check_tensor
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.names import extension

if TYPE_CHECKING:
    from lightning_gnn_dist.partition.partition_report import PartitionReport

MAX_EMPTY_PARTS = 1 << 20  # or as many as nodes: more parts than both are a mistake
MAX_SHARE = 1_000_000  # largest imbalance or slack: METIS counts it in thousandths, in 32 bits


@dataclass(frozen=True, eq=False)
class Partition:
    """Which part each node belongs to.

    Args:
        assignment: The part of each node, int32, shape ``(N,)``. Copied, so that nothing changes it later.
        num_parts: How many parts there are. A part may be empty; no partitioner here leaves one empty.
    """

    assignment: Tensor
    num_parts: int

    def __post_init__(self) -> None:
        check_at_least(1, num_parts=self.num_parts)
        check_tensor("assignment", self.assignment, "torch.int32, the part of each node")
        if self.assignment.dtype != torch.int32 or self.assignment.dim() != 1:
            raise ValueError(
                "assignment must be a vector of torch.int32, one entry per node, got "
                f"{self.assignment.dtype} of shape {tuple(self.assignment.shape)}: convert it with "
                "assignment.to(torch.int32).view(-1)."
            )
        check_plain("assignment", self.assignment)
        most = max(MAX_EMPTY_PARTS, self.assignment.numel())
        check_at_least(1, most=most, num_parts=self.num_parts)
        object.__setattr__(self, "assignment", self.assignment.clone())  # 0.3 s for 10^8 nodes
        self._check_range()

    def _check_range(self) -> None:
        if self.assignment.numel() == 0:
            return
        low, high = (int(bound) for bound in self.assignment.aminmax())
        if low < 0 or high >= self.num_parts:
            raise ValueError(
                f"assignment names part {low if low < 0 else high}, but there are {self.num_parts} parts: "
                f"part ids must lie in [0, {self.num_parts})."
            )

    def nodes(self, part: int) -> Tensor:
        """The nodes of ``part``, in increasing order."""
        check_below(self.num_parts, "parts", part=part)
        return (self.assignment == part).nonzero().view(-1)

    def counts(self) -> Tensor:
        """How many nodes each part holds, int64, shape ``(P,)``."""
        self._check_range()
        return torch.bincount(self.assignment, minlength=self.num_parts)

    def report(self, graph: Graph) -> PartitionReport:
        """Measure what this partition does to ``graph``: cut edges, halo, label skew. Reads the edges twice."""
        check_instance("graph", graph, Graph, "a Graph")
        if graph.num_nodes != self.assignment.numel():
            raise ValueError(
                f"The partition assigns {self.assignment.numel()} nodes, but the graph has "
                f"{graph.num_nodes}: report on the graph that was partitioned."
            )
        graph.check_whole()
        self._check_range()
        kind: type[PartitionReport] = extension("report of a partition").PartitionReport
        return kind.of(graph, self.assignment, self.num_parts)


class Partitioner(Protocol):
    """Maps every node of a graph to a part.

    To write one, make a frozen dataclass whose fields are its settings and give it this one method. Its
    result must depend on the settings and the three arguments alone: ranks that never talk to each other
    rely on it, and so does the cache. Call :func:`check_request` first.
    """

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition: ...


Cut = Partitioner | Partition | Literal["auto"] | None  # what a data module is told to cut by


def check_request(graph: Graph, num_parts: int, seed: int) -> None:
    """Refuse arguments that no partitioner can work with, such as more parts than nodes."""
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    check_at_least(1, num_parts=num_parts)
    check_seed(seed)
    if num_parts > graph.num_nodes:
        raise ValueError(
            f"num_parts ({num_parts}) must not exceed the graph's nodes ({graph.num_nodes}): "
            "every part needs a node. Ask for fewer parts."
        )


def part_capacity(count: int, num_parts: int, slack: float) -> int:
    """How many of ``count`` things a part may hold: ``(1 + slack)`` times the average, in whole things."""
    return max(ceil(count / num_parts), int((1 + slack) * count / num_parts))


def learned_from(part: Graph, seeds: str | None) -> Tensor:
    """Return which nodes of a part are training nodes: a boolean for each.

    All are where no mask tells, as in a graph whose edges are split.

    Args:
        part: The part.
        seeds: The node type that is learned from, if one was chosen.
    """
    types = part.types if seeds is None else part.types.with_seeds(seeds)
    is_marked = any("train_mask" in arrays for arrays in types.node_arrays.values())
    found = torch.full((part.num_nodes,), not is_marked)
    if is_marked:
        found[types.split("train")] = True
    return found
