"""Ranges of nodes: all of them, in order, none with more edges than memory holds."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_gnn_dist.prepare.steps import external_sort
from lightning_gnn_dist.prepare.steps.external_sort import BYTES_PER_KEY, cut_nodes, edges_at_once

DEGREES = np.random.default_rng(0).integers(0, 30, 1000)


@pytest.mark.parametrize("keys", [29, 100, 5000, 10**6])
def test_every_range_fits_and_none_is_wasted(keys: int) -> None:
    bounds = cut_nodes(DEGREES, keys * BYTES_PER_KEY, 0, 1 << 40)
    sizes = np.add.reduceat(DEGREES, bounds[:-1])
    assert bounds[0] == 0 and bounds[-1] == 1000 and sizes.max() <= keys
    assert (sizes[:-1] + sizes[1:] > keys - 30).all()


def test_what_edges_carry_takes_room_too() -> None:
    plain, heavy = (cut_nodes(DEGREES, 20_000, carried, 1 << 40) for carried in (0, 100))
    assert len(heavy) > 10 * len(plain)
    assert edges_at_once(10_000, 0) == 156 and edges_at_once(10_000, 100) == 14 and edges_at_once(1, 0) == 1


def test_large_lists_have_larger_buckets_rather_than_countless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_sort, "KEYS_PER_BUCKET", 10)
    monkeypatch.setattr(external_sort, "MAX_BUCKETS", 20)
    assert 20 <= len(cut_nodes(DEGREES, 10**9, 0, 1 << 40)) <= 25


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Node \d+ has 29 edges, which take 464 bytes to sort: memory_bytes=463"):
        cut_nodes(DEGREES, 463, 0, 1 << 40)
    with pytest.raises(ValueError, match="memory_bytes=16 are too few for 70,000 edges"):
        cut_nodes(np.ones(70_000, np.int64), 16, 0, 1 << 40)
