"""The cells of a table with keys, in pieces: numbers, words or dates, and which of them are missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import NEVER
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.tables import look_at
from lightning_gnn_dist.prepare.files.text_tables import Progress, Scan

SECONDS = np.dtype("datetime64[s]")


class Cells(NamedTuple):
    """Some cells of a column.

    Attributes:
        values: Whole numbers, floating point numbers, words or dates in seconds; of lists one array for each.
        missing: Which of them are not there.
    """

    values: Column
    missing: Column

    @property
    def are_words(self) -> bool:
        return self.values.dtype.kind == "U"

    @property
    def are_dates(self) -> bool:
        return self.values.dtype.kind == "M"

    @property
    def are_lists(self) -> bool:
        return self.values.dtype.kind == "O"

    def first_bad(self, is_bad: Column, first: int) -> str:
        """Say in which row, counted from 1, the first bad cell is, and what it holds."""
        row = int(is_bad.argmax())
        return f"holds {str(self.values[row])!r} in row {first + row + 1}"


@dataclass(frozen=True, eq=False)
class CellTable:
    """A table of which no more than some rows are in memory.

    Args:
        path: The table.
        names: The columns that are read.
        num_rows: The number of rows.
        rows_at_once: The rows of a piece.
        scan: What a text holds.
    """

    path: Path
    names: Sequence[str]
    num_rows: int
    rows_at_once: int
    scan: Scan | None

    @classmethod
    def of(cls, path: Path, names: Sequence[str], memory_bytes: int, on_progress: Progress) -> CellTable:
        """Read a text once, to learn what its columns hold; of Parquet the headers."""
        is_parquet = parquet.is_parquet(path)
        num_columns = len(names) if is_parquet else len(text_tables.columns_of(path))
        at_once, scan = look_at(path, num_columns, memory_bytes, on_progress)
        return cls(path, names, scan.num_rows, at_once, None if is_parquet else scan)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Cells]]]:
        """Yield the number of the first row of each piece, and its columns by name."""
        first = 0
        for piece in self._pieces():
            length = len(next(iter(piece.values())).missing) if piece else self.num_rows
            if length:
                yield first, piece
            first += length

    def _pieces(self) -> Iterator[dict[str, Cells]]:
        if self.scan is None:
            for batch in parquet.batches(self.path, self.names, self.rows_at_once):
                yield {name: _of_arrow(batch.column(name)) for name in self.names}
            return
        kept, kinds = self.scan.pieces, self.scan.kinds
        for piece in text_tables.read_pieces(self.path, kinds, self.rows_at_once) if kept is None else kept:
            yield {name: _of_text(piece[name]) for name in self.names}


def lists_in(path: Path) -> set[str]:
    """The columns that hold lists, or other things that are neither numbers, words nor dates."""
    return set() if not parquet.is_parquet(path) else parquet.nested_columns(path)


def _of_text(column: Column) -> Cells:
    missing = column == "" if column.dtype.kind == "U" else np.isnan(column)
    return Cells(column, missing)


def _of_arrow(array: Any) -> Cells:
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if types.is_string(array.type) or types.is_large_string(array.type):
        words = np.array(array.fill_null("").to_pylist(), np.str_)
        return Cells(words, missing | (words == ""))
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return Cells(_lists_of(array), missing)
    if types.is_timestamp(array.type) or types.is_date(array.type):
        moments = array.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).fill_null(0)
        return Cells((moments.to_numpy() // 1_000_000).astype(SECONDS), missing)
    if types.is_integer(array.type) or types.is_boolean(array.type):
        return Cells(array.cast(pa.int64()).fill_null(0).to_numpy(), missing)
    numbers = array.cast(pa.float64()).fill_null(np.nan).to_numpy()
    return Cells(numbers, missing | np.isnan(numbers))


def _lists_of(array: Any) -> Column:
    """An array for each cell, without what is missing in it."""
    lists = np.empty(len(array), np.object_)
    for row, entries in enumerate(array.to_pylist()):
        lists[row] = np.array([entry for entry in entries or () if entry is not None])
    return lists


def as_numbers(cells: Cells) -> Column | None:
    """Cells as floating point numbers, NaN where they are missing; None if some are words."""
    if cells.are_words:
        try:
            return np.where(cells.missing, "nan", cells.values).astype(np.float64)
        except ValueError:
            return None
    if cells.are_dates:
        return None
    return np.where(cells.missing, np.nan, cells.values.astype(np.float64))


def as_dates(cells: Cells) -> Column | None:
    """Cells as seconds since 1970 (of UTC, if zones are told), 0 where they are missing; None if some are no dates."""
    if cells.are_dates:
        return np.where(cells.missing, 0, cells.values.astype(np.int64))
    if not cells.are_words or not np.isin(cells.values[~cells.missing].astype("U1"), list("0123456789")).all():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no explicit representation of timezones")  # NumPy counts them in
        try:
            dates = np.where(cells.missing, "1970-01-01", cells.values).astype("datetime64[us]")
        except ValueError:
            return None
    return dates.astype(np.int64) // 1_000_000


def unreadable(cells: Cells, read: Callable[[Cells], Column | None]) -> Column:
    """Which cells cannot be read so; the first that is there, if it is none of them alone."""
    places = [slice(at, at + 1) for at in range(len(cells.missing))]
    found = np.array([read(Cells(cells.values[at], cells.missing[at])) is None for at in places])
    return found if found.any() else ~cells.missing


def as_times(name: str, cells: Cells, path: Path, first: int) -> tuple[Column, bool]:
    """The times of rows as whole numbers, ``NEVER`` where they are missing, and whether they are dates."""
    dates = as_dates(cells)
    if dates is not None and not (cells.are_words and as_numbers(cells) is not None):
        return np.where(cells.missing, NEVER, dates), True
    numbers = cells.values if cells.values.dtype.kind in "iu" else as_numbers(cells)
    if numbers is None:
        told = cells.first_bad(unreadable(cells, as_dates), first)
        raise ValueError(
            f"{path}: column {name!r} {told}, and times are dates, such as 2024-07-01 12:00:00, or whole numbers."
        )
    is_bad = ~cells.missing & ((numbers % 1 != 0) | ~(np.abs(numbers) < NEVER))
    if is_bad.any():
        raise ValueError(
            f"{path}: column {name!r} {cells.first_bad(is_bad, first)}, and times are whole numbers, such as seconds "
            "since 1970, or dates."
        )
    return np.where(cells.missing, NEVER, np.nan_to_num(numbers).astype(np.int64)), False


def as_keys(name: str, cells: Cells, path: Path, first: int) -> Column:
    """The keys in some cells, whole numbers or words, of those that are not missing."""
    values = cells.values[~cells.missing]
    if values.dtype.kind == "f":
        is_bad = ~cells.missing & ~((np.abs(cells.values) < 2**53) & (cells.values % 1 == 0))
        if is_bad.any():
            raise ValueError(
                f"{path}: column {name!r} {cells.first_bad(is_bad, first)}, and keys are whole numbers or words."
            )
        return values.astype(np.int64)
    if cells.are_dates or cells.are_lists:
        held = "dates" if cells.are_dates else "lists"
        raise ValueError(f"{path}: column {name!r} holds {held}, and keys are whole numbers or words.")
    return values


def joined(pieces: Collection[Column]) -> Column:
    """Pieces of a column one after the other; words where some are words."""
    found = list(pieces)
    if len({piece.dtype.kind for piece in found if piece.size}) > 1:
        found = [piece.astype(np.str_) for piece in found]
    return np.concatenate([piece for piece in found if piece.size] or found)
