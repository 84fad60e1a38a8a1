"""Graphs larger than memory: some of many small chunks are held at a time, all of them once in an epoch.

The nodes of a saved graph may lie chunk by chunk, so that a chunk is one range of each array:

my_graph/chunks.json   where each chunk begins, in the nodes and in the edges of each type

Some of them are then read as a few ranges of each file, past the system's cache.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_gnn_dist.batches.batches import slice_of
from lightning_gnn_dist.checks import Count, check_fields
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import row_slices, starts_of
from lightning_gnn_dist.graph.storage.files import check_entries, flush, open_file, read_json
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.graph.storage.store import as_numpy
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, below_edges, below_nodes, offsets_of
from lightning_gnn_dist.homes.residency import Held, ReadChunks, Residency, bytes_held
from lightning_gnn_dist.partition.base import Partition, check_request

FILE = "chunks.json"
_WAY_OUT = "Copy the graph again, or reorder it again."
_BYTES_AT_ONCE = 1 << 24  # as fast as reading past the cache directly (O_DIRECT), .9 to 1.1 GB/s on one disk
_MOST_BLOCKS = 1 << 14  # of ids: a table of them stays in the processor's cache


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where each chunk of a saved graph begins.

    Attributes:
        nodes: For each node type, how many nodes of it the chunks before each one have, and at the end all: int64,
            shape ``(types, num_chunks + 1)``.
        edges: The same for the edges of each edge type, which belong to the chunks of their receivers.
    """

    nodes: Tensor
    edges: Tensor

    @classmethod
    def of(cls, graph: Graph) -> Chunks | None:
        """Read the chunks in whose order a saved graph lies; None if it lies in another order, or in RAM."""
        if graph.path is None or not (file := graph.path / FILE).exists():
            return None
        about = read_json(file, _WAY_OUT)
        check_entries(about, {"nodes": list[list[int]], "edges": list[list[int]]}, file, _WAY_OUT)
        types = graph.types
        for name, sizes in (("nodes", list(types.num_nodes.values())), ("edges", list(types.num_edges))):
            if [row[-1:] for row in about[name]] != [[size] for size in sizes] or not _are_starts(about[name]):
                raise ValueError(f"{file} is damaged (its {name} are not those of the graph beside it). {_WAY_OUT}")
        return cls(torch.tensor(about["nodes"]), torch.tensor(about["edges"]))

    @classmethod
    def counted(cls, partition: Partition, types: GraphTypes, num_edges: Tensor) -> Chunks:
        """The chunks of a graph that is put in order, with the number of edges of each type into each chunk."""
        nodes = [
            torch.bincount(of_type, minlength=partition.num_parts)
            for of_type in partition.assignment.split(list(types.num_nodes.values()))
        ]
        return cls(_starts(torch.stack(nodes)), _starts(num_edges))

    @property
    def num_chunks(self) -> int:
        return self.nodes.shape[1] - 1

    def write(self, folder: Path) -> None:
        """Say in the folder of a saved graph where its chunks begin."""
        (folder / FILE).write_text(json.dumps({"nodes": self.nodes.tolist(), "edges": self.edges.tolist()}))
        flush(folder / FILE)

    def partition(self) -> Partition:
        """Return the chunk of each node, in 4 bytes a node."""
        numbers = torch.arange(self.num_chunks, dtype=torch.int32)
        return Partition(torch.cat([numbers.repeat_interleave(sizes) for sizes in self.nodes.diff()]), self.num_chunks)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts[:, :1] * 0, counts.cumsum(1)], 1)


def _are_starts(rows: list[list[int]]) -> bool:
    lengths = {len(row) for row in rows}
    return len(lengths) == 1 and all(row[0] == 0 and row == sorted(row) and len(row) > 1 for row in rows)


class Range(NamedTuple):
    """Consecutive nodes that are read in one go.

    Attributes:
        first: The id of the first one.
        end: The id behind the last one.
        kind: The number of their type.
        chunk: The first chunk that they are of.
    """

    first: int
    end: int
    kind: int
    chunk: int


class Inside(NamedTuple):
    """Where the nodes of some ranges stand among them, found by a table of blocks of ids.

    Attributes:
        starts: The first id of each range, in increasing order, and at the end the number of nodes.
        ends: The id behind the last one of each range, and at the end a number that no id reaches.
        places: The place of the first id of each range among those of all.
        blocks: For each block of ``2 ** shift`` ids the first range that ends in it or later.
        shift: See there.
    """

    starts: Array
    ends: Array
    places: Array
    blocks: Array
    shift: int

    @classmethod
    def of(cls, ranges: Sequence[Range], num_nodes: int) -> Inside:
        shift = max(0, (num_nodes - 1).bit_length() - _MOST_BLOCKS.bit_length() + 1)
        starts = np.array([each.first for each in ranges] + [num_nodes])
        ends = np.array([each.end for each in ranges] + [np.iinfo(np.int64).max])
        places = np.array(offsets_of([each.end - each.first for each in ranges]))
        first_ids = np.arange((num_nodes >> shift) + 1) << shift
        return cls(starts, ends, places, np.searchsorted(ends, first_ids, side="right"), shift)


