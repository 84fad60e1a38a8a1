"""The edges of one type in files: arrays of shape (2, E) or (E, 2), and tables, in the order of the files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.files.arrays import Entry
from lightning_gnn_dist.prepare.files.row_files import Carried
from lightning_gnn_dist.prepare.tables.reading import count_rows, ends_first, is_parquet, is_table, is_text


class Piece(NamedTuple):
    """Some edges: their senders, their receivers, and the file that they come from."""

    sender: Column
    receiver: Column
    file: Path


@dataclass(frozen=True, kw_only=True)
class EdgeFiles:
    """The edges of one type in files of which only headers were read.

    Args:
        files: Arrays of ends, and tables.
        num_edges: The number of edges; an estimate for text.
        columns: Names of the columns of tables that edges carry.
        carried: The arrays that edges carry, in the order of the edges.
        num_senders: The number of nodes of the source type; None if that is not known.
        num_receivers: The number of nodes of the destination type; likewise.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
        run: Which edges of an array to read, if not all.
    """

    files: tuple[NpyFile | Path, ...]
    num_edges: int
    columns: tuple[str, ...] = ()
    carried: Carried = field(default_factory=lambda: Carried({}))
    num_senders: int | None = None
    num_receivers: int | None = None
    flip: bool = False
    run: range | None = None

    @classmethod
    def of(cls, place: Entry, drop: Collection[str] = ()) -> EdgeFiles:
        """An array or a table of edges, or all of a folder, in the order of their names."""
        found: Sequence[Entry] = [place]
        if isinstance(place, Path) and place.is_dir():
            inside = sorted(file for file in place.iterdir() if _is_known(file))
            found = [place] if inside and all(map(is_parquet, inside)) else inside
        if not found or not all(map(_is_known, found)):
            raise ValueError(
                f"{place} holds no edges: give a .npy of shape (2, E) or (E, 2), a table (.csv, .tsv, .txt, also "
                "gzipped, or .parquet) whose two columns are sender and receiver, a folder of such files, an .npz, or "
                "a PyG file (.pt)."
            )
        files = tuple(file if isinstance(file, Path) and is_table(file) else _ends(file) for file in found)
        return cls(files=files, num_edges=sum(map(_count, files)), columns=_columns(files, drop))

    @property
    def tables(self) -> tuple[Path, ...]:
        """Those files that are tables."""
        return tuple(file for file in self.files if isinstance(file, Path))

    @property
    def are_arrays(self) -> bool:
        """Whether all of them are arrays of ends."""
        return all(isinstance(file, NpyFile) for file in self.files)

    @property
    def has_text(self) -> bool:
        """Whether there are tables of text, which take long to read and whose lengths are estimates."""
        return any(map(is_text, self.tables))

    def shared(self, index: int, num_readers: int) -> Iterator[tuple[int, EdgeFiles]]:
        """Yield what one of several readers reads, file by file, and the number of its first edge among all.

        Readers have runs of equally many edges.
        """
        counts, begin = [_count(file) for file in self.files], 0
        total = sum(counts)
        of_reader = range(total * index // num_readers, total * (index + 1) // num_readers)
        for file, count in zip(self.files, counts, strict=True):
            run = range(max(of_reader.start - begin, 0), min(of_reader.stop - begin, count))
            if run:
                yield begin + run.start, replace(self, files=(file,), run=run)
            begin += count

    def pieces(self, edges_at_once: int) -> Iterator[Piece]:
        """Yield the edges of arrays, in the same pieces every time."""
        for array in self.files:
            assert isinstance(array, NpyFile)
            run = range(_count(array)) if self.run is None else self.run
            for first in run[::edges_at_once]:
                yield self.checked(Piece(*_read(array, first, min(edges_at_once, run.stop - first)), array.path))

    def checked(self, piece: Piece) -> Piece:
        """Refuse ends that are no nodes, and turn the edges round if so said."""
        sender, receiver = piece[1::-1] if self.flip else piece[:2]
        for end, ids, count in (("sender", sender, self.num_senders), ("receiver", receiver, self.num_receivers)):
            low, high = int(ids.min(initial=0)), int(ids.max(initial=-1))
            if low < 0 or (count is not None and high >= count):
                raise ValueError(
                    f"{piece.file} names the {end} {low if low < 0 else high}, but "
                    + ("ids begin at 0." if count is None else f"there are {count} nodes of its type: ids count from 0")
                    + ("" if count is None else f", so they must lie in [0, {count}).")
                )
        return Piece(sender, receiver, piece.file)


def _is_known(file: Entry) -> bool:
    return isinstance(file, NpyFile) or is_table(file) or (file.is_file() and file.suffix == ".npy")


def _columns(files: Collection[NpyFile | Path], drop: Collection[str]) -> tuple[str, ...]:
    """The columns that edges carry, in the order of the first table; all files must have the same."""
    of_files = {
        file: [name for name in ends_first(file)[2:] if name not in drop] if isinstance(file, Path) else []
        for file in files
    }
    first, expected = next(iter(of_files.items()))
    for file, names in of_files.items():
        if sorted(names) != sorted(expected):
            raise ValueError(
                f"{file} has the columns {names} beside the two ends of an edge, but {first} has {expected}: files of "
                "one list of edges must be alike, or these columns left out (--drop)."
            )
    return tuple(expected)


def _ends(file: Entry) -> NpyFile:
    array = file if isinstance(file, NpyFile) else NpyFile.of(file)
    if len(array.shape) != 2 or 2 not in array.shape or array.dtype.kind not in "iu":
        raise ValueError(f"{array.path} must hold integers of shape (2, E) or (E, 2), got {array.dtype} {array.shape}.")
    return array


def _count(file: NpyFile | Path) -> int:
    if isinstance(file, Path):
        return count_rows(file)
    return file.shape[1] if file.shape[0] == 2 else file.shape[0]


def _read(array: NpyFile, first: int, count: int) -> tuple[Column, Column]:
    has_two_rows, total = array.shape[0] == 2, _count(array)
    if has_two_rows != array.by_column:  # all senders, then all receivers
        return _signed(array.read(first, count)), _signed(array.read(total + first, count))
    pairs = array.read(2 * first, 2 * count).reshape(count, 2)
    return _signed(pairs[:, 0]), _signed(pairs[:, 1])


def _signed(ends: Column) -> Column:
    """The ends as int32 or int64, the types for which the loops are compiled."""
    return np.ascontiguousarray(ends, None if ends.dtype in (np.int32, np.int64) else np.int64)
