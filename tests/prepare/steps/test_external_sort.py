"""Ranges of nodes that fit into memory; keys that are the edges again, also with ids beyond 32 bits."""

from pathlib import Path

import numpy as np
import pytest

from lightning_gnn_dist.prepare import edges
from lightning_gnn_dist.prepare.edges import (
    BYTES_PER_KEY,
    cut_nodes,
    deal,
    edges_at_once,
    order_of,
    unpack,
)
from lightning_gnn_dist.prepare.journal import Journal

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
    monkeypatch.setattr(edges, "KEYS_PER_BUCKET", 10)
    monkeypatch.setattr(edges, "MAX_BUCKETS", 20)
    assert 20 <= len(cut_nodes(DEGREES, 10**9, 0, 1 << 40)) <= 25


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Node \d+ has 29 edges, which take 464 bytes to sort: memory_bytes=463"):
        cut_nodes(DEGREES, 463, 0, 1 << 40)
    with pytest.raises(ValueError, match="memory_bytes=16 are too few for 70,000 edges"):
        cut_nodes(np.ones(70_000, np.int64), 16, 0, 1 << 40)


BOUNDS = np.array([0, 30, 31, 100])
BUCKET_OF = np.repeat(np.arange(3, dtype=np.uint16), np.diff(BOUNDS))


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("bits", [7, 40, 55])
def test_edges_come_back_from_their_buckets(bits: int, flag: int) -> None:
    generator = np.random.default_rng(0)
    sender, receiver = generator.integers(0, 1 << bits, 500), generator.integers(0, 100, 500)
    keys, edges = np.empty(500, np.uint64), np.empty(500 * flag, np.int64)
    start = deal(sender, receiver, False, BUCKET_OF, BOUNDS[:-1], bits + flag, flag, keys, edges)
    assert start.tolist() == [0, *np.cumsum(np.bincount(BUCKET_OF[receiver])).tolist()]
    found = []
    for bucket in range(3):
        order = np.sort(keys[start[bucket] : start[bucket + 1]])
        senders, degrees = np.empty(order.size, np.int64), np.zeros(BOUNDS[bucket + 1] - BOUNDS[bucket], np.int64)
        assert unpack(order, bits + flag, flag, False, senders, degrees, np.empty(0, np.int64)) == order.size
        found += zip(np.repeat(np.arange(*BOUNDS[bucket : bucket + 2]), degrees), senders, strict=True)
    assert found == sorted(zip(receiver, sender, strict=True))
    assert sorted(edges.tolist()) == list(range(500 * flag))


@pytest.mark.parametrize("text", ["", '{"inputs": {}', '{"inputs": {}}'])
def test_a_damaged_journal_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state.json is damaged .*Delete .* to begin anew"):
        Journal(tmp_path, {})


@pytest.mark.parametrize("bits", [3, 40, 60])
def test_keys_are_put_in_order_and_equal_ones_stay_in_theirs(bits: int) -> None:
    keys = np.random.default_rng(0).integers(0, 1 << bits, 500).astype(np.uint64)
    assert (order_of(keys, bits) == np.argsort(keys, kind="stable")).all()
    assert order_of(keys[:0], bits).size == 0 and order_of(keys[:1], bits).tolist() == [0]
