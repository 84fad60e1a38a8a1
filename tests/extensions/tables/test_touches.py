"""Who puts together the rows that ranks have touched: one of those that have touched each, known with two waits."""

from __future__ import annotations

import pytest
import torch

from lightning_gnn_dist.extensions.tables.exchange import Touches

OF_RANKS = [[0, 2, 3, 7, 8], [], [2, 3, 4, 8, 9, 11], [3, 7]]


def by_hand() -> tuple[list[list[int]], dict[tuple[int, int], list[int]]]:
    """The ids of each home, and the places, in what a rank has touched, of those that it sends to each home."""
    homes: list[list[int]] = [[] for _ in OF_RANKS]
    places: dict[tuple[int, int], list[int]] = {(i, j): [] for i in range(4) for j in range(4)}
    for row in range(12):
        ranks = [rank for rank, ids in enumerate(OF_RANKS) if row in ids]
        if ranks:
            home = ranks[row % len(ranks)]
            homes[home].append(row)
            for rank in ranks:
                places[rank, home].append(OF_RANKS[rank].index(row))
    return homes, places


def check(device: str) -> None:
    touches = Touches([torch.tensor(ids, dtype=torch.int64, device=device) for ids in OF_RANKS])
    homes, places = by_hand()
    assert touches.ids.tolist() == sorted({row for ids in OF_RANKS for row in ids})
    assert [touches.of_home(home).tolist() for home in range(4)] == homes
    assert touches.ids[touches.by_home].tolist() == [row for ids in homes for row in ids]
    for (source, home), expected in places.items():
        assert touches.sent(source, home).tolist() == expected
        assert touches.num_sent[source][home] == len(expected)


def test_homes_are_those_by_hand() -> None:
    check("cpu")


@pytest.mark.gpu
def test_homes_on_a_gpu_too() -> None:
    check("cuda")


@pytest.mark.gpu
def test_the_host_waits_for_the_number_of_ids_and_for_counts() -> None:
    notes = pytest.importorskip("pretend", reason="only pretended devices count how often the host waits").notes
    of_ranks = [torch.tensor(ids, dtype=torch.int64, device="cuda") for ids in OF_RANKS]
    notes.clear()
    touches = Touches(of_ranks)
    for rank in range(4):
        touches.of_home(rank), [touches.sent(rank, home) for home in range(4)]
    assert sum(times for (kind, _, _), times in notes.items() if kind == "sync") == 2, notes
