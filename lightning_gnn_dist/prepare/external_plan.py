"""How many edges fit into memory at once, and into which ranges of nodes that divides them."""

from __future__ import annotations

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column

BYTES_PER_KEY = 16  # while a bucket is sorted and unpacked
BYTES_PER_EDGE = 64  # while a piece is dealt, both ways
MORE_PER_KEY = 40  # if edges carry something: for the order of the keys, beside twice what is carried
MORE_PER_EDGE = 32  # the same for a piece, beside six times what is carried
KEYS_PER_BUCKET = 1 << 24  # larger buckets do not sort faster
MAX_BUCKETS = 4096  # exceeded only if memory is too small: every piece is appended to all buckets
MAX_EDGES_AT_ONCE = 1 << 22


def edges_at_once(memory_bytes: int, carried_bytes: int) -> int:
    """How many edges are read and dealt together."""
    per_edge = BYTES_PER_EDGE + (MORE_PER_EDGE + 6 * carried_bytes if carried_bytes else 0)
    return max(1, min(memory_bytes // per_edge, MAX_EDGES_AT_ONCE))


def cut_nodes(degrees: Column, memory_bytes: int, carried_bytes: int, most_nodes: int) -> list[int]:
    """Ranges of nodes whose edges are sorted together: the first node of each, and the end of the last one.

    Args:
        degrees: How many edges each node has.
        memory_bytes: Bytes that sorting a range may take.
        carried_bytes: Bytes that an edge carries.
        most_nodes: The most nodes of a range.
    """
    per_key = BYTES_PER_KEY + (MORE_PER_KEY + 2 * carried_bytes if carried_bytes else 0)
    most = memory_bytes // per_key
    if (largest := int(degrees.max(initial=0))) > most:
        raise ValueError(
            f"Node {int(degrees.argmax())} has {largest:,} edges, which take {largest * per_key:,} bytes to sort: "
            f"memory_bytes={memory_bytes:,} are too few."
        )
    ends = degrees.cumsum()
    total = int(ends[-1]) if ends.size else 0
    room = min(most, max(KEYS_PER_BUCKET, total // MAX_BUCKETS))
    bounds, before = [0], 0
    while bounds[-1] < ends.size:
        reached = int(np.searchsorted(ends, before + room, side="right"))
        bounds.append(min(max(reached, bounds[-1] + 1), bounds[-1] + most_nodes))
        before = int(ends[bounds[-1] - 1])
    if len(bounds) > np.iinfo(np.uint16).max:
        raise ValueError(f"memory_bytes={memory_bytes:,} are too few for {total:,} edges: give more.")
    return bounds
