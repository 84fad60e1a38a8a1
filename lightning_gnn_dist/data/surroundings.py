"""Nodes from elsewhere that come along with a rank's chunks: to send messages, not to be learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least_if_given, check_between, check_choice, is_integer, shown
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.partition.base import Partition

_PURPOSE = 1 << 42  # added to the seed, so that these draws have nothing to do with others


@dataclass(frozen=True)
class ExtraNodes:
    """Random nodes of other parts, with the edges among all that is there: the LLCG paper's subgraph approximation.

    Args:
        share: How many, as a share of the nodes that ``of`` names.
        of: ``"part"`` or ``"graph"``.
        seed: Decides which; the same in every run.
    """

    share: float
    of: Scope
    seed: int

    def __post_init__(self) -> None:
        check_choice("extra_of", self.of, Scope)
        check_between(0, 1, extra_nodes=self.share)

    def __call__(self, residents: Tensor, partition: Partition, rank: int) -> Tensor:
        if not self.share:
            return torch.empty(0, dtype=torch.int64)
        num_nodes = partition.assignment.numel()
        outside = torch.ones(num_nodes, dtype=torch.bool).index_fill_(0, residents, False).nonzero().view(-1)
        base = residents.numel() if self.of == "part" else num_nodes
        count = min(round(self.share * base), outside.numel())
        return outside[permutation(outside.numel(), self.seed + _PURPOSE, rank)[:count]]


@dataclass(frozen=True)
class Halo:
    """The in-neighbours of a rank's nodes that lie elsewhere, as leaves: they send and receive nothing.

    With all of them every node sees its whole neighbourhood, one hop far. For chunks drawn at random that is nearly
    the whole graph on every rank, hence the two limits.

    Args:
        hops: 0 (none) or 1.
        max_bytes: For the arrays of leaves. Those with the most edges into the part come first.
        max_neighbors: Leaves that a node may ask for; which, is drawn at random, alike for all nodes of the part.
    """

    hops: Literal[0, 1] = 0
    max_bytes: int | None = None
    max_neighbors: int | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.hops) or self.hops not in (0, 1):
            raise ValueError(
                f"halo must be 0 or 1 hop, got {shown(self.hops)}: farther nodes are another rank's business."
            )
        check_at_least_if_given(1, halo_bytes=self.max_bytes, halo_neighbors=self.max_neighbors)
        for name, limit in (("halo_bytes", self.max_bytes), ("halo_neighbors", self.max_neighbors)):
            if limit is not None and not self.hops:
                raise ValueError(f"{name}={limit} limits a halo, and there is none: set halo=1.")

    def check_fits(self, graph: Graph) -> None:
        """A limit must leave room for a node."""
        if self.max_bytes is not None and self.max_bytes < _bytes_of_node(graph):
            raise ValueError(
                f"halo_bytes={self.max_bytes} has no room for a single node, whose arrays take {_bytes_of_node(graph)} "
                "bytes: allow more, or leave the halo out (halo=0)."
            )

    def leaves(self, graph: Graph, residents: Tensor, indptr: Tensor, senders: Tensor, seed: int) -> Tensor:
        """The leaves around ``residents``, whose rows are given, in increasing order."""
        if not self.hops:
            return residents[:0]
        row = torch.arange(residents.numel()).repeat_interleave(indptr.diff())
        outside = ~Lookup(residents).contains(senders.to(torch.int64))
        row, asked = row[outside], senders[outside].to(torch.int64)
        if self.max_neighbors is not None:
            asked = _some_of_each_row(row, asked, self.max_neighbors, seed)
        leaves: Tensor
        leaves, edges = asked.unique(return_counts=True)
        if self.max_bytes is not None:
            most = edges.argsort(descending=True, stable=True)[: self.max_bytes // _bytes_of_node(graph)]
            leaves = leaves[most].sort().values
        return leaves


def _bytes_of_node(graph: Graph) -> int:
    return sum(array[:1].numel() * array.element_size() for array in graph.node_arrays.values())


def _some_of_each_row(row: Tensor, senders: Tensor, limit: int, seed: int) -> Tensor:
    """Of each row's entries the ``limit`` that come first in an order of all of them."""
    distinct, which = senders.unique(return_inverse=True)
    by_order = permutation(distinct.numel(), seed + _PURPOSE, -1)[which].argsort()
    by_row = by_order[row[by_order].argsort(stable=True)]
    row = row[by_row]
    begin = torch.searchsorted(row, row)  # of each entry's row
    return senders[by_row][torch.arange(row.numel()) - begin < limit]
