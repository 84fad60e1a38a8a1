"""Tensors of unequal lengths that ranks send each other: what a step or a round has touched of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.octets import octets


@torch.no_grad()
def all_gather_pieces(pieces: Sequence[Tensor], lengths: Sequence[Sequence[int]] | None = None) -> list[list[Tensor]]:
    """The pieces of all ranks, on every rank: a list for each rank, in the order of ranks. Collective.

    Ranks pass equally many pieces, at least one, all on one device. A piece has the same type and the same shape on
    all ranks, but for its first dimension. No byte is sent to fill up the shorter ones.

    Args:
        pieces: This rank's.
        lengths: The lengths of the pieces of each rank, where all ranks know them. Otherwise a rank says them before.
    """
    if collectives.world_size() == 1:
        return [list(pieces)]
    if lengths is None:
        lengths = collectives.gather_numbers([len(piece) for piece in pieces], pieces[0].device)
    found = []
    for rank, of_rank in enumerate(lengths):
        is_own = rank == collectives.rank()
        theirs = [
            piece if is_own else piece.new_empty((length, *piece.shape[1:]))
            for piece, length in zip(pieces, of_rank, strict=True)
        ]
        if any(of_rank):
            collectives.broadcast_(theirs, source=rank)
        found.append(theirs)
    return found


@torch.no_grad()
def exchange_pieces(
    to_ranks: Sequence[Sequence[Tensor]], lengths: Sequence[Sequence[Sequence[int]]]
) -> list[list[Tensor]]:
    """Send ``to_ranks[i]`` to rank ``i``; return the pieces that each rank sent here. Collective.

    Args:
        to_ranks: For each rank the pieces, equally many for all. A piece has the same type and the same shape on all
            ranks, but for its first dimension.
        lengths: The lengths of the pieces that rank ``i`` sends to rank ``j``, as ``lengths[i][j]``. All ranks know
            them; where nobody sends another anything, nothing is exchanged.
    """
    rank, ranks = collectives.rank(), range(collectives.world_size())
    own = list(to_ranks[rank])
    if not any(sum(lengths[source][to]) for source in ranks for to in ranks if source != to):
        return [own if source == rank else [piece[:0] for piece in own] for source in ranks]
    widths = [piece.element_size() * math.prod(piece.shape[1:]) for piece in own]
    to_receive = [
        0
        if source == rank
        else sum(length * width for length, width in zip(lengths[source][rank], widths, strict=True))
        for source in ranks
    ]
    packed = [torch.cat([octets(piece[:0] if to == rank else piece) for piece in to_ranks[to]]) for to in ranks]
    received = Channel(None, collectives.world_size(), rank).exchange(packed, to_receive)
    return [own if source == rank else _unpacked(received[source], lengths[source][rank], own) for source in ranks]


def _unpacked(packed: Tensor, lengths: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the pieces that lie one after the other in ``packed``, copied: numbers must lie at their width."""
    found, start = [], 0
    for piece, length in zip(like, lengths, strict=True):
        made = piece.new_empty((length, *piece.shape[1:]))
        if made.numel():
            made.view(-1).view(torch.uint8).copy_(packed[start : start + made.nbytes])
        start += made.nbytes
        found.append(made)
    return found
