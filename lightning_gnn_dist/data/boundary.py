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
    """What becomes of senders that lie outside a part. A new way is a frozen dataclass with these two methods."""

    def check_fits(self, graph: Graph) -> None:  # noqa: B027  # most fit all graphs
        """Refuse a graph for which it can do nothing."""

    @abstractmethod
    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        """The nodes around ``residents``, whose rows are given, that come along to send: in increasing order."""


@dataclass(frozen=True)
class Isolated(Boundary):
    """Senders outside a part send nothing: the edges that leave it are left out."""

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        return residents[:0]


@dataclass(frozen=True)
class Fetch(Boundary):
    """Senders outside a part are fetched for every batch, as if each rank could have all features.

    Batches are sampled around the part's training nodes in the whole graph. With DDP that is a baseline (the LLCG
    paper's GGS) and no way to save memory; on shards it is what distributed samplers do, and every step then waits for
    neighbours and features of other ranks.
    """

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        return residents[:0]  # of a part that nobody trains on


@dataclass(frozen=True)
class Halo(Boundary):
    """Senders outside a part come along as leaves: they send and receive nothing.

    With all of them every node sees its whole neighbourhood, one hop far. For chunks drawn at random that is nearly
    the whole graph on every rank, hence the two limits.

    Args:
        hops: 1: the in-neighbours of the part's nodes.
        bytes: Limits the memory of their arrays. Those with the most edges into the part come first.
        neighbors: Leaves that a node may ask for; which, is drawn at random, alike for all nodes of the part.
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
    """Refuse what is no way to treat one."""
    check_instance("boundary", boundary, Boundary, "an object such as Isolated(), Halo() or Fetch()")


def _some_of_each_row(row: Tensor, senders: Tensor, limit: int, seed: int) -> Tensor:
    """Of each row's entries the ``limit`` that come first in an order of all of them."""
    distinct, which = senders.unique(return_inverse=True)
    by_order = permutation(distinct.numel(), seed + Purpose.SURROUNDINGS, -1)[which].argsort()
    by_row = by_order[row[by_order].argsort(stable=True)]
    row = row[by_row]
    begin = torch.searchsorted(row, row)  # of each entry's row
    return senders[by_row][torch.arange(row.numel()) - begin < limit]
