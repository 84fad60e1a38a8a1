"""Pieces of unequal lengths, on all ranks, and their bytes."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.pieces import all_gather_pieces
from tests.ranks import run_ranks


def pieces_of(rank: int) -> list[Tensor]:
    """Rank 1 has none."""
    ids = torch.arange(0 if rank == 1 else rank + 1, dtype=torch.int32)
    return [ids, torch.full((len(ids), 2), float(rank)), ids + 7]


def gather(rank: int, world_size: int) -> tuple[list[list[Tensor]], float]:
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    before = collectives.traffic.bytes_sent
    return all_gather_pieces(pieces_of(rank)), collectives.traffic.bytes_sent - before


def test_every_rank_has_the_pieces_of_all_and_sends_no_more() -> None:
    for found, sent in run_ranks(gather, 3):
        for rank, theirs in enumerate(found):
            assert all(torch.equal(one, other) for one, other in zip(theirs, pieces_of(rank), strict=True))
        assert sent == pytest.approx(2 * 3 * 8 + (1 + 3) * 16 * 2 / 3)  # the lengths, and four rows of 16 bytes
