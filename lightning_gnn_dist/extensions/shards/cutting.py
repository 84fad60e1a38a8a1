"""Cuts a graph of which no host has all: at random, or by a stream that goes through all ranges of nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_gnn_dist.extensions.shards.prepared_edges import ShardEdges
from lightning_gnn_dist.extensions.shards.prepared_part import ShardPart
from lightning_gnn_dist.extensions.shards.shared_reading import Reading
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.random import deal
from lightning_gnn_dist.partition.streaming import Stream, StreamingPartitioner
from lightning_gnn_dist.prepare.files.inputs import EDGE, NODE
from lightning_gnn_dist.prepare.steps.edges import OnProgress
from lightning_gnn_dist.prepare.steps.journal import Journal


def cut(
    partitioner: Partitioner,
    ranges: ShardPart,
    sorting: ShardEdges | None,
    seed: int,
    reading: Reading,
    folder: Path,
    on_progress: OnProgress,
) -> ShardPart:
    """The part that a partitioner makes for this rank, as it does of the whole graph. Collective.

    Args:
        partitioner: A random or a streaming one.
        ranges: The nodes of this rank if parts were ranges of nodes.
        sorting: Sorts the edges into these nodes, if the partitioner needs them.
        seed: Decides random parts.
        reading: The ranks.
        folder: Keeps what was found, in ``cut``.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    if not isinstance(partitioner, StreamingPartitioner):
        found = deal(ranges.num_all, reading.num_readers, seed).numpy()
        return ShardPart.of(found, reading.num_readers, reading.index)
    assert sorting is not None
    place = folder / "cut"
    place.mkdir(exist_ok=True)
    file, journal = place / "parts.npy", Journal(place, {})
    if not all(reading.each(bool(journal.get("is_cut")))):
        sorting.sort(EDGE, EDGE, {NODE: ranges}, on_progress)
        save(file, _streamed(partitioner, sorting.out(EDGE), ranges, reading, on_progress))
        journal.record([file], is_cut=True)
        reading.each(0)  # all have it before the first reads the rows of ranges, and then removes them
    return ShardPart.of(np.load(file), reading.num_readers, reading.index)


def _streamed(
    partitioner: StreamingPartitioner, rows: Path, ranges: ShardPart, reading: Reading, on_progress: OnProgress
) -> Column:
    """The part of each node. One rank after the other places the nodes of its range, and tells the others where."""
    indptr, indices = np.load(rows / "indptr.npy"), np.load(rows / "indices.npy", mmap_mode="r")
    (num_edges,) = reading.sums([indices.size])
    stream = Stream.of(partitioner, ranges.num_all, num_edges, reading.num_readers)
    for number in range(partitioner.passes):
        stream.begin_pass()
        for reader, (first, end) in enumerate(zip(ranges.starts[:-1], ranges.starts[1:], strict=True)):
            if reader == reading.index:
                stream.place(indptr, indices, int(first))
                reading.whole(stream.assignment[first:end])
            else:
                stream.take(int(first), reading.whole(stream.assignment[:0]))
        on_progress("cutting", (number + 1) / partitioner.passes)
    return stream.assignment
