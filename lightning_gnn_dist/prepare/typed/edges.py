"""The edges of one type: read from arrays or tables in pieces, kept if they lead into own nodes, and sorted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.prepare.external_plan import edges_at_once
from lightning_gnn_dist.prepare.external_sort import ExternalSort
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles, Piece
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, purpose_of
from lightning_gnn_dist.prepare.files.from_tables import Places, carried_of, times_of
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles, entries
from lightning_gnn_dist.prepare.files.raw import check_purposes
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles
from lightning_gnn_dist.prepare.files.table_files import columns_of, ends_first
from lightning_gnn_dist.prepare.files.table_pieces import GrowingArrays, TablePieces
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_tables import check_numbered
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.numbering import Part
from lightning_gnn_dist.prepare.typed.nodes import check_folder_of_arrays


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
        num_senders: The number of nodes of the source type.
        num_receivers: The number of nodes of the destination type.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
    """

    num_senders: int
    num_receivers: int
    flip: bool = False

    def pieces(self, edges_at_once: int, *, skip: int = 0) -> Iterator[Piece]:
        for piece in super().pieces(edges_at_once, skip=skip):
            found = Piece(piece.receiver, piece.sender, piece.file) if self.flip else piece
            _check_ids(found, self.num_senders, self.num_receivers)
            yield found

    @classmethod
    def in_files(cls, files: GraphFiles, num_senders: int, num_receivers: int, flip: bool) -> EdgesOfType:
        """The edges of a folder of arrays."""
        return cls(
            files=files.edges.files,
            num_edges=files.edges.num_edges,
            num_senders=num_senders,
            num_receivers=num_receivers,
            flip=flip,
        )


def _check_ids(piece: Piece, num_senders: int, num_receivers: int) -> None:
    for end, ids, count in (("sender", piece.sender, num_senders), ("receiver", piece.receiver, num_receivers)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(
                f"{piece.file} names the {end} {bad}, but there are {count} nodes of its type: the ids of each type "
                f"count from 0, so they must lie in [0, {count})."
            )


def edge_files(path: Path, drop: Collection[str]) -> GraphFiles:
    """The edges of one type, and what they carry, in a folder of arrays."""
    check_folder_of_arrays(path)
    found = {name: file for name, file in entries(path).items() if name not in drop}
    if "edge_index" not in found:
        raise ValueError(f"{path} holds no edge_index, of shape (2, edges), but {sorted(found)}.")
    edges = EdgeFiles.of(found.pop("edge_index"))
    check_purposes(((name, purpose_of(name)) for name in found), path)
    rows = {ALIASES.get(name, name): RowFiles.of(file) for name, file in found.items()}
    for name, array in rows.items():
        if array.shape[:1] != (edges.num_edges,):
            raise ValueError(f"{path}: {name} has shape {array.shape}, and there are {edges.num_edges} edges.")
    return GraphFiles(edges, {}, Carried(rows), None)


def edges_of_arrays(edges: EdgesOfType, carried: Carried, memory_bytes: int) -> Iterator[SomeEdges]:
    """Yield all edges of a type in pieces, and at first none: that tells what they carry."""
    none, first = np.empty(0, np.int64), 0
    yield SomeEdges(none, none, {name: rows.read(0, 0) for name, rows in carried.arrays.items()}, 0.0)
    for piece in edges.pieces(edges_at_once(memory_bytes, carried.bytes_per_edge)):
        count = piece.sender.size
        found = {name: rows.read(first, count) for name, rows in carried.arrays.items()}
        for name, rows in found.items():
            convert.check_finite(torch.from_numpy(rows), first, name=name, row="edge")
        first += count
        yield SomeEdges(piece.sender, piece.receiver, found, first / edges.num_edges)


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
        carried = carried_of(piece, path, first) | times
        for name, array in carried.items():
            convert.check_finite(torch.from_numpy(array), first, name=name, row="edge")
        share = (first + len(sender)) / table.num_rows
        yield SomeEdges(receiver, sender, carried, share) if flip else SomeEdges(sender, receiver, carried, share)


def gather(
    edges: Iterable[SomeEdges],
    part: Part,
    num_senders: int,
    folder: Path,
    source: Path,
    told: Any,
    progress: Progress,
) -> Column:
    """Write the edges into the nodes of a part as arrays, and return how many edges lead into each part.

    Args:
        edges: All edges of a type.
        part: Whose edges to write. Receivers are numbered in the part, senders as they are.
        num_senders: The number of nodes of the source type.
        folder: Gets ``edge_index.npy`` and what the edges carry.
        source: Where the edges come from, for errors.
        told: A hash that is updated with the ends of all edges.
        progress: Called with the share of the edges that was read.
    """
    arrays, counts = GrowingArrays(folder, source), np.zeros(len(part.numbering.bounds) - 1, np.int64)
    dtype = torch.empty(0, dtype=convert.index_dtype(max(num_senders, part.num_all))).numpy().dtype
    for senders, receivers, carried, share in edges:
        told.update(np.stack([senders, receivers], 1).astype(np.int64).data)
        counts += part.numbering.count(receivers)
        at, rows = part.rows(receivers)
        ends = np.stack([senders[at], rows], 1).astype(dtype)
        progress(share)
        arrays.add({"edge_index": ends} | {name: array[at] for name, array in carried.items()})
    arrays.finish()
    pairs = folder / "edge_index.npy"
    if counts[part.index] == 2:  # or each row would be taken for one of the two ends
        ends = np.load(pairs)
        save(pairs, np.ascontiguousarray(ends.T))
    return counts


def sort_edges(
    edges: EdgesOfType, carried: Carried, folder: Path, memory_bytes: int, journal: Journal, progress: Progress
) -> None:
    """Sort the edges of a type by receiver and sender into ``folder``, with what they carry."""
    ids = max(edges.num_senders, edges.num_receivers)
    sort = ExternalSort(edges, carried, journal, folder, False, memory_bytes, num_senders=ids)
    sort.count(edges.num_receivers, lambda share: progress(share / 4))
    sort.deal(lambda share: progress((1 + share) / 4))
    sort.sort(lambda share: progress((1 + share) / 2))
    sort.finish()
