"""The best receivers of blocks of senders, as those of all ranks come chunk by chunk, without pairs that are links.

Receivers with a higher score come first, and of equal scores those with the lower id, in whichever pieces they come. A
score of minus infinity is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.links.edges import LinkEnds
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.scoring import Ends, Scorer
from lightning_gnn_dist.extensions.passes.row_table import Ids, RowTable
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import (
    Lookup,
    degrees_of,
    row_pieces,
)
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.layers.layer_pass import ids_of
from lightning_gnn_dist.wire.channel import Channel

NONE = -1  # the id where a sender has no more receivers


class Best(NamedTuple):
    """The best receivers of some senders.

    Attributes:
        ids: The receivers of each sender, the best first, shape ``(n, k)``; -1 where there are fewer.
        scores: Their scores.
    """

    ids: Tensor
    scores: Tensor

    @classmethod
    def none(cls, num_senders: int, k: int, like: Tensor) -> Best:
        """No receivers yet, with scores of the type and on the device of some tensor."""
        scores = like.new_full((num_senders, k), -math.inf)
        return cls(torch.full_like(scores, NONE, dtype=torch.int64), scores)

    def or_better(self, ids: Tensor, scores: Tensor) -> Best:
        """Return the best of these and of further receivers.

        Args:
            ids: The further receivers, increasing, shape ``(m,)``.
            scores: Their scores for each sender, shape ``(n, m)``.
        """
        at = highest(scores, self.ids.shape[1])
        found = Best(ids[at], scores.gather(1, at))
        return self.joined([found])

    def joined(self, others: list[Best]) -> Best:
        """Return the best of these and of others that were found for the same senders."""
        parts, k = [self, *others], self.ids.shape[1]
        ids, scores = torch.cat([part.ids for part in parts], 1), torch.cat([part.scores for part in parts], 1)
        by_id = ids.argsort(1)
        ids, scores = ids.gather(1, by_id), scores.gather(1, by_id)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        ids, scores = ids.gather(1, order), scores.gather(1, order)
        return Best(ids.masked_fill(scores == -math.inf, NONE), scores)

    def of(self, senders: slice) -> Best:
        """Return those of some senders."""
        return Best(self.ids[senders], self.scores[senders])


def highest(scores: Tensor, k: int) -> Tensor:
    """Return where the ``k`` highest scores of each row stand, in any order: of equal ones the first."""
    if scores.shape[1] <= k:
        return torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    top = scores.topk(k + 1)
    at, values = top.indices[:, :k], top.values
    is_open = (values[:, k] == values[:, k - 1]) & (values[:, k] > -math.inf)  # which of them topk takes is not said
    if bool(is_open.any()):
        at[is_open] = scores[is_open].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return at


LeftOut = Literal["edges", "val", "test", "self"]


class Known(NamedTuple):
    """The links into the nodes of a rank.

    Attributes:
        rows: The graph, or the own shard, whose rows list the senders to each node.
        at: Returns the rows of own nodes.
        edge_type: The number of the links' type, or None where all edges are links.
        held: Links that are held back, by ids in the graph, shape ``(2, n)``, in the order of receivers.
        has_edges: Whether edges of the graph are left out.
        has_self: Whether a node is left out for itself.
    """

    rows: Graph
    at: Callable[[Ids], Ids]
    edge_type: int | None
    held: Tensor
    has_edges: bool
    has_self: bool

    def leave_out_(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        """Set the scores of pairs that are links to minus infinity.

        Args:
            scores: The scores of each sender and receiver.
            senders: Finds the senders.
            receivers: The receivers, some of the rank's own.
        """
        if self.has_edges:
            self._leave_edges_out(scores, senders, receivers)
        if self.has_self:
            _leave_out(scores, senders, receivers, torch.arange(len(receivers)))
        if self.held.shape[1]:
            self._leave_held_out(scores, senders, receivers)

    def _are_links(self, positions: Tensor) -> Tensor | slice:
        """Return which of the edges at some positions are of the links' type."""
        return slice(None) if self.edge_type is None else self.rows.types.edge_type[positions] == self.edge_type

    def _leave_held_out(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        least, most = receivers.aminmax()
        first, last = torch.searchsorted(self.held[1], torch.stack([least, most + 1])).tolist()
        column, is_here = Lookup(receivers)(self.held[1, first:last].contiguous())
        _leave_out(scores, senders, self.held[0, first:last][is_here], column)

    def _leave_edges_out(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        first, indptr = 0, self.rows.indptr
        for nodes, positions in row_pieces(indptr, ids_of(self.at(receivers))):
            column = torch.arange(first, first + len(nodes)).repeat_interleave(degrees_of(indptr, nodes))
            first += len(nodes)
            sender, is_link = self.rows.indices[positions].to(torch.int64), self._are_links(positions)
            _leave_out(scores, senders, sender[is_link], column[is_link])


def _leave_out(scores: Tensor, senders: Lookup, sender: Tensor, column: Tensor) -> None:
    row, is_asked = senders(sender)
    scores[row.to(scores.device), column[is_asked].to(scores.device)] = -math.inf


def held_links(split: LinkSplit, ends: LinkEnds, names: tuple[LeftOut, ...]) -> Tensor:
    """Return the held links of some names by ids in the graph, in the order of receivers, of both directions."""
    some = [ends.in_graph(edges) for name, edges in split.edges.items() if name in names]
    found = torch.cat([torch.empty((2, 0), dtype=torch.int64), *some], 1)
    found = torch.cat([found, found.flip(0)], 1) if split.undirected else found
    return found[:, found[1].argsort(stable=True)]


class Nodes(NamedTuple):
    """Some nodes of one type.

    Attributes:
        nodes: Their ids in the graph, or in its shards.
        ids: Their ids in their type.
    """

    nodes: Tensor
    ids: Tensor


class Found(NamedTuple):
    """The best links of some senders.

    Attributes:
        places: Where each sender stands among those that were asked for.
        best: Its best receivers.
    """

    places: Tensor
    best: Best


@dataclass(frozen=True)
class Ranking:
    """What a rank ranks.

    Attributes:
        channel: The ranks.
        by_owner: Divides increasing nodes by the rank that has their rows.
        senders: The rows of senders of this rank.
        receivers: The rows of its receivers.
        own: Its receivers, in the order of their ids in their type.
        known: The pairs that are left out.
        scorer: Scores pairs.
        k: How many receivers to find for each sender.
        device: The device that computes.
        in_place: Whether rows of receivers, which follow each other, are scored where they lie, and not copied.
    """

    channel: Channel
    by_owner: Callable[[Tensor], list[Tensor]]
    senders: RowTable
    receivers: RowTable
    own: Nodes
    known: Known
    scorer: Scorer
    k: int
    device: torch.device
    in_place: bool = False

    def none(self, num_senders: int) -> Best:
        """Return no receivers of so many senders."""
        dtype = torch.float64 if self.receivers.like.dtype == torch.float64 else torch.float32
        return Best.none(num_senders, self.k, torch.empty(0, dtype=dtype, device=self.device))

    def blocks(self, asked: Nodes, places: Tensor, at_once: int, chunk: int) -> Iterator[Found]:
        """Yield this rank's share of each block of senders. Collective.

        Args:
            asked: The senders of all ranks, in the order of ``nodes``.
            places: Where each of them stands among those that were asked for.
            at_once: The senders of a block.
            chunk: The receivers that they are scored with at a time.
        """
        for start in range(0, len(places), at_once):
            some = asked.nodes[start : start + at_once]
            nodes, rows = self._rows(some)
            at = start + torch.searchsorted(some, nodes)
            best = self.ranked(Nodes(nodes, asked.ids[at]), rows, chunk)
            shares = [share_of(len(at), self.channel.size, rank) for rank in range(self.channel.size)]
            own = shares[self.channel.rank]
            yield Found(places[at[own.start : own.stop]], self._joined(best, shares))

    def _rows(self, some: Tensor) -> tuple[Tensor, Tensor]:
        """Return some senders and their rows, in the order of the ranks that have them. Collective."""
        pieces = self.by_owner(some)
        own = self.senders.take(pieces[self.channel.rank]).to(self.channel.device)
        rows = self.channel.exchange([own] * self.channel.size, [len(piece) for piece in pieces])
        return torch.cat(pieces), torch.cat(rows).to(self.device)

    def ranked(self, senders: Nodes, rows: Tensor, chunk: int) -> Best:
        """Return the best of the own receivers for each sender."""
        best, lookup = self.none(len(rows)), Lookup(senders.nodes)
        take = self.receivers.take_run if self.in_place else self.receivers.take
        ends = Ends(senders.ids.to(self.device), rows)
        for nodes, ids in zip(self.own.nodes.split(chunk), self.own.ids.to(self.device).split(chunk), strict=True):
            if not len(nodes):
                break  # a rank without receivers
            scores = self.scorer(ends, Ends(ids, take(nodes).to(self.device)))
            scores = scores.detach().to(best.scores.dtype).contiguous()
            self.known.leave_out_(scores, lookup, nodes)
            best = best.or_better(ids, scores)
        if bool(best.scores.isnan().any()):
            sender = int(senders.ids[best.scores.isnan().any(1).cpu()][0])
            raise ValueError(f"The score of sender {sender} with a receiver is NaN, which has no place in any order.")
        return best

    def _joined(self, best: Best, shares: list[range]) -> Best:
        """Return the best receivers of all ranks for this rank's share of a block. Collective."""
        if len(shares) == 1:
            return best
        channel, own = self.channel, self.channel.rank
        found = [
            channel.exchange(
                [array[share.start : share.stop].to(channel.device) for share in shares],
                [len(shares[own])] * len(shares),
            )
            for array in best
        ]
        of_ranks = [Best(ids, scores) for ids, scores in zip(*found, strict=True)]
        return of_ranks[own].joined(of_ranks[:own] + of_ranks[own + 1 :])