class ChunkReader:
    """Reads chunks of one saved graph.

    Args:
        graph: The graph.
        chunks: Where its chunks begin.
    """

    def __init__(self, graph: Graph, chunks: Chunks) -> None:
        assert graph.path is not None
        self._graph, self._chunks, self._num_bytes = graph, chunks, 0
        self._files = {name: NpyFile.of(graph.path / f"{name}.npy") for name in graph.arrays}
        self._were = self._states()

    def read(self, held: Sequence[int]) -> tuple[Graph, Tensor, int]:
        """Return the graph among the nodes of some chunks, these nodes in increasing order, and the bytes read."""
        for name, state in self._states().items():
            if state != self._were[name]:
                raise ValueError(
                    f"{self._files[name].path} was changed or replaced while the graph was trained on: its files must "
                    "stay as they are. Write another graph to another path."
                )
        self._num_bytes = 0
        ranges, types, node_arrays = list(self._ranges(sorted(held))), self._graph.types, {}
        sizes = [0] * len(types.node_types)
        for number, (kind, first_id) in enumerate(zip(types.node_types, types.offsets, strict=False)):
            spans = [(each.first - first_id, each.end - first_id) for each in ranges if each.kind == number]
            sizes[number] = sum(end - first for first, end in spans)
            arrays = types.node_arrays[kind].items()
            node_arrays[kind] = {name: self._rows(below_nodes(kind) + name, like, spans) for name, like in arrays}
        indptr, senders, kinds, edge_arrays = self._edges(ranges, sum(sizes))
        num_edges = [len(senders)]
        if len(types.edge_types) > 1:
            num_edges = torch.bincount(kinds, minlength=len(types.edge_types)).tolist()
        of_edges = types.edge_types, tuple(num_edges), kinds, node_arrays, edge_arrays
        found = GraphTypes(types.node_types, offsets_of(sizes), *of_edges, types.time)
        nodes = torch.cat([torch.arange(each.first, each.end) for each in ranges])
        return typed_graph(indptr, senders, found, node_arrays={}), nodes, self._num_bytes

    def _states(self) -> dict[str, tuple[int, ...]]:
        states = {name: file.path.stat() for name, file in self._files.items()}
        return {name: (state.st_size, state.st_mtime_ns, state.st_ino) for name, state in states.items()}

    def _ranges(self, held: Sequence[int]) -> Iterator[Range]:
        """Yield the nodes of some chunks, type by type, those of chunks that follow each other together."""
        runs = np.split(np.array(held), np.flatnonzero(np.diff(held) > 1) + 1)
        for kind, starts in enumerate(self._chunks.nodes.tolist()):
            first_id = self._graph.types.offsets[kind]
            for run in runs:
                first, end = starts[run[0]] + first_id, starts[run[-1] + 1] + first_id
                if first < end:
                    yield Range(first, end, kind, int(run[0]))

    def _into(self, name: str, first: int, out: Tensor) -> Tensor:
        """Fill a tensor with the rows of a file from row ``first`` on."""
        read_past_cache(self._files[name], first, as_numpy(out))
        self._num_bytes += out.nbytes
        return out

    def _rows(self, name: str, like: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """The rows of some spans of a file, one span after the other."""
        ends = offsets_of([end - first for first, end in spans])
        out = like.new_empty((ends[-1], *like.shape[1:]))
        for (first, _), (start, end) in zip(spans, pairwise(ends), strict=True):
            self._into(name, first, out[start:end])
        return out

    def _edges(
        self, ranges: Sequence[Range], num_nodes: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[EdgeType, dict[str, Tensor]]]:
        """The edges among the nodes of some ranges: the rows, their senders, and the edges' types and arrays."""
        graph, types, inside = self._graph, self._graph.types, Inside.of(ranges, self._graph.num_nodes)
        most = sum(int(graph.indptr[each.end] - graph.indptr[each.first]) for each in ranges)
        senders = torch.empty(most, dtype=index_dtype(num_nodes))  # what is not written to takes no memory
        degrees, done, filled, has_one = torch.zeros(num_nodes, dtype=torch.int64), 0, 0, len(types.edge_types) == 1
        kinds = [types.edge_type[:0]]
        arrays = {kind: {name: [like[:0]] for name, like in of.items()} for kind, of in types.edge_arrays.items()}
        for each in ranges:
            indptr = self._into("indptr", each.first, torch.empty(each.end - each.first + 1, dtype=torch.int64))
            at = self._chunks.edges[:, each.chunk].tolist()
            for rows in row_slices(indptr):
                first, lengths = int(indptr[rows.start]), indptr[rows.start : rows.stop + 1].diff()
                read = self._into("indices", first, graph.indices.new_empty(int(lengths.sum())))
                kept, out = torch.empty(len(read), dtype=torch.bool), (degrees[done:].numpy(), senders[filled:].numpy())
                num = keep_inside(lengths.numpy(), read.numpy(), inside, *out, kept.numpy())
                if num < 0:
                    raise ValueError(
                        f"{graph.path} is damaged (edges from {first} on come from nodes that it does not have). Copy "
                        "or save the graph again."
                    )
                done, filled = done + len(lengths), filled + num
                of_types = [kept]
                if not has_one:
                    of_edges = self._into("edge_type", first, types.edge_type.new_empty(len(kept)))
                    kinds.append(of_edges[kept])
                    of_types = [kept[of_edges == number] for number in range(len(arrays))]
                for number, (of_kind, of_type) in enumerate(zip(arrays.items(), of_types, strict=True)):
                    at[number] = self._keep_arrays(*of_kind, of_type, at[number])
        like = types.edge_type
        of_all = torch.zeros(1, dtype=like.dtype).expand(filled) if has_one else torch.cat(kinds)  # no byte for each
        joined = {kind: {name: torch.cat(pieces) for name, pieces in of.items()} for kind, of in arrays.items()}
        return starts_of(degrees), senders[:filled], of_all, joined

    def _keep_arrays(self, kind: EdgeType, arrays: dict[str, list[Tensor]], kept: Tensor, first: int) -> int:
        """Read what edges of a type carry from one on, keep some of it, and return where the next one stands."""
        for name, pieces in arrays.items():
            out = pieces[0].new_empty((len(kept), *pieces[0].shape[1:]))
            pieces.append(self._into(below_edges(kind) + name, first, out)[kept])
        return first + len(kept)


@compiled
def keep_inside(degrees: Array, senders: Array, inside: Inside, counts: Array, out: Array, kept: Array) -> int:
    """Keep the edges of some rows that come from ranges of ids, and return how many; -1 if a sender is no node.

    Args:
        degrees: The number of edges of each row.
        senders: The senders, row after row.
        inside: The ranges.
        counts: Receives the number of edges of each row that are kept.
        out: Receives the places of their senders.
        kept: Receives for each edge whether it is.
    """
    edge = filled = 0
    for row in range(degrees.size):
        before = filled
        for _ in range(degrees[row]):
            sender = senders[edge]
            if sender < 0 or sender >= inside.starts[-1]:
                return -1
            number = inside.blocks[sender >> inside.shift]
            while inside.ends[number] <= sender:
                number += 1
            kept[edge] = inside.starts[number] <= sender
            if kept[edge]:
                out[filled] = sender - inside.starts[number] + inside.places[number]
                filled += 1
            edge += 1
        counts[row] = filled - before
    return filled


def read_past_cache(npy: NpyFile, first: int, out: Column) -> None:
    """Fill an array with rows from row ``first`` on; the system then forgets their pages, as nobody asks again."""
    content = out.reshape(-1).view(np.uint8).data
    at = npy.offset + first * npy.dtype.itemsize * math.prod(npy.shape[1:])
    with open_file(npy.path) as stream:
        file = stream.fileno()
        for start in range(0, len(content), _BYTES_AT_ONCE):
            piece, done = content[start : start + _BYTES_AT_ONCE], 0
            while done < len(piece):
                count = os.preadv(file, [piece[done:]], at + start + done)
                if not count:
                    raise ValueError(f"{npy.path} became shorter while it was read: write it again.")
                done += count
            if hasattr(os, "posix_fadvise"):  # not on macOS
                os.posix_fadvise(file, at + start, done, os.POSIX_FADV_DONTNEED)


log = logging.getLogger(__name__)

DRIFT = "1 to 2"  # points of accuracy: more than with a schedule that ends at 0, of a graph of 169,000 nodes
CHUNKS = 512  # small clusters of a sweep: benchmarks/larger_than_memory.md


@dataclass(frozen=True)
class Sweep(Residency):
    """Each rank holds some of many small chunks at a time, and an epoch goes through all of them once.

    It is for graphs larger than memory. Chunks are dealt anew in every epoch, and a training node is a seed once in it,
    while its chunk is held. The next chunks are read while these train. Since what is held drifts through the graph,
    so do the weights: let the learning rate end at 0, or average the weights, and take many small chunks.

    Args:
        bytes: Memory of a rank for chunks: those that it trains on, and as many that are read meanwhile.
        chunks: How many it trains on at a time, in place of ``bytes``.
        of: How many there are. Default: those in whose order the graph is saved (``lightning-gnn-dist reorder``), which
            are read fast; else 512.
    """

    bytes: Count | None = None
    chunks: Count | None = None
    of: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.bytes is None) == (self.chunks is None):
            raise ValueError(
                f"Sweep needs either bytes or chunks, got bytes={self.bytes} and chunks={self.chunks}: write "
                "Sweep(bytes=4 * 10**9), or Sweep(chunks=64, of=512)."
            )
        if self.chunks is not None and self.of is not None and self.chunks > self.of:
            raise ValueError(f"chunks ({self.chunks}) must not exceed of ({self.of}), the number of all chunks.")

    def of_graph(self, graph: Graph) -> Residency:
        saved = Chunks.of(graph)
        of = self.of or (None if saved is None else saved.num_chunks) or min(CHUNKS, graph.num_nodes)
        if self.bytes is None:
            return replace(self, of=of, chunks=min(self.chunks or 1, of))
        of_chunk = -(-bytes_held(graph) // of)
        if self.bytes < 2 * of_chunk:
            raise ValueError(
                f"Sweep(bytes={self.bytes}) has no room for two of {of} chunks, the one that is held and the one that "
                f"is read meanwhile, which take about {of_chunk} bytes each: allow more, or cut into more chunks."
            )
        return replace(self, bytes=None, of=of, chunks=min(self.bytes // (2 * of_chunk), of))

    def partitioner(self, graph: Graph) -> SavedChunks | None:
        saved = Chunks.of(graph) if self.turns(1) > 1 else None
        return SavedChunks() if saved is not None and self.num_chunks(1) == saved.num_chunks else None

    def check_beside(self, every: int | None, extra_nodes: float) -> None:
        if every is not None or extra_nodes:
            raise ValueError(
                f"Sweep() goes through all chunks once in an epoch and reads nothing beside them: leave "
                f"{'extra_nodes' if every is None else 'every'} out."
            )

    def begin_training(self, trainer: Trainer | None) -> None:
        if (
            trainer is None
            or trainer.global_rank
            or trainer.lr_scheduler_configs
            or self.turns(trainer.world_size) == 1
        ):
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, WeightAveraging | StochasticWeightAveraging) for each in callbacks):
            log.warning(
                "A sweep ends with the weights of the chunks that were held last, and nothing lowers the learning rate "
                "or averages weights, which costs about %s points of accuracy: return a schedule that ends at 0 from "
                "configure_optimizers, or add EMAWeightAveraging() to the trainer.",
                DRIFT,
            )

    def num_chunks(self, world_size: int) -> int:
        of, _ = self._numbers()
        if (needed := self.turns(world_size) * world_size) > of:
            raise ValueError(
                f"{self} on {world_size} ranks needs at least {needed} chunks, so that every rank holds some at any "
                "time: cut into more, or hold more at a time."
            )
        return of

    def turns(self, world_size: int) -> int:
        of, chunks = self._numbers()
        return -(-of // (chunks * world_size))

    def sweep(self, world_size: int) -> int:
        return self.turns(world_size)

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        (of, _), turns = self._numbers(), self.turns(world_size)
        epoch, turn = divmod(super_epoch, turns)
        order = permutation(of, seed + Purpose.DEALS, epoch if turns > 1 else 0)  # with one turn all stays as it is
        return Held(tuple(order[slice_of(of, turns * world_size, turn * world_size + rank)].sort().values.tolist()))

    def _numbers(self) -> tuple[int, int]:
        """All chunks, and those held at a time."""
        if self.of is None or self.chunks is None:
            raise ValueError(f"{self} leaves numbers open, which a graph decides: give Sweep(chunks=64, of=512).")
        return self.of, self.chunks


@dataclass(frozen=True)
class SavedChunks:
    """Take the chunks in whose order a graph is saved, which ``lightning-gnn-dist reorder`` writes."""

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        if (chunks := Chunks.of(graph)) is None:
            raise ValueError(
                "SavedChunks() is for a graph that lightning-gnn-dist reorder has written: write one, or name another "
                "partitioner."
            )
        if chunks.num_chunks != num_parts:
            raise ValueError(
                f"{graph.path} is saved in {chunks.num_chunks} chunks, and {num_parts} are needed: reorder it, or name "
                "another partitioner."
            )
        return chunks.partition()

    def reader(self, graph: Graph) -> ReadChunks:
        """Return what reads some chunks of such a graph."""
        chunks = Chunks.of(graph)
        assert chunks is not None
        return ChunkReader(graph, chunks).read
