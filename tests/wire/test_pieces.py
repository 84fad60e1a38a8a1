"""Pieces of unequal lengths, on all ranks, and their bytes."""

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces
from tests.ranks import join, run_ranks


def pieces_of(rank: int) -> list[Tensor]:
    """Rank 1 has none."""
    ids = torch.arange(0 if rank == 1 else rank + 1, dtype=torch.int32)
    return [ids, torch.full((len(ids), 2), float(rank)), ids + 7]


def gather(rank: int, world_size: int) -> tuple[list[list[Tensor]], float]:
    join(rank, world_size)
    before = collectives.traffic.bytes_sent
    return all_gather_pieces(pieces_of(rank)), collectives.traffic.bytes_sent - before


def test_every_rank_has_the_pieces_of_all_and_sends_no_more() -> None:
    for found, sent in run_ranks(gather, 3):
        for rank, theirs in enumerate(found):
            assert all(torch.equal(one, other) for one, other in zip(theirs, pieces_of(rank), strict=True))
        assert sent == pytest.approx(2 * 3 * 8 + (1 + 3) * 16 * 2 / 3)  # the lengths, and four rows of 16 bytes


# How many rows a rank sends to each; rank 1 sends nothing to anybody, and nobody sends rank 2 any.
COUNTS = [[2, 3, 0], [0, 0, 0], [1, 0, 4]]


def for_rank(source: int, to: int) -> list[Tensor]:
    ids = torch.arange(COUNTS[source][to], dtype=torch.int32) + 10 * source + to
    return [ids, ids[:, None].double() / 3, ids.to(torch.int8)]  # numbers of unequal widths, one after the other


def exchange(rank: int, world_size: int, counts: list[list[int]]) -> tuple[list[list[Tensor]], float]:
    join(rank, world_size)
    before = collectives.traffic.bytes_sent
    lengths = [[[count] * 3 for count in of_source] for of_source in counts]
    sent = [[piece[: counts[rank][to]] for piece in for_rank(rank, to)] for to in range(world_size)]
    return exchange_pieces(sent, lengths), collectives.traffic.bytes_sent - before


def test_every_rank_has_what_was_sent_to_it_alone() -> None:
    for rank, (found, sent) in enumerate(run_ranks(exchange, 3, COUNTS)):
        for source, pieces in enumerate(found):
            assert all(torch.equal(one, other) for one, other in zip(pieces, for_rank(source, rank), strict=True))
        assert sent == sum(COUNTS[rank][to] for to in range(3) if to != rank) * (4 + 8 + 1)


@pytest.mark.slow
def test_nothing_is_sent_where_ranks_keep_what_they_have() -> None:
    counts = [[COUNTS[rank][to] if rank == to else 0 for to in range(3)] for rank in range(3)]
    for rank, (found, sent) in enumerate(run_ranks(exchange, 3, counts)):
        assert sent == 0 and [len(pieces[0]) for pieces in found] == [counts[source][rank] for source in range(3)]
