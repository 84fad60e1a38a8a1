"""The edges of a shard: read in pieces, those into own nodes written as arrays, which are then sorted."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.rng import mix
from lightning_gnn_dist.extensions.shards.prepared_part import ShardPart
from lightning_gnn_dist.extensions.shards.shared_reading import Read, Reading
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.files.arrays import GrowingArrays, Progress, entries
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, edge_files
from lightning_gnn_dist.prepare.steps.edges import EdgeSorting, OnProgress, edges_at_once, words_of
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import Part

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
    """Writes the edges of a type into some nodes as arrays, and tells what all of them are.

    Args:
        folder: Gets a folder of files for ``edge_index`` and for what the edges carry: one of each reader.
        reading: Who reads them.
        part: The nodes. Receivers are numbered in it, senders as they are.
        dtype: Of the ends that are written.
        both_ways: Whether the reverse of every edge counts, too. Then edges carry nothing.
        progress: Called with the share of the edges that was read.
    """

    folder: Path
    reading: Reading
    part: ShardPart
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
        part: One of the parts.
    """

    def __init__(self, part: ShardPart) -> None:
        self._part, self._sums = part, np.zeros(2, np.uint64)
        self._counts = np.zeros(len(part.starts) - 1, np.int64)

    def add(self, senders: Column, receivers: Column) -> None:
        """Take in some edges."""
        self._counts += self._part.count(receivers)
        add_edges(senders, receivers, self._sums)

    def of_all(self, reading: Reading) -> tuple[list[int], str]:
        """Return the counts and the hash of what all readers have read."""
        counts, sums = reading.sums(self._counts.tolist()), reading.sums(self._sums.view(np.int64).tolist())
        return counts, np.array(sums, np.int64).tobytes().hex()


@dataclass(frozen=True)
class EdgeReader:
    """Reads the edges of one type.

    Args:
        files: The files. What is known of numbers of nodes is of edges as they are read: flipped, if so said.
        memory_bytes: Bytes that a piece may take.
        reading: Who reads the files.
    """

    files: EdgeFiles
    memory_bytes: int
    reading: Reading

    def __iter__(self) -> Iterator[SomeEdges]:
        """Yield all edges that this reader reads in pieces, and at first none: that tells what is in arrays."""
        none, rows_of = np.empty(0, np.int64), self.files.carried.arrays
        yield SomeEdges(none, none, {name: rows.read(0, 0) for name, rows in rows_of.items()}, 0.0)
        own = self.reading.share(self.files.num_edges)
        first, num_own = own.start, max(self.files.num_edges // self.reading.num_readers, 1)
        done, at_once = 0, edges_at_once(self.memory_bytes, self.files.carried.bytes_per_edge)
        for piece in self.files.pieces(at_once, own):
            count = piece.sender.size
            carried = {name: rows.read(first, count) for name, rows in rows_of.items()}
            for name, array in carried.items():
                convert.check_finite(rows_of[name].as_tensor(array), first, name=name, row="edge")
            first, done = first + count, done + count
            yield SomeEdges(piece.sender, piece.receiver, carried, min(done / num_own, 1.0))


@dataclass(frozen=True)
class ShardEdges(EdgeSorting):
    """Sorts the edges into the nodes of a shard.

    Args:
        reading: Who reads the files.
        ranges: Has sorted the edges before, those into each range of nodes, which are read in place of the files.
    """

    reading: Reading
    ranges: ShardEdges | None = None

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        journal = self.journal(edge_type)
        are_gathered = all(self.reading.each(bool(journal.get("is_gathered"))))
        if not are_gathered and journal.get("is_gathered"):
            journal.forget("is_gathered")  # another rank, whose share was lost, reads it again
        super().sort(edge_type, as_read, parts, on_progress)
        shutil.rmtree(self._gathered(edge_type), ignore_errors=True)

    @property
    def both_ways(self) -> bool:
        return False  # what was gathered is both

    def files_of(
        self,
        edge_type: EdgeType,
        files: EdgeFiles,
        parts: Mapping[str, Part],
        journal: Journal,
        on_progress: OnProgress,
    ) -> EdgeFiles:
        """Those into the nodes of the shard, written into arrays."""
        receiver = parts[edge_type[2]]
        assert isinstance(receiver, ShardPart)
        if not journal.get("is_gathered"):
            self._gather(files, edge_type, receiver, journal, partial(on_progress, f"reading {words_of(edge_type)}"))
        found = edge_files(folder := self._gathered(edge_type), entries(folder))
        return replace(found, num_senders=files.num_senders, num_receivers=receiver.size)

    def rows(self, edge_type: EdgeType, num_nodes: int) -> Iterator[SomeEdges]:
        """Yield the edges without types that were sorted for a range of nodes, and at first none."""
        index = self.reading.index
        first = ShardPart.ranges(num_nodes, self.reading.num_readers, index).starts[index]
        indptr = np.load(self.out(edge_type) / "indptr.npy")
        senders, at_once = NpyFile.of(self.out(edge_type) / "indices.npy"), edges_at_once(self.memory_bytes // 2, 0)
        total, step = senders.shape[0], max(at_once // self.reading.num_readers, 1)
        for start in range(-step, total, step):
            edges = np.arange(max(start, 0), min(start + step, total))
            receivers = first + np.searchsorted(indptr, edges, side="right") - 1
            yield SomeEdges(senders.read(max(start, 0), edges.size), receivers, {}, (start + step) / max(total, 1))

    def _gathered(self, edge_type: EdgeType) -> Path:
        return self.of_type(edge_type) / "gathered"

    def _gather(
        self, files: EdgeFiles, edge_type: EdgeType, receiver: ShardPart, journal: Journal, progress: Progress
    ) -> None:
        """Write the edges of a type into the nodes of the shard as arrays."""
        folder, reading = self._gathered(edge_type), self.reading
        at_once = self.memory_bytes // 2 // reading.num_readers
        kind = convert.index_dtype(max(files.num_senders or 0, files.num_receivers or 0))
        dtype = torch.empty(0, dtype=kind).numpy().dtype
        shutil.rmtree(folder, ignore_errors=True)
        if self.ranges is None:
            edges = EdgeReader(files, at_once, reading)
            counts, digest = Gathering(folder, reading, receiver, dtype, self.undirected, progress)(edges)
        else:  # both directions are there, and the hash is that of the edges in the files
            rows = self.ranges.rows(edge_type, receiver.num_all)
            counts, _ = Gathering(folder, reading, receiver, dtype, False, progress)(rows)
            digest = self.ranges.journal(edge_type).get("digest")
        written = sorted(file for file in folder.rglob("*") if not file.is_dir())
        journal.record(written, is_gathered=True, is_carried_checked=True, counts=counts, digest=digest)
        reading.each(0)  # all have recorded it before one goes on: what is gathered is removed once it is sorted
        if self.ranges is not None:
            shutil.rmtree(self.ranges.folder)
