"""How the edges that leave a part are treated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_gnn_dist.checks import brief, check_instance
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import bytes_per_node
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.rules import Count, Fraction, Hops, Natural, check_fields
from lightning_gnn_dist.wire.shipments import Thrift

Every = Literal["round"]
EdgesInto: TypeAlias = Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]]


class Boundary(ABC):
    """What becomes of senders outside a part. To add a way, write a frozen dataclass with the method ``around``.

    Attributes:
        sees_whole_graph: Whether batches are drawn in the whole graph, and not in a part.
        exchanges: Whether ranks send each other rows in every step. A pass is then one batch, of the whole part.
        keeps_rows: Whether ranks compute rows for each other at meetings.
    """

    sees_whole_graph: ClassVar[bool] = False
    exchanges: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False

    @property
    def seed_hops(self) -> int:
        """How far from the part training nodes of other ranks are seeds of this one too."""
        return 0

    def check_fits(self, graph: Graph) -> None:  # noqa: B027  # optional
        """Refuse a graph that this way cannot handle."""

    @abstractmethod
    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        """Return the outside nodes that come along, hop by hop: ids of the whole graph.

        Nodes of the last hop send messages and receive none; all others receive from every node that is there.

        Args:
            graph: The whole graph.
            residents: The nodes of the part.
            edges_into: Yields the edges into some nodes, piece by piece: for each edge, the number of the node among
                these, and the sender.
            seed: Decides everything random.
        """


@dataclass(frozen=True)
class Isolated(Boundary):
    """Senders outside a part send nothing: the edges that leave it are left out."""

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Fetch(Boundary):
    """Senders outside a part are fetched for every batch, as if each rank could have all features.

    Batches are sampled around the part's training nodes in the whole graph. With DDP this is a baseline (GGS in the
    LLCG paper) and saves no memory. On shards it is what distributed samplers do: every step then waits for neighbours
    and features of other ranks.
    """

    sees_whole_graph = True

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return []  # nobody trains on such a part


@dataclass(frozen=True)
class Halo(Boundary):
    """Senders outside a part come along, as copies of their rows: the halo of the part.

    With ``hops=1`` these are the in-neighbours of the part's nodes, so that each node of the part has all of its own
    in-neighbours. They send messages and receive none. With ``hops=2`` they receive as well, and their in-neighbours
    come along in turn; and so on. With as many hops as the model has layers, a part's nodes see all that they would see
    in the whole graph. For chunks drawn at random, and mostly for two hops or more, that is nearly the whole graph on
    every rank, so two limits are offered.

    Args:
        hops: How far from the part's nodes others come along. More hops than the model has layers are of no use.
        bytes: Most bytes that the arrays of these nodes may take. Nearer hops come first, and of a hop the nodes with
            the most edges into the hop before.
        neighbors: Most of them that each node brings along: the first in one random order of all outside senders.
        seed_hops: How far from the part's nodes training nodes are seeds of this rank too, beside their own rank's.
            Replicas then learn from more of the same nodes, so they drift apart less, and no byte is sent. Each pass
            draws as many seeds as the part has, from its own and these. It takes a strategy of rounds, and parts for
            good of a graph without types.
    """

    hops: Hops = 1
    bytes: Count | None = None
    neighbors: Count | None = None
    seed_hops: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed_hops >= self.hops:
            raise ValueError(
                f"seed_hops ({self.seed_hops}) must be below hops ({self.hops}), as nodes of the last hop receive "
                f"nothing that a seed could learn from: Halo({self.seed_hops + 1}, seed_hops={self.seed_hops}) has one "
                "hop more."
            )

    def check_fits(self, graph: Graph) -> None:
        per_node = bytes_per_node(graph)
        if self.bytes is not None and self.bytes < per_node:
            raise ValueError(
                f"{self} has no room for a single node, whose arrays take {per_node} "
                "bytes: allow more, or leave the halo out."
            )

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        room = None if self.bytes is None else self.bytes // bytes_per_node(graph)
        held = [residents]
        while len(held) <= self.hops and held[-1].numel():
            known = Lookup(torch.cat(held))
            pieces = [_left_out(known, *piece) for piece in edges_into(held[-1])]
            if self.neighbors is None:
                nodes, edges = _counted([senders.unique(return_counts=True) for _, senders in pieces])
            else:
                rows, senders = (torch.cat([held[0][:0], *column]) for column in zip(*pieces, strict=True))
                nodes, edges = _some_of_each_row(rows, senders, self.neighbors, seed).unique(return_counts=True)
            if room is not None:
                nodes = nodes[edges.argsort(descending=True, stable=True)[:room]].sort().values
                room -= nodes.numel()
            held.append(nodes)
        return held[1:]


@dataclass(frozen=True, repr=False, kw_only=True)
class Exchange(Boundary):
    """Senders outside a part are computed by the ranks that own them, layer by layer, in every step.

    Before each layer but the first, ranks send each other the rows that the layer before has made of the nodes at the
    boundary; in the backward pass the gradients go back. So a step on all parts is the step of one process on the whole
    graph, however the graph is cut, if ``training_step`` returns the mean of a loss of each seed. No step sends
    features: those of the nodes at the boundary are read once, when the fit starts, from the graph, or on shards from
    the ranks that own them.

    It takes ``sampler=WholePartSampler(num_layers)``, a module with a method ``layers`` (see :func:`through_layers`),
    and a strategy that exchanges gradients at every step: :class:`GrappaStrategy` or DDP. A pass is one step, on all
    training nodes.

    Args:
        every: Steps for which received rows are used: with ``every=5`` rows and gradients are sent in one step of five,
            and rows are up to four steps old. Gradients are added in that step alone.
        overlap: Whether a step uses what was sent in the step before, while its own rows are under way. So no step but
            the first waits for the wire, and rows and gradients are a step older than without (PipeGCN).
        share: The share of the rows, in (0, 1], that two ranks send each other, with their gradients: as many of those
            that they share, drawn anew each time, and multiplied so that sums and means over neighbours are right in
            the mean (BNS-GCN). The others are zero in that step, which is not for attention or maxima.
    """

    every: Count = 1
    overlap: bool = False
    share: Fraction = 1.0
    exchanges = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.share == 0:
            raise ValueError("share=0.0 sends no row at all: take boundary=Isolated(), or a share above 0.")

    def __repr__(self) -> str:
        return brief(self)

    @property
    def thrift(self) -> Thrift:
        """How it saves bytes and time."""
        return Thrift(self.every, self.overlap, self.share)

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return Halo().around(graph, residents, edges_into, seed)


@dataclass(frozen=True)
class History(Boundary):
    """Senders outside a part are known by the rows that their owners computed at the last meeting.

    At a meeting of a strategy of rounds, once replicas are equal, the ranks compute the nodes at the boundary together,
    layer by layer and exactly, without dropout: each rank those that it owns. In the local steps that follow, these are
    the rows that the layers behind the first read of nodes outside the part, and no gradient goes through them (DIGEST,
    arXiv:2206.00057; GNNAutoScale, arXiv:2106.05609). Their input rows are read from the graph together with the part.
    So a node of the part sees all its neighbours in every layer, and between meetings nothing is sent.

    A node belongs to the rank whose training nodes are in its chunk. A rank that holds another chunk beside, as with
    :class:`Rotate`, computes its nodes for itself, as they receive from all their in-neighbours too; so are
    ``extra_nodes``. Only nodes that nobody here computes have rows of the last meeting.

    It takes a module with a method ``layers`` (see :func:`through_layers`) and a strategy of rounds, such as
    :class:`LocalSGDStrategy`, :class:`LLCGStrategy` or :class:`TMAStrategy`. Parts may change at meetings alone.

    Args:
        every: When rows are computed anew: at the end of every ``"round"``.
    """

    every: Every = "round"
    keeps_rows = True

    def __post_init__(self) -> None:
        check_fields(self)

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return Halo().around(graph, residents, edges_into, seed)


def check_boundary(boundary: object) -> None:
    """Refuse a value that is no ``Boundary``."""
    check_instance("boundary", boundary, Boundary, "an object such as Isolated(), Halo() or Exchange()")


def _left_out(known: Lookup, rows: Tensor, senders: Tensor) -> tuple[Tensor, Tensor]:
    """Return the edges from unknown senders."""
    outside = ~known.contains(senders)
    return rows[outside], senders[outside]


def _counted(pieces: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the distinct nodes of several pieces, increasing, and the sums of their counts."""
    nodes, at = torch.cat([ids for ids, _ in pieces]).unique(return_inverse=True)
    return nodes, torch.zeros_like(nodes).index_add_(0, at, torch.cat([counts for _, counts in pieces]))


def _some_of_each_row(row: Tensor, senders: Tensor, limit: int, seed: int) -> Tensor:
    """Return, of each row, the ``limit`` senders that come first in one random order of all senders."""
    distinct, which = senders.unique(return_inverse=True)
    by_order = permutation(distinct.numel(), seed + Purpose.SURROUNDINGS, -1)[which].argsort()
    by_row = by_order[row[by_order].argsort(stable=True)]
    row = row[by_row]
    begin = torch.searchsorted(row, row)  # of each entry's row
    return senders[by_row][torch.arange(row.numel()) - begin < limit]
