"""Keys of edges: dealt to buckets and unpacked, they are the edges again, also with ids beyond 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_gnn_dist.prepare.steps.external_sort import deal, unpack

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


def test_both_ways_and_each_once() -> None:
    sender, receiver = np.array([1, 0, 1, 2, 1], np.int32), np.array([0, 1, 0, 2, 0], np.int32)
    bucket_of, first = np.zeros(3, np.uint16), np.zeros(1, np.int64)
    keys, edges = np.empty(10, np.uint64), np.empty(10, np.int64)
    deal(sender, receiver, True, bucket_of, first, 3, 1, keys, edges)
    order = np.argsort(keys, kind="stable")
    senders, degrees, places = np.empty(10, np.int32), np.zeros(3, np.int64), np.empty(10, np.int64)
    assert unpack(keys[order], 3, 1, True, senders, degrees, places) == 3
    assert senders[:3].tolist() == [1, 0, 2] and degrees.tolist() == [1, 1, 1]
    assert edges[order[places[:3]]].tolist() == [0, 1, 3]  # the first of each, and its own way before the reverse
