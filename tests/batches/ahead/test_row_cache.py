"""The cache holds the rows that are needed soonest, never more than it may, and changes no row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import RowCache
from lightning_gnn_dist.batches.pool import gather_joined

NUM_NODES, NUM_BULKS = 1000, 40


def some_bulks() -> list[Tensor]:
    """Sets of nodes of which a few are in many, as in graphs with hubs."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(150, generator=generator).pow(2) * NUM_NODES for _ in range(NUM_BULKS)]
    return [draw.long().unique() for draw in draws]


def held_by_belady(num_rows: int, known: int) -> list[int]:
    """By hand: the hits in each bulk, where ids of smaller number win between equal next uses."""
    bulks, held, fetched, hits = some_bulks(), set[int](), set[int](), []
    for number, bulk in enumerate(bulks):
        coming = [set(ids.tolist()) for ids in bulks[number : number + known + 1]]

        def next_use(node: int, coming: list[set[int]] = coming) -> tuple[int, int]:
            return next((at for at, ids in enumerate(coming) if node in ids), len(coming)), node

        held = set(sorted(held | fetched, key=next_use)[:num_rows])
        hits.append(len(held & coming[0]))
        fetched = set(bulk.tolist()) - held
    return hits


@pytest.mark.parametrize("known", [0, 1, 8, NUM_BULKS])
@pytest.mark.parametrize("num_rows", [1, 100, 250, 500, 1000])
def test_it_holds_what_is_needed_soonest(num_rows: int, known: int) -> None:
    x = torch.randn(NUM_NODES, 3, generator=torch.Generator().manual_seed(1))
    arrays, none = {"x": x, "y": torch.arange(NUM_NODES)}, {"x": x[:0], "y": torch.arange(0)}
    cache = RowCache(none, num_rows, lambda ids: NUM_NODES - ids)
    bulks, hits = some_bulks(), []
    for number, bulk in enumerate(bulks):
        before = cache.hits
        places, missing = cache.look_up(bulk, bulks[number + 1 : number + known + 1])
        fetched = {name: array[missing] for name, array in arrays.items()}
        cache.offer(missing, fetched)
        hits.append(cache.hits - before)
        for name, array in arrays.items():
            assert gather_joined(none[name], cache.rows[name], fetched[name], places).equal(array[bulk])
    assert hits == held_by_belady(num_rows, known)
    assert cache.rows["x"].shape == (num_rows, 3) and cache.asked == sum(map(len, bulks))


def test_without_room_everything_is_fetched() -> None:
    cache = RowCache({"x": torch.empty(0, 2)}, 0)
    for bulk in some_bulks():
        places, missing = cache.look_up(bulk, [])
        cache.offer(missing, {"x": missing.view(-1, 1).expand(-1, 2).float()})
        assert missing[places].equal(bulk)
    assert cache.hits == 0
