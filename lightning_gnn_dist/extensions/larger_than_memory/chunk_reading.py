"""Reads some chunks of a saved graph that lies chunk by chunk: a few ranges of each file, past the system's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.extensions.larger_than_memory.saved_chunks import Chunks
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import row_slices, starts_of
from lightning_gnn_dist.graph.storage.npy import NpyFile
from lightning_gnn_dist.graph.storage.store import as_numpy
from lightning_gnn_dist.graph.typed.names import EdgeType, below_edges, below_nodes
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of

_MOST_BLOCKS = 1 << 14  # of ids: a table of them stays in the processor's cache


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


class ChunkReader:
    """Reads chunks of one saved graph.

    Args:
        graph: The graph.
        chunks: Where its chunks begin.
    """

    def __init__(self, graph: Graph, chunks: Chunks) -> None:
        assert graph.path is not None
        self._graph, self._chunks = graph, chunks
        self._files = {name: NpyFile.of(graph.path / f"{name}.npy") for name in graph.arrays}
        self._were = self._states()

    def read(self, held: Sequence[int]) -> tuple[Graph, Tensor, int]:
        """Return the graph among the nodes of some chunks, these nodes in increasing order, and the bytes read."""
        self._check_files()
        ranges, types, reading = list(self._ranges(sorted(held))), self._graph.types, _Reading(self._files)
        of_kinds = [[each for each in ranges if each.kind == kind] for kind in range(len(types.node_types))]
        node_arrays = {
            name: self._rows_of(name, first_id, of_kind, reading)
            for name, first_id, of_kind in zip(types.node_types, types.offsets, of_kinds, strict=False)
        }
        offsets = offsets_of([sum(each.end - each.first for each in of_kind) for of_kind in of_kinds])
        edges = _Edges(self._graph, self._chunks, ranges, reading)
        for each in ranges:
            edges.add(each)
        indptr, senders = edges.rows()
        found = GraphTypes(
            types.node_types,
            offsets,
            types.edge_types,
            edges.num_edges,
            edges.kinds,
            node_arrays,
            edges.arrays,
            types.time,
        )
        nodes = torch.cat([torch.arange(each.first, each.end) for each in ranges])
        return typed_graph(indptr, senders, found, node_arrays={}), nodes, reading.num_bytes

    def _states(self) -> dict[str, tuple[int, ...]]:
        states = {name: file.path.stat() for name, file in self._files.items()}
        return {name: (state.st_size, state.st_mtime_ns, state.st_ino) for name, state in states.items()}

    def _check_files(self) -> None:
        for name, state in self._states().items():
            if state != self._were[name]:
                raise ValueError(
                    f"{self._files[name].path} was changed or replaced while the graph was trained on: its files must "
                    "stay as they are. Write another graph to another path."
                )

    def _ranges(self, held: Sequence[int]) -> Iterator[Range]:
        """Yield the nodes of some chunks, type by type, those of chunks that follow each other together."""
        runs = np.split(np.array(held), np.flatnonzero(np.diff(held) > 1) + 1)
        for kind, starts in enumerate(self._chunks.nodes.tolist()):
            first_id = self._graph.types.offsets[kind]
            for run in runs:
                first, end = starts[run[0]] + first_id, starts[run[-1] + 1] + first_id
                if first < end:
                    yield Range(first, end, kind, int(run[0]))

    def _rows_of(self, kind: str, first_id: int, ranges: Sequence[Range], reading: _Reading) -> dict[str, Tensor]:
        """The arrays of a node type, with the rows of its ranges."""
        spans = [(each.first - first_id, each.end - first_id) for each in ranges]
        arrays = self._graph.types.node_arrays[kind]
        return {name: reading.rows(below_nodes(kind) + name, like, spans) for name, like in arrays.items()}


class _Reading:
    """Reads rows of files, and counts bytes."""

    def __init__(self, files: dict[str, NpyFile]) -> None:
        self._files, self.num_bytes = files, 0

    def into(self, name: str, first: int, out: Tensor) -> Tensor:
        """Fill a tensor with the rows of a file from row ``first`` on."""
        self._files[name].read_past_cache(first, as_numpy(out))
        self.num_bytes += out.nbytes
        return out

    def rows(self, name: str, like: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """The rows of some spans, one span after the other."""
        ends = offsets_of([end - first for first, end in spans])
        out = like.new_empty((ends[-1], *like.shape[1:]))
        for (first, _), (start, end) in zip(spans, pairwise(ends), strict=True):
            self.into(name, first, out[start:end])
        return out


class _Inside(NamedTuple):
    """Where the nodes of some ranges stand among them, found by a table of blocks of ids."""

    starts: Array  # of each range, and a last one that no id reaches
    ends: Array
    places: Array  # of the first node of each range
    blocks: Array  # for each block of ids the first range that ends in it or later
    shift: int

    @classmethod
    def of(cls, ranges: Sequence[Range], num_nodes: int) -> _Inside:
        shift = max(0, (num_nodes - 1).bit_length() - _MOST_BLOCKS.bit_length() + 1)
        starts = np.array([each.first for each in ranges] + [num_nodes])
        ends = np.array([each.end for each in ranges] + [np.iinfo(np.int64).max])
        places = np.array(offsets_of([each.end - each.first for each in ranges]))
        first_ids = np.arange((num_nodes >> shift) + 1) << shift
        return cls(starts, ends, places, np.searchsorted(ends, first_ids, side="right"), shift)


class _Edges:
    """The edges among the nodes of some ranges, which are read range by range.

    Args:
        graph: The graph.
        chunks: Where its chunks begin.
        ranges: The nodes.
        reading: Reads files.
    """

    def __init__(self, graph: Graph, chunks: Chunks, ranges: Sequence[Range], reading: _Reading) -> None:
        self._graph, self._chunks, self._reading = graph, chunks, reading
        self._inside = _Inside.of(ranges, graph.num_nodes)
        num_nodes = int(self._inside.places[-1])
        self._degrees, self._done = torch.zeros(num_nodes, dtype=torch.int64), 0
        most = sum(int(graph.indptr[each.end] - graph.indptr[each.first]) for each in ranges)
        self._senders = torch.empty(most, dtype=index_dtype(num_nodes))  # what is not written to takes no memory
        self._filled = 0
        self._kinds: list[Tensor] = []
        self._arrays: dict[tuple[EdgeType, str], list[Tensor]] = {}

    def add(self, each: Range) -> None:
        """Read the edges into the nodes of one range."""
        indptr = self._reading.into("indptr", each.first, torch.empty(each.end - each.first + 1, dtype=torch.int64))
        at = {number: int(starts[each.chunk]) for number, starts in enumerate(self._chunks.edges)}
        for rows in row_slices(indptr):
            starts = indptr[rows.start : rows.stop + 1]
            kept = self._keep(int(starts[0]), starts.diff())
            self._keep_arrays(int(starts[0]), kept, at)
            self._done += rows.stop - rows.start

    def _keep(self, first: int, degrees: Tensor) -> Tensor:
        """Read the edges into some nodes, and return which of them come from nodes that are held."""
        senders = self._graph.indices.new_empty(int(degrees.sum()))
        self._reading.into("indices", first, senders)
        kept = torch.empty(senders.numel(), dtype=torch.bool)
        counts = self._degrees[self._done : self._done + degrees.numel()]
        out = self._senders[self._filled :]
        num = keep_inside(
            degrees.numpy(),
            senders.numpy(),
            self._inside.starts,
            self._inside.ends,
            self._inside.places,
            self._inside.blocks,
            self._inside.shift,
            counts.numpy(),
            out.numpy(),
            kept.numpy(),
        )
        if num < 0:
            raise ValueError(
                f"{self._graph.path} is damaged (edges from {first} on come from nodes that it does not have). Copy or "
                "save the graph again."
            )
        self._filled += num
        return kept

    def _keep_arrays(self, first: int, kept: Tensor, at: dict[int, int]) -> None:
        """Keep the types and arrays of the edges that are kept; ``at`` says where those of each type go on."""
        types = self._graph.types
        kinds = None
        if len(types.edge_types) > 1:
            kinds = self._reading.into("edge_type", first, types.edge_type.new_empty(kept.numel()))
            self._kinds.append(kinds[kept])
        for number, edge_type in enumerate(types.edge_types):
            of_type = kept if kinds is None else kept[kinds == number]
            for name, like in types.edge_arrays[edge_type].items():
                out = like.new_empty((of_type.numel(), *like.shape[1:]))
                rows = self._reading.into(below_edges(edge_type) + name, at[number], out)
                self._arrays.setdefault((edge_type, name), []).append(rows[of_type])
            at[number] += of_type.numel()

    def rows(self) -> tuple[Tensor, Tensor]:
        """The rows of all nodes, once all ranges were read."""
        return starts_of(self._degrees), self._senders[: self._filled]

    @property
    def kinds(self) -> Tensor:
        """The type of each edge."""
        like = self._graph.types.edge_type
        if len(self._graph.types.edge_types) == 1:  # no byte for each
            return torch.zeros(1, dtype=like.dtype).expand(self._filled)
        return torch.cat([like[:0], *self._kinds])

    @property
    def num_edges(self) -> tuple[int, ...]:
        """The number of edges of each type."""
        count = len(self._graph.types.edge_types)
        return (self._filled,) if count == 1 else tuple(torch.bincount(self.kinds, minlength=count).tolist())

    @property
    def arrays(self) -> dict[EdgeType, dict[str, Tensor]]:
        """The arrays of the edges of each type."""
        return {edge_type: self._arrays_of(edge_type, of) for edge_type, of in self._graph.types.edge_arrays.items()}

    def _arrays_of(self, edge_type: EdgeType, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.cat([like[:0], *self._arrays.get((edge_type, name), ())]) for name, like in arrays.items()}


@compiled
def keep_inside(
    degrees: Array,
    senders: Array,
    starts: Array,
    ends: Array,
    places: Array,
    blocks: Array,
    shift: int,
    counts: Array,
    out: Array,
    kept: Array,
) -> int:
    """Keep the edges of some rows that come from ranges of ids, and return how many; -1 if a sender is no node.

    Args:
        degrees: The number of edges of each row.
        senders: The senders, row after row.
        starts: The first id of each range, in increasing order, and at the end the number of nodes.
        ends: The id behind the last one of each range, and at the end a number that no id reaches.
        places: The place of the first id of each range among those of all.
        blocks: For each block of ``2 ** shift`` ids the first range that ends in it or later.
        shift: See there.
        counts: Receives the number of edges of each row that are kept.
        out: Receives the places of their senders.
        kept: Receives for each edge whether it is.
    """
    edge = filled = 0
    for row in range(degrees.size):
        before = filled
        for _ in range(degrees[row]):
            sender = senders[edge]
            if sender < 0 or sender >= starts[-1]:
                return -1
            number = blocks[sender >> shift]
            while ends[number] <= sender:
                number += 1
            kept[edge] = starts[number] <= sender
            if kept[edge]:
                out[filled] = sender - starts[number] + places[number]
                filled += 1
            edge += 1
        counts[row] = filled - before
    return filled
