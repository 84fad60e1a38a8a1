"""The edges of each type: read in pieces, those into own nodes written as arrays, and sorted on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.rng import mix
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.prepare.files.arrays import GrowingArrays, RowFiles, entries
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, edge_files
from lightning_gnn_dist.prepare.one_shard import Part
from lightning_gnn_dist.prepare.reading import Progress, Read, Reading
from lightning_gnn_dist.prepare.steps.external_sort import ExternalSort, edges_at_once
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import MAX_BYTES_AT_ONCE

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


OnProgress = Callable[[str, float], None]


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
        own = [*self.files.shared(self.reading.index, self.reading.num_readers)]
        first, num_own = own[0][0] if own else 0, max(self.files.num_edges // self.reading.num_readers, 1)
        done, at_once = 0, edges_at_once(self.memory_bytes, self.files.carried.bytes_per_edge)
        for piece in (piece for _, files in own for piece in files.pieces(at_once)):
            count = piece.sender.size
            carried = {name: rows.read(first, count) for name, rows in rows_of.items()}
            for name, array in carried.items():
                convert.check_finite(rows_of[name].as_tensor(array), first, name=name, row="edge")
            first, done = first + count, done + count
            yield SomeEdges(piece.sender, piece.receiver, carried, min(done / num_own, 1.0))


@dataclass(frozen=True)
class EdgeSorting:
    """How the edges of a graph are sorted by receiver and sender.

    Args:
        inputs: The files.
        folder: The folder in which the work is done.
        draft: Gets the sorted edges of a graph without types.
        is_shard: Whether the edges into some nodes alone are kept.
        undirected: Add the reverse of every edge, and keep every edge once.
        time: The array of times, if there is one.
        memory_bytes: Bytes that reading and sorting may take.
        reading: Who reads the files.
        ranges: Has sorted the edges before, those into each range of nodes, which are read in place of the files.
    """

    inputs: Inputs
    folder: Path
    draft: Path
    is_shard: bool
    undirected: bool
    time: str | None
    memory_bytes: int
    reading: Reading
    ranges: EdgeSorting | None = None

    def count(self, on_progress: OnProgress) -> int:
        """Count the nodes that the edges of a graph without types name."""
        (edge_type,) = self.inputs.edges
        journal = self.journal(edge_type)
        files = self._in_arrays(edge_type, edge_type, {}, journal, on_progress)
        return self._sort(edge_type, files, {}, journal).count(None, partial(on_progress, "counting edges"))

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        """Sort the edges of one type, with what they carry. Those of ``as_read`` are read, turned round if another."""
        journal = self.journal(edge_type)
        are_gathered = all(self.reading.each(bool(journal.get("is_gathered"))))
        if not are_gathered and journal.get("is_gathered"):
            journal.forget("is_gathered")  # another rank, whose share was lost, reads it again
        if journal.get("is_sorted"):
            return
        files = self._in_arrays(edge_type, as_read, parts, journal, on_progress)
        self._check_carried(files, journal)
        words, sort = _words(edge_type), self._sort(edge_type, files, parts, journal)
        sort.count(parts[edge_type[2]].size, partial(on_progress, f"counting {words}"))
        bounds, sizes = sort.deal(partial(on_progress, f"dealing {words} into buckets"))
        sort.sort(bounds, sizes, partial(on_progress, f"sorting {words}"))
        journal.record(sorted(self.out(edge_type).rglob("*.npy")), is_sorted=True)
        shutil.rmtree(self._gathered(edge_type), ignore_errors=True)

    def rows(self, edge_type: EdgeType, num_nodes: int) -> Iterator[SomeEdges]:
        """Yield the edges without types that were sorted for a range of nodes, and at first none."""
        index = self.reading.index
        first = Part.ranges(num_nodes, self.reading.num_readers, index).starts[index]
        indptr = np.load(self.out(edge_type) / "indptr.npy")
        senders, at_once = NpyFile.of(self.out(edge_type) / "indices.npy"), edges_at_once(self.memory_bytes // 2, 0)
        total, step = senders.shape[0], max(at_once // self.reading.num_readers, 1)
        for start in range(-step, total, step):
            edges = np.arange(max(start, 0), min(start + step, total))
            receivers = first + np.searchsorted(indptr, edges, side="right") - 1
            yield SomeEdges(senders.read(max(start, 0), edges.size), receivers, {}, (start + step) / max(total, 1))

    def journal(self, edge_type: EdgeType) -> Journal:
        """What is done of a type: ``digest`` and ``counts`` tell of all edges, if only some were kept."""
        self._folder(edge_type).mkdir(parents=True, exist_ok=True)
        return Journal(self._folder(edge_type), {})

    def out(self, edge_type: EdgeType) -> Path:
        """The folder of the sorted edges. Those of a graph without types are its rows already."""
        return self._folder(edge_type) / "sorted" if self.inputs.have_names else self.draft

    def _folder(self, edge_type: EdgeType) -> Path:
        return self.folder / "edges" / folder_of(edge_type)

    def _gathered(self, edge_type: EdgeType) -> Path:
        return self._folder(edge_type) / "gathered"

    def _sort(self, edge_type: EdgeType, files: EdgeFiles, parts: Mapping[str, Part], journal: Journal) -> ExternalSort:
        out, num_ids = self.out(edge_type), max(files.num_senders or 0, files.num_receivers or 0)
        (out / "edges" if files.carried.arrays else out).mkdir(parents=True, exist_ok=True)
        return ExternalSort(
            files,
            journal,
            out,
            both_ways=self.undirected and not self.is_shard,
            once=self.undirected,
            memory_bytes=self.memory_bytes,
            num_senders=num_ids or None,
            number=None if self.inputs.have_names or not parts else parts[edge_type[0]].number,
        )

    def _in_arrays(
        self,
        edge_type: EdgeType,
        as_read: EdgeType,
        parts: Mapping[str, Part],
        journal: Journal,
        on_progress: OnProgress,
    ) -> EdgeFiles:
        """The edges of a type in arrays: those of tables, and those of a shard, are written into some."""
        sender, receiver = parts.get(edge_type[0]), parts.get(edge_type[2])
        files = replace(
            self.inputs.edges[as_read],
            num_senders=None if sender is None else sender.num_all,
            num_receivers=None if receiver is None else receiver.num_all,
            flip=self.inputs.edges[as_read].flip or edge_type != as_read,
        )
        if not self.is_shard and files.are_arrays:
            return files
        if not journal.get("is_gathered"):
            progress = partial(on_progress, f"reading {_words(edge_type)}")
            self._gather(files, edge_type, receiver, journal, progress)
        found, size = (
            edge_files(folder := self._gathered(edge_type), entries(folder)),
            None if receiver is None else receiver.size,
        )
        return replace(found, num_senders=files.num_senders, num_receivers=size)

    def _gather(
        self,
        files: EdgeFiles,
        edge_type: EdgeType,
        receiver: Part | None,
        journal: Journal,
        progress: Callable[[float], None],
    ) -> None:
        """Write the edges of a type, or those into the nodes of the shard, as arrays."""
        folder, reading = self._gathered(edge_type), self.reading
        at_once = self.memory_bytes // 2 // reading.num_readers
        most = None if files.num_senders is None else max(files.num_senders, files.num_receivers or 0)
        dtype = torch.empty(0, dtype=torch.int64 if most is None else convert.index_dtype(most)).numpy().dtype
        shutil.rmtree(folder, ignore_errors=True)
        part, both_ways = (receiver, self.undirected) if self.is_shard else (None, False)
        if self.ranges is None or receiver is None:
            edges = EdgeReader(files, at_once, reading)
            counts, digest = Gathering(folder, reading, part, dtype, both_ways, progress)(edges)
        else:  # both directions are there, and the hash is that of the edges in the files
            rows = self.ranges.rows(edge_type, receiver.num_all)
            counts, _ = Gathering(folder, reading, part, dtype, False, progress)(rows)
            digest = self.ranges.journal(edge_type).get("digest")
        written = sorted(file for file in folder.rglob("*") if not file.is_dir())
        journal.record(written, is_gathered=True, is_carried_checked=True, counts=counts, digest=digest)
        reading.each(0)  # all have recorded it before one goes on: what is gathered is removed once it is sorted
        if self.ranges is not None:
            shutil.rmtree(self.ranges.folder)

    def _check_carried(self, files: EdgeFiles, journal: Journal) -> None:
        """Refuse what edges carry if it has a name, or values, that a graph cannot have: later only bytes are moved."""
        carried = files.carried.arrays
        convert.check_each_name(carried, allowed=())
        check_times(carried, self.time, "edge")
        if journal.get("is_carried_checked"):
            return
        for name, rows in carried.items():
            first = 0
            for piece in rows.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
                convert.check_finite(rows.as_tensor(piece), first, name=name, row="edge")
                first += len(piece)
        journal.record(is_carried_checked=True)


def check_times(arrays: Mapping[str, RowFiles], time: str | None, row: str) -> None:
    """Refuse times that are not one number for each ``row``, a node or an edge."""
    if time is not None and time in arrays:
        rows = arrays[time]
        convert.check_time({time: rows.as_tensor(rows.read(0, 1))}, time, row)


def _words(edge_type: EdgeType) -> str:
    return " ".join(edge_type).strip() or "edges"
