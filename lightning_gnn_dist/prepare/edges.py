"""The edges of each type, sorted on disk by receiver and sender, by loops that are compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, append, save, write_header
from lightning_gnn_dist.graph.typed.types import EdgeType, folder_of
from lightning_gnn_dist.prepare.arrays import Progress, check_num_nodes
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.nodes import Part
from lightning_gnn_dist.prepare.plan import EdgeFiles, Plan, words_of


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
        for is_reverse in range(2 if both_ways else 1):
            one, other = (receiver[at], sender[at]) if is_reverse else (sender[at], receiver[at])
            bucket = bucket_of[other]
            low = (np.uint64(one) << np.uint64(flag)) | np.uint64(flag * is_reverse)
            keys[cursor[bucket]] = (np.uint64(other - first[bucket]) << np.uint64(bits)) | low
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


FEWEST_PLACES = 1 << 10
BYTES_PER_KEY = 16  # while a bucket is sorted and unpacked
BYTES_PER_EDGE = 64  # while a piece is dealt, both ways
MORE_PER_KEY = 40  # if edges carry something: for the order of the keys, beside twice what is carried
MORE_PER_EDGE = 32  # the same for a piece, beside six times what is carried
KEYS_PER_BUCKET = 1 << 24  # larger buckets do not sort faster
MAX_BUCKETS = 4096  # exceeded only if memory is too small: every piece is appended to all buckets
MAX_EDGES_AT_ONCE = 1 << 22


class MemoryTooSmall(ValueError):
    """Refuses work that more ``memory_bytes`` would finish: what is done stays."""


class ExternalSort:
    """Turns a list of edges into ``indptr.npy`` and ``indices.npy``.

    What edges carry is dealt and sorted with them, into ``edges/``. Of equal edges that are kept once, the first stays;
    added reverse edges count as the last.

    Args:
        of: How edges are sorted. The folder of the type takes the buckets, about 8 bytes per edge and direction.
        edge_type: The type of the edges.
        edges: The edges, in arrays, and what they carry.
        number: The id to write for each sender. Default: the sender's own.
    """

    def __init__(self, of: EdgeSorting, edge_type: EdgeType, edges: EdgeFiles, number: Column | None = None) -> None:
        self._edges, self._journal, self._memory_bytes = edges, of.journal(edge_type), of.memory_bytes
        self._both_ways, self._once, self._number = of.undirected and of.adds_reverse, of.undirected, number
        self._out = out = of.out(edge_type)
        self._width = edges.carried.bytes_per_edge
        self._flag, self._at_once = int(self._width > 0), edges_at_once(of.memory_bytes, self._width)
        self._degrees, self._buckets = self._journal.folder / "degrees.npy", self._journal.folder / "buckets"
        arrays = edges.carried.arrays.items()
        self._written = {out / "edges" / f"{name}.npy": (rows.files[0].dtype, rows.shape[1:]) for name, rows in arrays}
        (out / "edges" if edges.carried.arrays else out).mkdir(parents=True, exist_ok=True)

    def count(self, num_nodes: int | None, progress: Progress) -> int:
        """Count the edges of every node, and return how many nodes there are."""
        if (known := self._journal.get("num_nodes")) is not None:
            return int(known)
        degrees = np.zeros(num_nodes or FEWEST_PLACES, np.int64)
        seen = largest = 0
        for piece in self._edges.pieces(self._at_once):
            if num_nodes is None:
                largest = max(largest, int(piece.sender.max(initial=-1)) + 1, int(piece.receiver.max(initial=-1)) + 1)
            if largest > degrees.size:
                check_num_nodes(largest, f"{piece.file} names node {largest - 1}. It would be one of")
                degrees = np.concatenate([degrees, np.zeros(max(largest, degrees.size), np.int64)])
            for ends in (piece.receiver, piece.sender)[: 1 + self._both_ways]:
                count(ends, degrees)
            seen += piece.sender.size
            progress(min(seen / max(self._edges.num_edges, 1), 1.0))
        degrees = degrees[: num_nodes or largest]
        save(self._degrees, degrees)
        self._journal.record([self._degrees], num_nodes=degrees.size, num_edges=seen)
        return degrees.size

    def run(self, num_nodes: int, on_progress: OnProgress, words: str) -> None:
        """Count, deal every edge to the file of its bucket, and sort one bucket after the other."""
        self.count(num_nodes, partial(on_progress, f"counting {words}"))
        num_ids = max(self._edges.num_senders or 0, self._edges.num_receivers or 0) or self._journal.get("num_nodes")
        bits = max(num_ids - 1, 1).bit_length() + self._flag  # of a key that are not the receiver's
        bounds = cut_nodes(np.load(self._degrees), self._memory_bytes, self._width, 1 << min(64 - bits, 62))
        sizes = self._deal(np.array(bounds), bits, partial(on_progress, f"dealing {words} into buckets"))
        dtype = torch.empty(0, dtype=convert.index_dtype(num_ids)).numpy().dtype
        written = self._written | {self._out / "indices.npy": (dtype, ())}
        for file, (kind, shape) in written.items():
            file.unlink(missing_ok=True)
            write_header(file, kind, (0, *shape))
        indptr = np.zeros(bounds[-1] + 1, np.int64)
        for bucket, size in enumerate(sizes):
            rows = slice(bounds[bucket] + 1, bounds[bucket + 1] + 1)
            indptr[rows] = self._sort(bucket, size, rows.stop - rows.start, bits, dtype)
            on_progress(f"sorting {words}", (bucket + 1) / len(sizes))
        np.cumsum(indptr, out=indptr)
        save(self._out / "indptr.npy", indptr)
        for file, (kind, shape) in written.items():
            write_header(file, kind, (int(indptr[-1]), *shape))

    def _deal(self, bounds: Column, bits: int, progress: Progress) -> list[int]:
        """Append every edge to the file of its bucket; return how many bytes of keys each has."""
        shutil.rmtree(self._buckets, ignore_errors=True)
        self._buckets.mkdir()
        sizes, seen, counted = [0] * (len(bounds) - 1), 0, self._journal.get("num_edges")
        bucket_of = np.repeat(np.arange(len(sizes), dtype=np.uint16), np.diff(bounds))
        for piece in self._edges.pieces(self._at_once):
            keys = np.empty(piece.sender.size * (1 + self._both_ways), np.uint64)
            edges = np.empty(keys.size if self._width else 0, np.int64)
            start = deal(*piece[:2], self._both_ways, bucket_of, bounds[:-1], bits, self._flag, keys, edges)
            carried = self._edges.carried.read(seen, piece.sender.size) if self._width else None
            for bucket in np.flatnonzero(np.diff(start)).tolist():
                here = slice(int(start[bucket]), int(start[bucket + 1]))
                append(self._buckets / str(bucket), keys[here])
                if carried is not None:
                    append(self._buckets / f"{bucket}.carried", carried[edges[here]])
                sizes[bucket] += 8 * (here.stop - here.start)
            seen += piece.sender.size
            progress(seen / max(counted, 1))
        if seen != counted:
            raise ValueError(f"{counted:,} edges were counted and {seen:,} read again: the files changed meanwhile.")
        return sizes

    def _sort(self, bucket: int, size: int, num_rows: int, bits: int, dtype: np.dtype[Any]) -> Column:
        """Sort one bucket, append it to the arrays, remove it, and return the degrees of its rows."""
        files = self._buckets / str(bucket), self._buckets / f"{bucket}.carried"
        keys, order = _read_all(files[0], np.dtype(np.uint64), size), np.empty(0, np.int64)
        if self._width:
            order = order_of(keys, bits + num_rows.bit_length())
            keys = keys[order]
        else:
            keys.sort()
        senders, degrees = np.empty(keys.size, dtype), np.zeros(num_rows, np.int64)
        places = np.empty(order.size, np.int64)
        kept = unpack(keys, bits, self._flag, self._once, senders, degrees, places)
        append(self._out / "indices.npy", senders[:kept] if self._number is None else self._number[senders[:kept]])
        if self._width:
            carried = _read_all(files[1], np.dtype(np.uint8), size // 8 * self._width)
            carried = carried.reshape(-1, self._width)[order[places[:kept]]]
            for name, rows in self._edges.carried.split(carried):
                append(self._out / "edges" / f"{name}.npy", rows)
        for file in files:
            file.unlink(missing_ok=True)
        return degrees


def order_of(keys: Column, bits: int) -> Column:
    """The stable order of keys of so many bits: sorted together with their places, which takes a fifth of the time."""
    of_place = max(keys.size - 1, 1).bit_length()
    if bits + of_place > 64:
        return np.argsort(keys, kind="stable")
    packed = (keys << np.uint64(of_place)) | np.arange(keys.size, dtype=np.uint64)
    packed.sort()
    packed &= np.uint64((1 << of_place) - 1)
    return packed.view(np.int64)


def _read_all(path: Path, dtype: np.dtype[Any], size: int) -> Column:
    """Read a whole file, which is missing if it is empty; refuse one that does not have ``size`` bytes."""
    numbers = np.fromfile(path, dtype) if size else np.empty(0, dtype)
    if numbers.nbytes != size:
        raise ValueError(
            f"{path} has {numbers.nbytes:,} bytes, and {size:,} were written: repeat the command, which begins anew."
        )
    return numbers


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
        raise MemoryTooSmall(
            f"Node {int(degrees.argmax())} has {largest:,} edges, which take {largest * per_key:,} bytes to sort: "
            f"memory_bytes={memory_bytes:,} are too few. With {largest * per_key:,} or more the same call goes on."
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
        least = 2 * per_key * (total // np.iinfo(np.uint16).max + 1)
        raise MemoryTooSmall(f"memory_bytes={memory_bytes:,} are too few for {total:,} edges: give {least:,} or more.")
    return bounds


OnProgress: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True)
class EdgeSorting:
    """How the edges of a graph are sorted by receiver and sender.

    Args:
        plan: The edges of each type.
        folder: The folder in which the work is done.
        draft: Gets the sorted edges of a graph without types.
        undirected: Add the reverse of every edge, and keep every edge once.
        memory_bytes: Bytes that reading and sorting may take.
    """

    plan: Plan
    folder: Path
    draft: Path
    undirected: bool
    memory_bytes: int
    adds_reverse: ClassVar[bool] = True  # or the reverse of every edge is among those that are sorted already

    def count(self, on_progress: OnProgress) -> int:
        """Count the nodes that the edges of a graph without types name."""
        ((edge_type, files),) = self.plan.edges.items()
        return ExternalSort(self, edge_type, files).count(None, partial(on_progress, "counting edges"))

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        """Sort the edges of one type, with what they carry. Those of ``as_read`` are read, turned round if another."""
        if self.journal(edge_type).get("is_sorted"):
            return
        given = self.plan.edges[as_read]
        of_ends, flip = [parts[kind].num_all for kind in edge_type[::2]], given.flip or edge_type != as_read
        turned = replace(given, num_senders=of_ends[0], num_receivers=of_ends[1], flip=flip)
        files = self.files_of(edge_type, turned, parts[edge_type[2]], on_progress)
        number = None if self.plan.have_names else parts[edge_type[0]].number
        sort = ExternalSort(self, edge_type, files, number)
        sort.run(parts[edge_type[2]].size, on_progress, words_of(edge_type))
        self.journal(edge_type).record(sorted(self.out(edge_type).rglob("*.npy")), is_sorted=True)

    def files_of(self, edge_type: EdgeType, files: EdgeFiles, part: Part, on_progress: OnProgress) -> EdgeFiles:
        """The edges of a type that are sorted, into receivers that are prepared: all."""
        return files

    def journal(self, edge_type: EdgeType) -> Journal:
        """What is done of a type."""
        self.of_type(edge_type).mkdir(parents=True, exist_ok=True)
        return Journal(self.of_type(edge_type), {})

    def out(self, edge_type: EdgeType) -> Path:
        """The folder of the sorted edges. Those of a graph without types are its rows already."""
        return self.of_type(edge_type) / "sorted" if self.plan.have_names else self.draft

    def of_type(self, edge_type: EdgeType) -> Path:
        """The folder in which the edges of a type are worked on."""
        return self.folder / "edges" / folder_of(edge_type)
