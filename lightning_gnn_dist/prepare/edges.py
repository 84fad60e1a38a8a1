"""The edges of one type: read from arrays or tables in pieces, kept if they lead into own nodes, and sorted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.external_plan import edges_at_once
from lightning_gnn_dist.prepare.external_sort import check_ends
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles, Piece
from lightning_gnn_dist.prepare.files.from_tables import Places, carried_of, edge_columns, times_of
from lightning_gnn_dist.prepare.files.row_files import Carried
from lightning_gnn_dist.prepare.files.table_files import columns_of, ends_first
from lightning_gnn_dist.prepare.files.table_pieces import GrowingArrays, TablePieces
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_tables import check_numbered
from lightning_gnn_dist.prepare.numbering import Part


class SomeEdges(NamedTuple):
    """Some edges of a type, what they carry, and the share of all edges that was read with them."""

    senders: Column
    receivers: Column
    carried: dict[str, Column]
    share: float


@dataclass(frozen=True, kw_only=True)
class EdgesOfType(EdgeFiles):
    """The edges of one type. Senders and receivers are numbered each in its type.

    Args:
        num_senders: The number of nodes of the source type; None if only the edges tell.
        num_receivers: The number of nodes of the destination type; likewise.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
        has_name: Whether the type has a name. Without, whoever takes the pieces looks whether there are such nodes.
    """

    num_senders: int | None = None
    num_receivers: int | None = None
    flip: bool = False
    has_name: bool = True

    def pieces(self, edges_at_once: int, *, skip: int = 0) -> Iterator[Piece]:
        for piece in super().pieces(edges_at_once, skip=skip):
            found = Piece(piece.receiver, piece.sender, piece.file) if self.flip else piece
            if self.has_name:
                _check_ids(found, self.num_senders, self.num_receivers)
            yield found


def _check_ids(piece: Piece, num_senders: int | None, num_receivers: int | None) -> None:
    for end, ids, count in (("sender", piece.sender, num_senders), ("receiver", piece.receiver, num_receivers)):
        if ids.size and count is not None and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(
                f"{piece.file} names the {end} {bad}, but there are {count} nodes of its type: the ids of each type "
                f"count from 0, so they must lie in [0, {count})."
            )


def edges_of_arrays(edges: EdgesOfType, carried: Carried, memory_bytes: int) -> Iterator[SomeEdges]:
    """Yield all edges of a type in pieces, and at first none: that tells what they carry."""
    none, first = np.empty(0, np.int64), 0
    yield SomeEdges(none, none, {name: rows.read(0, 0) for name, rows in carried.arrays.items()}, 0.0)
    for piece in edges.pieces(edges_at_once(memory_bytes, carried.bytes_per_edge)):
        if not edges.has_name:
            check_ends(piece, edges.num_receivers)
        count = piece.sender.size
        found = {name: rows.read(first, count) for name, rows in carried.arrays.items()}
        for name, rows in found.items():
            convert.check_finite(torch.from_numpy(rows), first, name=name, row="edge")
        first += count
        yield SomeEdges(piece.sender, piece.receiver, found, min(first / edges.num_edges, 1.0))


def edges_of_table(
    path: Path,
    edge_type: EdgeType,
    flip: bool,
    nodes: Mapping[str, tuple[Path, Path | None, int]],
    drop: Collection[str],
    time: str | None,
    memory_bytes: int,
) -> Iterator[SomeEdges]:
    """Yield all edges of a table in pieces.

    Args:
        path: The table.
        edge_type: What is in it, before edges are read the other way round.
        flip: Whether each edge is read the other way round.
        nodes: For each type the table or arrays of its nodes, the file of its ids if it is a table, and their number.
        drop: Columns to leave out, but for the two ends.
        time: The column of times, if there is one.
        memory_bytes: Bytes that a piece of the table may take, beside the ids.
    """
    names = columns_of(path)
    ends = ends_first(names, path)[:2]
    kept = [name for name in names if name not in drop or name in ends]
    table = TablePieces.of(path, kept, memory_bytes, lambda share: None)
    found = {kind: nodes[kind] for kind in edge_type[::2]}
    places = {kind: Places(None if ids is None else np.load(ids), of) for kind, (of, ids, _) in found.items()}
    for first, piece in table:
        rows = []
        for end, kind in zip(ends, edge_type[::2], strict=True):
            of, ids, _ = found[kind]
            column = piece.pop(end)
            check_numbered(column, ids is None, path, of)
            rows.append(places[kind](column, path))
        sender, receiver = rows
        _check_ids(Piece(sender, receiver, path), found[edge_type[0]][2], found[edge_type[2]][2])
        times = {time: times_of(time, piece.pop(time), path, first)} if time is not None and time in piece else {}
        carried = (carried_of if any(edge_type) else edge_columns)(piece, path, first) | times
        for name, array in carried.items():
            convert.check_finite(torch.from_numpy(array), first, name=name, row="edge")
        share = (first + len(sender)) / table.num_rows
        yield SomeEdges(receiver, sender, carried, share) if flip else SomeEdges(sender, receiver, carried, share)


def gather(
    edges: Iterable[SomeEdges],
    part: Part,
    num_senders: int,
    both_ways: bool,
    folder: Path,
    source: Path,
    told: Sequence[Any],
    progress: Progress,
) -> Column:
    """Write the edges into the nodes of a part as arrays; with one hash, return how many lead into each part.

    Args:
        edges: All edges of a type.
        part: Whose edges to write. Receivers are numbered in the part, senders as they are.
        num_senders: The number of nodes of the source type.
        both_ways: Whether the reverse of every edge counts, too. Then edges carry nothing.
        folder: Gets ``edge_index.npy`` and what the edges carry.
        source: Where the edges come from, for errors.
        told: Of a shard, a hash that is updated with the ends of all edges, or two, of all senders and all receivers.
        progress: Called with the share of the edges that was read.
    """
    arrays, counts = GrowingArrays(folder, source), np.zeros(len(part.numbering.bounds) - 1, np.int64)
    dtype = torch.empty(0, dtype=convert.index_dtype(max(num_senders, part.num_all))).numpy().dtype
    for senders, receivers, carried, share in edges:
        if len(told) == 1:
            told[0].update(np.stack([senders, receivers], 1).astype(np.int64).data)
            counts += part.numbering.count(receivers)
        elif told:
            for digest, ends in zip(told, (senders, receivers), strict=True):
                digest.update(ends.data)
        for sender, receiver in [(senders, receivers), (receivers, senders)][: 1 + both_ways]:
            at, rows = part.rows(receiver)
            ends = np.stack([sender[at], rows], 1).astype(dtype)
            arrays.add({"edge_index": ends} | {name: array[at] for name, array in carried.items()})
        progress(share)
    (file,) = (file for file in arrays.finish() if file.stem == "edge_index")
    if NpyFile.of(file).shape[0] == 2:  # or each row would be taken for one of the two ends
        save(file, np.ascontiguousarray(np.load(file).T))
    return counts
