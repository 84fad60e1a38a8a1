"""Blocks of senders ranked with the receivers of all ranks, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.links.best import Best
from lightning_gnn_dist.extensions.links.known import Known
from lightning_gnn_dist.extensions.links.scoring import Ends, Scorer
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.layers.row_table import RowTable
from lightning_gnn_dist.wire.channel import Channel


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
