"""Writes the edges that were read as arrays, each host those into its own nodes, and tells what all of them are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.rng import mix
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.prepare.files.row_files import GrowingArrays
from lightning_gnn_dist.prepare.one_shard import Part
from lightning_gnn_dist.prepare.reading import Progress, Read, Reading

SENDER = " sender"  # no array of a graph is called so


@compiled
def add_edges(senders: Column, receivers: Column, sums: Column) -> None:
    """Add two hashes of every edge to ``sums``, two numbers of 64 bits."""
    for at in range(senders.size):
        mixed = mix(mix(np.uint64(senders[at])) ^ np.uint64(receivers[at]))
        sums[0] += mixed
        sums[1] += mix(mixed ^ np.uint64(0x9E3779B97F4A7C15))


class SomeEdges(NamedTuple):
    """Some edges of a type, what they carry, and the share of all edges that was read with them."""

    senders: Column
    receivers: Column
    carried: dict[str, Column]
    share: float


@dataclass(frozen=True)
class Gathering:
    """Writes the edges of a type as arrays, and tells what all of them are, if only some are written.

    Args:
        folder: Gets a folder of files for ``edge_index`` and for what the edges carry: one of each reader.
        reading: Who reads them.
        part: Whose edges to write, if only those into some nodes. Receivers are numbered in it, senders as they are.
        dtype: Of the ends that are written.
        both_ways: Whether the reverse of every edge counts, too. Then edges carry nothing.
        progress: Called with the share of the edges that was read.
    """

    folder: Path
    reading: Reading
    part: Part | None
    dtype: np.dtype[np.generic]
    both_ways: bool
    progress: Progress

    def __call__(self, edges: Iterable[SomeEdges]) -> tuple[list[int], str]:
        """Write them; return how many lead into each part, as they are read, and a hash of all."""
        arrays, tally = dict[int, GrowingArrays](), Tally(self.part)
        for reader, rows, places in chain.from_iterable(self.reading.dealt(self._read(edges, tally), self.part)):
            ends = np.stack([rows.pop(SENDER), places], 1).astype(self.dtype)
            if reader not in arrays:
                arrays[reader] = GrowingArrays(self.folder, self.folder, f"{reader:05}")
            arrays[reader].add({"edge_index": ends} | rows)
        for file in (file for growing in arrays.values() for file in growing.finish()):
            if file.parent.name == "edge_index" and NpyFile.of(file).shape[0] == 2:  # two rows: taken for the two ends
                save(file, np.ascontiguousarray(np.load(file).T))
        return tally.of_all(self.reading)

    def _read(self, edges: Iterable[SomeEdges], tally: Tally) -> Iterator[Read]:
        for senders, receivers, carried, share in edges:
            tally.add(senders, receivers)
            for sender, receiver in [(senders, receivers), (receivers, senders)][: 1 + self.both_ways]:
                yield Read({SENDER: sender.astype(self.dtype, copy=False)} | carried, receiver)
            self.progress(share)


class Tally:
    """Counts the edges into each part, and takes a hash of all that does not depend on their order.

    Args:
        part: One of the parts. Without any nothing is counted.
    """

    def __init__(self, part: Part | None) -> None:
        self._part, self._sums = part, np.zeros(2, np.uint64)
        self._counts = np.zeros(0 if part is None else len(part.starts) - 1, np.int64)

    def add(self, senders: Column, receivers: Column) -> None:
        """Take in some edges."""
        if self._part is not None:
            self._counts += self._part.count(receivers)
            add_edges(senders, receivers, self._sums)

    def of_all(self, reading: Reading) -> tuple[list[int], str]:
        """Return the counts and the hash of what all readers have read."""
        counts, sums = reading.sums(self._counts.tolist()), reading.sums(self._sums.view(np.int64).tolist())
        return counts, np.array(sums, np.int64).tobytes().hex()
