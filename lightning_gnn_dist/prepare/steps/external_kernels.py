"""The compiled loops of sorting edges on disk."""

from __future__ import annotations

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.graph.storage.npy import Column


@compiled
def count(nodes: Column, degrees: Column) -> None:
    """Add to ``degrees`` how often each node occurs in ``nodes``."""
    for node in nodes:
        degrees[node] += 1


@compiled
def deal(
    sender: Column,
    receiver: Column,
    both_ways: bool,
    bucket_of: Column,
    first: Column,
    bits: int,
    flag: int,
    keys: Column,
    edges: Column,
) -> Column:
    """Write the keys of edges, bucket after bucket, and return where each bucket starts.

    The upper bits of a key are the receiver, counted from the ``first`` of its bucket. The last ``bits`` bits are the
    sender and, if ``flag`` is 1, a bit that is 1 for a reverse edge. ``edges``, unless empty, gets each key's edge.
    """
    start = np.zeros(first.size + 1, np.int64)
    for at in range(sender.size):
        start[bucket_of[receiver[at]] + 1] += 1
        if both_ways:
            start[bucket_of[sender[at]] + 1] += 1
    for bucket in range(first.size):
        start[bucket + 1] += start[bucket]
    cursor = start[:-1].copy()
    for at in range(sender.size):
        bucket = bucket_of[receiver[at]]
        low = np.uint64(sender[at]) << np.uint64(flag)
        keys[cursor[bucket]] = (np.uint64(receiver[at] - first[bucket]) << np.uint64(bits)) | low
        if edges.size:
            edges[cursor[bucket]] = at
        cursor[bucket] += 1
        if both_ways:
            bucket = bucket_of[sender[at]]
            low = (np.uint64(receiver[at]) << np.uint64(flag)) | np.uint64(flag)
            keys[cursor[bucket]] = (np.uint64(sender[at] - first[bucket]) << np.uint64(bits)) | low
            if edges.size:
                edges[cursor[bucket]] = at
            cursor[bucket] += 1
    return start


@compiled
def unpack(keys: Column, bits: int, flag: int, once: bool, senders: Column, degrees: Column, places: Column) -> int:
    """Write the senders of sorted keys, and add to each row's degree. Returns how many; ``once`` skips equal edges.

    ``places``, unless empty, gets the position of each sender's key.
    """
    shift, mask = np.uint64(flag), (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    kept = 0
    for at in range(keys.size):
        if once and at and keys[at] >> shift == keys[at - 1] >> shift:
            continue
        senders[kept] = (keys[at] & mask) >> shift
        if places.size:
            places[kept] = at
        degrees[np.int64(keys[at] >> np.uint64(bits))] += 1
        kept += 1
    return kept
