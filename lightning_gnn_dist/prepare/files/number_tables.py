"""Tables of numbers, Parquet or text without a heading, that are read as arrays are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.columns import flags
from lightning_gnn_dist.prepare.files.text_tables import KINDS, LINES_AT_ONCE, SEPARATORS

BYTES_AT_ONCE = 1 << 24


class Place(NamedTuple):
    """Where a table is read on: the next row, those from it on that were read already, and those that follow."""

    row: int
    read: Column
    pieces: Iterator[Column]


@dataclass(frozen=True, eq=False)
class TableRows(NpyFile):
    """The columns of a table side by side, read from front to back.

    Args:
        names: The columns.
        kinds: Of a text, which of ``text_tables.KINDS`` each column is of.
        has_holes: Whether a cell may be empty: then it is -1 of whole numbers, and otherwise NaN.
    """

    names: Sequence[str]
    kinds: Sequence[int]
    has_holes: bool
    _at: list[Place] = field(default_factory=list)

    @classmethod
    def of_parquet(cls, path: Path, *, has_holes: bool = False) -> TableRows:
        """All columns of a Parquet file, of which the headers and a row are read."""
        names, num_rows = parquet.columns_of(path), parquet.count_rows(path)
        made = cls(path, (num_rows, len(names)), np.dtype(np.int64), 0, False, names, (), has_holes)
        row = next(made.pieces(1), np.empty((0, len(names)), np.int64))
        return cls(path, (num_rows, row.shape[1]), row.dtype, 0, False, names, (), has_holes)

    @classmethod
    def of_text(cls, path: Path, delimiter: str) -> TableRows:
        """All columns of a text, which is read once to learn what they hold and how many rows there are."""
        names = check_text(path, delimiter)
        scan = text_tables.scan(path, LINES_AT_ONCE, 0, lambda share: None)
        if KINDS.index(np.str_) in scan.kinds:
            raise ValueError(
                f"{path} holds words, and numbers are needed: write these, or leave the array out (--drop)."
            )
        dtype = np.dtype(KINDS[max(scan.kinds)])
        return cls(path, (scan.num_rows, len(names)), dtype, 0, False, names, scan.kinds, False)

    def pieces(self, rows_at_once: int) -> Iterator[Column]:
        """Yield all rows, so many at a time."""
        if self.kinds:
            try:
                for columns in text_tables.read_pieces(self.path, self.kinds, rows_at_once):
                    yield np.column_stack([columns[name] for name in self.names])
            except ValueError as error:
                raise ValueError(f"{self.path} holds other things than numbers ({error}): write these.") from error
            return
        for columns in parquet.read_pieces(self.path, self.names, rows_at_once, has_holes=self.has_holes):
            if wrong := [name for name in self.names if columns[name].dtype.kind == "U"]:
                raise ValueError(f"{self.path}: column {wrong[0]!r} holds words, and numbers are needed: write these.")
            yield np.column_stack([columns[name] for name in self.names])

    def read(self, first: int, count: int) -> Column:
        width = self.shape[1] if len(self.shape) > 1 else 1
        row, rows = first // max(width, 1), count // max(width, 1)
        if not self._at or self._at[0].row > row:
            at_once = max(1, BYTES_AT_ONCE // max(width * self.dtype.itemsize, 1))
            place = Place(0, np.empty((0, width), self.dtype), self.pieces(min(at_once, LINES_AT_ONCE)))
        else:
            place = self._at[0]
        found = [np.empty((0, width), self.dtype)]
        at, read, pieces = place
        while at < row + rows:
            if not len(read):
                read = next(pieces, read)
                if not len(read):
                    raise ValueError(f"{self.path} became shorter while it was read: write it again.")
            found.append(read[max(row - at, 0) : row + rows - at])
            used = min(len(read), row + rows - at)
            at, read = at + used, read[used:]
        self._at[:] = [Place(at, read, pieces)] if at < self.shape[0] else []  # and close the file
        return np.concatenate(found).astype(self.dtype, copy=False).reshape(-1)

    def as_vector(self) -> TableRows:
        """The same as one number for each row, if there is one column."""
        shape = self.shape[:1] if self.shape[1] == 1 else self.shape
        return TableRows(self.path, shape, self.dtype, 0, False, self.names, self.kinds, self.has_holes)


@dataclass(frozen=True, eq=False)
class MaskRows(NpyFile):
    """Zeros and ones that are read as False and True.

    Args:
        name: What they are called.
        numbers: The zeros and ones.
    """

    name: str
    numbers: NpyFile

    @classmethod
    def named(cls, name: str, numbers: NpyFile) -> MaskRows:
        """The mask in an array."""
        return cls(numbers.path, numbers.shape, np.dtype(np.bool_), 0, False, name, numbers)

    def read(self, first: int, count: int) -> Column:
        return flags(self.name, self.numbers.read(first, count), self.path, first)


def check_text(path: Path, delimiter: str) -> list[str]:
    """The names of the columns of a text without a heading; refuse one, and another mark between its cells."""
    if delimiter not in SEPARATORS:
        raise ValueError(
            f"{path} is said to have {delimiter!r} between its cells, and one of {SEPARATORS!r} is needed."
        )
    names = text_tables.columns_of(path)
    if names != [str(at) for at in range(len(names))]:
        raise ValueError(
            f"{path} begins with the line {delimiter.join(names)!r:.60}, and each line of a chunk is numbers: "
            f"remove a heading, and put {delimiter!r} between cells."
        )
    return names
