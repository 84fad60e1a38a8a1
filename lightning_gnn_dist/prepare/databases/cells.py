"""The cells of a table with keys, in pieces: numbers, words or dates, and which of them are missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import NEVER
from lightning_gnn_dist.prepare.reading import Progress
from lightning_gnn_dist.prepare.tables import cells as sql
from lightning_gnn_dist.prepare.tables.engine import Work, quoted, told
from lightning_gnn_dist.prepare.tables.reading import load, types_of

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


class CellTable:
    """A table of which no more than some rows are in memory.

    Args:
        path: The table.
        names: The columns that are read.
        memory_bytes: Bytes that a piece may take.
        on_progress: Called with the share that is done of a look at what the columns hold.
    """

    def __init__(self, path: Path, names: Sequence[str], memory_bytes: int, on_progress: Progress) -> None:
        self.path, self.names = path, names
        self._work = Work(None, memory_bytes)
        self._table = load(self._work, "cells", path)
        cells = {name: sql.Cells(quoted(name), self._table.types[name]) for name in names}
        texts = [] if self._table.is_typed else [*cells.values()]
        asked = ["count(*)", *(w for each in texts for w in (f"count(*) FILTER ({each.written_whole})", *each.look))]
        with told(path):
            self.num_rows, *found = self._work.look(self._table, ", ".join(asked))
        self._work.check()
        if not self.num_rows:
            raise ValueError(f"{path} has no rows: leave the table out, or fill it.")
        of_texts = {each.name: found[4 * at : 4 * at + 4] for at, each in enumerate(texts)}
        self._cells = [(each, _kind(each, of_texts.get(each.name))) for each in cells.values()]
        on_progress(1.0)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Cells]]]:
        """Yield the number of the first row of each piece, and its columns by name."""
        cells = [f"{_VALUES[kind](each)} AS v{at}" for at, (each, kind) in enumerate(self._cells)]
        cells += [f"{each.name} IS NULL AS m{at}" for at, (each, _) in enumerate(self._cells)]
        first, query = 0, f"SELECT {', '.join(cells or ['1 AS v'])} FROM {self._table.name}"
        with told(self.path):
            for piece in self._work.stream(query, self._table):
                found = {}
                for at, (name, (_, kind)) in enumerate(zip(self.names, self._cells, strict=True)):
                    found[name] = _of_arrow(piece[f"v{at}"], kind, piece[f"m{at}"])
                yield first, found
                first += len(next(iter(piece.values())))


_VALUES: dict[str, Callable[[sql.Cells], str]] = {
    "whole": lambda each: f"coalesce(CAST({each.name} AS BIGINT), 0)",
    "number": lambda each: f"coalesce({each.number}, 'nan'::DOUBLE)",
    "word": lambda each: f"coalesce({each.word}, '')",
    "list": lambda each: each.name,
    "date": lambda each: f"coalesce(epoch_us({each.moment}), 0)",
}


def _kind(cells: sql.Cells, found: Sequence[int] | None) -> str:
    """The kind of all cells. Whole numbers of a text that are not written as such, as 007, are words."""
    if found is None:
        kinds = {
            "list": cells.is_list,
            "whole": cells.type in sql.WHOLE,
            "number": cells.is_real,
            "date": cells.is_date,
        }
        return next((kind for kind, is_kind in kinds.items() if is_kind), "word")
    written, count, whole, number = found
    return "whole" if written == count else "number" if number == count and whole < count else "word"


def lists_in(path: Path) -> set[str]:
    """The columns that hold lists, or other things that are neither numbers, words nor dates."""
    found = {name: sql.Cells(name, kind) for name, kind in types_of(path).items()}
    return {n for n, c in found.items() if not (c.is_text or c.is_date or c.is_real or c.type in sql.WHOLE)}


def _of_arrow(array: Any, kind: str, missing: Any) -> Cells:
    are_missing = missing.to_numpy(zero_copy_only=False)
    if kind == "list":
        return Cells(_lists_of(array), are_missing)
    if kind == "word":
        return Cells(np.array(array.to_pylist(), np.str_), are_missing)
    values = array.to_numpy(zero_copy_only=False)
    if kind == "date":
        return Cells((values // 1_000_000).astype(SECONDS), are_missing)
    return Cells(values, are_missing | np.isnan(values) if kind == "number" else are_missing)


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
