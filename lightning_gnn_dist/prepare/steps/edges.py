"""The edges of one type: read from arrays or tables in pieces, and those into own nodes written as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.files.columns import Places, carried_of, edge_columns, times_of
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles, Piece
from lightning_gnn_dist.prepare.files.names import check_num_nodes
from lightning_gnn_dist.prepare.files.row_files import GrowingArrays
from lightning_gnn_dist.prepare.files.tables import TablePieces, ends_first
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.steps.external_sort import edges_at_once
from lightning_gnn_dist.prepare.steps.numbering import Part


class SomeEdges(NamedTuple):
    """Some edges of a type, what they carry, and the share of all edges that was read with them."""

    senders: Column
    receivers: Column
    carried: dict[str, Column]
    share: float


@dataclass(frozen=True)
class EdgeReader:
    """Reads the edges of one type.

    Args:
        files: The files. What is known of numbers of nodes is of edges as they are read: flipped, if so said.
        edge_type: What is in the files, before edges are read the other way round.
        nodes: For each type where its nodes are, and the file of their ids if that is a table.
        time: The column of times, if there is one.
        memory_bytes: Bytes that a piece may take, beside the ids.
    """

    files: EdgeFiles
    edge_type: EdgeType
    nodes: Mapping[str, tuple[Path, Path | None]]
    time: str | None
    memory_bytes: int

    def __iter__(self) -> Iterator[SomeEdges]:
        """Yield all edges in pieces, and at first none: that tells what is in arrays."""
        none, first, rows_of = np.empty(0, np.int64), 0, self.files.carried.arrays
        yield SomeEdges(none, none, {name: rows.read(0, 0) for name, rows in rows_of.items()}, 0.0)
        for piece, columns in self._pieces():
            count = piece.sender.size
            carried = columns | {name: rows.read(first, count) for name, rows in rows_of.items()}
            for name, array in carried.items():
                tensor = rows_of[name].as_tensor(array) if name in rows_of else torch.from_numpy(array)
                convert.check_finite(tensor, first, name=name, row="edge")
            first += count
            yield SomeEdges(piece.sender, piece.receiver, carried, min(first / max(self.files.num_edges, 1), 1.0))

    def _pieces(self) -> Iterator[tuple[Piece, dict[str, Column]]]:
        at_once = edges_at_once(self.memory_bytes, self.files.carried.bytes_per_edge)
        places = {kind: Places(None if ids is None else np.load(ids), of) for kind, (of, ids) in self.nodes.items()}
        for file in self.files.files:
            if isinstance(file, Path):
                yield from self._of_table(file, places)
            else:
                one = replace(self.files, files=(file,))
                yield from ((piece, {}) for piece in one.pieces(at_once))

    def _of_table(self, path: Path, places: Mapping[str, Places]) -> Iterator[tuple[Piece, dict[str, Column]]]:
        """Yield the edges of a table, and the columns that they carry."""
        ends = ends_first(path)[:2]
        places[self.edge_type[0]].check_heading(ends, path)
        for first, piece in TablePieces.of(path, [*ends, *self.files.columns], self.memory_bytes, lambda share: None):
            sender, receiver = (
                places[kind](piece.pop(end), path) for end, kind in zip(ends, self.edge_type[::2], strict=True)
            )
            if self.files.num_senders is None:
                _check_largest(sender, receiver, first, path)
            time, times = self.time, {}
            if time is not None and time in piece:
                times = {time: times_of(time, piece.pop(time), path, first)}
            carried = (carried_of if any(self.edge_type) else edge_columns)(piece, path, first)
            convert.check_each_name(carried, allowed=())
            yield self.files.checked(Piece(sender, receiver, path)), carried | times


def _check_largest(sender: Column, receiver: Column, first: int, path: Path) -> None:
    """Refuse ids that say that there are more nodes than can be meant."""
    highest = np.maximum(sender, receiver)
    row = int(highest.argmax())
    who = f"{path} names node {highest[row]} in row {first + row + 1}. It would be one of"
    check_num_nodes(int(highest[row]) + 1, who)


def gather(
    edges: Iterable[SomeEdges],
    part: Part | None,
    dtype: np.dtype[np.generic],
    both_ways: bool,
    folder: Path,
    source: Path,
    told: Sequence[Any],
    progress: Progress,
) -> list[int]:
    """Write edges as arrays; with one hash, return how many lead into each part.

    Args:
        edges: All edges of a type.
        part: Whose edges to write, if only those into some nodes. Receivers are numbered in it, senders as they are.
        dtype: Of the ends that are written.
        both_ways: Whether the reverse of every edge counts, too. Then edges carry nothing.
        folder: Gets ``edge_index.npy`` and what the edges carry.
        source: Where the edges come from, for errors.
        told: Of a shard, a hash that is updated with the ends of all edges, or two, of all senders and all receivers.
        progress: Called with the share of the edges that was read.
    """
    arrays = GrowingArrays(folder, source)
    counts = np.zeros(0 if part is None else len(part.numbering.bounds) - 1, np.int64)
    for senders, receivers, carried, share in edges:
        if part is not None and len(told) == 1:
            told[0].update(np.stack([senders, receivers], 1).astype(np.int64).data)
            counts += part.numbering.count(receivers)
        elif told:
            for digest, ends in zip(told, (senders, receivers), strict=True):
                digest.update(ends.data)
        for sender, receiver in [(senders, receivers), (receivers, senders)][: 1 + both_ways]:
            at, rows = (slice(None), receiver) if part is None else part.rows(receiver)
            ends = np.stack([sender[at], rows], 1).astype(dtype)
            arrays.add({"edge_index": ends} | {name: array[at] for name, array in carried.items()})
        progress(share)
    (file,) = (file for file in arrays.finish() if file.stem == "edge_index")
    if NpyFile.of(file).shape[0] == 2:  # or each row would be taken for one of the two ends
        save(file, np.ascontiguousarray(np.load(file).T))
    return [int(count) for count in counts]
