"""Tensors that all ranks get from each, of unequal lengths: what a step or a round has touched of a table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives


@torch.no_grad()
def all_gather_pieces(pieces: Sequence[Tensor]) -> list[list[Tensor]]:
    """The pieces of all ranks, on every rank: a list for each rank, in the order of ranks. Collective.

    Ranks pass equally many pieces, at least one, all on one device. A piece has the same type and the same shape on
    all ranks, but for its first dimension. No byte is sent to fill up the shorter ones; a rank says the lengths before.
    """
    if collectives.world_size() == 1:
        return [list(pieces)]
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
