"""How the edges that leave a part are treated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least_if_given, check_instance, is_integer, make_plain, shown
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, bytes_per_row


class Boundary(ABC):
    """What becomes of senders outside a part. To add a way, write a frozen dataclass with the method ``leaves``."""

    def check_fits(self, graph: Graph) -> None:  # noqa: B027  # optional
        """Refuse a graph that this way cannot handle."""

    @abstractmethod
    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        """Return the outside nodes that come along to send to ``residents``: ids of the whole graph, increasing."""


@dataclass(frozen=True)
class Isolated(Boundary):
    """Senders outside a part send nothing: the edges that leave it are left out."""

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        return residents[:0]


@dataclass(frozen=True)
class Fetch(Boundary):
    """Senders outside a part are fetched for every batch, as if each rank could have all features.

    Batches are sampled around the part's training nodes in the whole graph. With DDP this is a baseline (GGS in the
    LLCG paper) and saves no memory. On shards it is what distributed samplers do: every step then waits for neighbours
    and features of other ranks.
    """

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        return residents[:0]  # nobody trains on such a part


@dataclass(frozen=True)
class Halo(Boundary):
    """Senders outside a part come along as leaves: they send messages, and receive none.

    With all of them, every node of the part has all of its in-neighbours. For chunks drawn at random that is nearly
    the whole graph on every rank, so two limits are offered.

    Args:
        hops: Only 1, the in-neighbours of the part's nodes.
        bytes: Most bytes that the leaves' arrays may take. Leaves with the most edges into the part come first.
        neighbors: Most leaves that each node brings along: the first in one random order of all outside senders.
    """

    hops: Literal[1] = 1
    bytes: int | None = None
    neighbors: int | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.hops) or self.hops != 1:
            raise ValueError(f"hops must be 1, got {shown(self.hops)}: farther nodes are another rank's business.")
        check_at_least_if_given(1, bytes=self.bytes, neighbors=self.neighbors)
        make_plain(self)

    def check_fits(self, graph: Graph) -> None:
        per_node = bytes_per_row(graph.node_arrays)
        if self.bytes is not None and self.bytes < per_node:
            raise ValueError(
                f"Halo(bytes={self.bytes}) has no room for a single node, whose arrays take {per_node} "
                "bytes: allow more, or leave the halo out."
            )

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        row = torch.arange(residents.numel()).repeat_interleave(indptr.diff())
        outside = ~Lookup(residents).contains(senders.to(torch.int64))
        row, asked = row[outside], senders[outside].to(torch.int64)
        if self.neighbors is not None:
            asked = _some_of_each_row(row, asked, self.neighbors, seed)
        leaves: Tensor
        leaves, edges = asked.unique(return_counts=True)
        if self.bytes is not None:
            most = edges.argsort(descending=True, stable=True)[: self.bytes // bytes_per_row(graph.node_arrays)]
            leaves = leaves[most].sort().values
        return leaves


def check_boundary(boundary: object) -> None:
    """Refuse a value that is no ``Boundary``."""
    check_instance("boundary", boundary, Boundary, "an object such as Isolated(), Halo() or Fetch()")


def _some_of_each_row(row: Tensor, senders: Tensor, limit: int, seed: int) -> Tensor:
    """Return, of each row, the ``limit`` senders that come first in one random order of all senders."""
    distinct, which = senders.unique(return_inverse=True)
    by_order = permutation(distinct.numel(), seed + Purpose.SURROUNDINGS, -1)[which].argsort()
    by_row = by_order[row[by_order].argsort(stable=True)]
    row = row[by_row]
    begin = torch.searchsorted(row, row)  # of each entry's row
    return senders[by_row][torch.arange(row.numel()) - begin < limit]
