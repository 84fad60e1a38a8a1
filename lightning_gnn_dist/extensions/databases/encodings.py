"""What a column becomes: its kind and statistics, from rows before the training cut alone, and then its numbers.

number    (v - mean) / deviation, within 10 of 0; a missing one is 0, with a mark beside it if any was missing
category  the place of a word among those seen twice; others share a row, as do those that are missing
time      sine and cosine of the hour, of the weekday and of the day of the year, and the moment itself, for an age
text      a row of numbers, of a function that is named, or by hashing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import CATEGORIES, MISSING, MOMENTS, NO_MOMENT, NUMBERS, UNSEEN
from lightning_gnn_dist.prepare.tables.columns import MOST_WORDS, words_of
from lightning_gnn_dist.prepare.tables.engine import WHOLE, Cells, Table, Work, places_of, quoted
from lightning_gnn_dist.prepare.tables.text import Embed

MOST_DEVIATIONS = 10.0
_OF_WORDS = (None, "category")
PERIODS = (86_400, 7 * 86_400, 31_556_952)  # a day, a week, a year, in seconds


@dataclass(frozen=True)
class Encoding:
    """Turns cells of a column into numbers.

    Args:
        name: The column.
        cells: Its cells.
        kind: What it is.
        is_marked: Whether a mark says which cells are missing.
        mean: Of numbers.
        deviation: Of numbers; 0 if all are one.
        words: Of a category, in order.
        periods: Those in which dates vary.
        has_moments: Whether dates are kept themselves.
        embed: Turns texts into rows of numbers.
        width: How many numbers a text becomes.
    """

    name: str
    cells: Cells
    kind: str
    is_marked: bool = False
    mean: float = 0.0
    deviation: float = 0.0
    words: Sequence[str] = ()
    periods: Sequence[int] = ()
    has_moments: bool = False
    embed: Embed | None = None
    width: int = 0

    @property
    def sql(self) -> str:
        """The SQL of a cell, NULL if it is missing."""
        return {"number": self.cells.number, "time": self.cells.seconds}.get(self.kind, self.cells.value)

    @property
    def size(self) -> int:
        """Of a category, the number of its values."""
        return len(self.words) + UNSEEN + 1 if self.kind == "category" else 0

    @property
    def widths(self) -> dict[str, int]:
        """How many columns of which node arrays it makes."""
        if self.kind == "category":
            return {CATEGORIES: 1}
        numbers = {"number": int(self.deviation > 0), "time": 2 * len(self.periods), "text": self.width}[self.kind]
        return {NUMBERS: numbers + self.is_marked} | ({MOMENTS: int(self.has_moments)} if self.kind == "time" else {})

    def __call__(self, column: Any) -> dict[str, Column]:
        """The numbers of a piece of pyarrow, by array."""
        if self.kind == "category":
            place = places_of(column, self.words)
            codes = np.where(place < 0, UNSEEN, place + UNSEEN + 1)
            return {CATEGORIES: np.where(_missing(column), MISSING, codes).astype(np.int32)[:, None]}
        if self.kind == "number":
            values = column.to_numpy(zero_copy_only=False).astype(np.float64)
            missing, numbers = np.isnan(values), list[Column]()
            if self.deviation > 0:
                standard = np.nan_to_num((values - self.mean) / self.deviation)
                numbers = [standard.clip(-MOST_DEVIATIONS, MOST_DEVIATIONS)]
        elif self.kind == "time":
            missing, dates = _missing(column), column.fill_null(0).to_numpy(zero_copy_only=False)
            turns = [2 * np.pi * (dates % period) / period for period in self.periods]
            numbers = [np.where(missing, 0, wave(turn)) for turn in turns for wave in (np.sin, np.cos)]
        else:
            assert self.embed is not None
            missing, rows = _missing(column), self.embed(column.fill_null("").to_pylist())
            if rows.shape[1] != self.width:
                raise ValueError(
                    f"column {self.name!r}: the function of texts made rows of {rows.shape[1]} numbers, and of "
                    f"{self.width} before."
                )
            numbers = [np.where(missing[:, None], 0, rows)]
        marks = [missing] if self.is_marked else []
        made = {NUMBERS: np.column_stack([*numbers, *marks]).astype(np.float32)} if numbers or marks else {}
        if self.has_moments:
            made[MOMENTS] = np.where(missing, NO_MOMENT, dates)[:, None]
        return made


def _missing(column: Any) -> Column:
    found: Column = column.is_null().to_numpy(zero_copy_only=False)
    return found


def _asked(word: str, number: str, date: str) -> dict[str, str]:
    """What one look at a column tells, given what a cell is called as each: of the rows before the cut, and of all."""
    seen, finite = "FILTER (seen)", f"FILTER (seen AND isfinite({number}))"
    asked = {"there": f"count({word}) {seen}", "numbers": f"count({number}) {seen}"}
    asked |= {"nans": f"count(*) FILTER (seen AND isnan({number}))", "mean": f"avg({number}) {finite}"}
    asked |= {"deviation": f"stddev_pop({number}) {finite}", "dates": f"count({date}) {seen}"}
    asked |= {f"in_{at}": f"max({date} % {at}) {seen} > min({date} % {at}) {seen}" for at in PERIODS}
    asked |= {"words": f"approx_count_distinct({word}) {seen}", "all_there": f"count({word})"}
    asked |= {"all_numbers": f"count({number})", "all_infinite": f"count(*) FILTER (isinf({number}))"}
    return asked | {"all_dates": f"count({date})"}


@dataclass(frozen=True)
class Scan:
    """Looks at the columns of a table for what becomes of them. What cannot be right is noted.

    Args:
        work: Reads the table.
        table: The table.
        asked: The columns, and their kinds where these are told.
        seen: The SQL of whether a row is before the cut.
        row_time: The column of the dates of rows, whose ages are known without it.
        embed: Turns texts into rows of numbers.
    """

    work: Work
    table: Table
    asked: Mapping[str, str | None]
    seen: str
    row_time: str | None
    embed: Embed

    def __call__(self) -> tuple[list[Encoding], dict[str, str]]:
        """How each column is encoded, and why others are left out."""
        cells = [Cells(quoted(name), self.table.types[name]) for name in self.asked]
        if not cells:
            return [], {}
        rows, looks = self._looks(cells)
        kinds = dict(zip(self.asked, map(self._kind, self.asked, cells, looks), strict=True))
        of_words = {name: each for (name, kind), each in zip(kinds.items(), cells, strict=True) if kind in _OF_WORDS}
        about = {name: look.words for name, look in zip(kinds, looks, strict=True)}
        told, way_out = [name for name in of_words if self.asked[name]], ", too many for a category: make it text."
        words = words_of(self.work, self.table, of_words, about, told, way_out, self.seen)
        made, left_out = [], dict[str, str]()
        for (name, kind), each, look in zip(kinds.items(), cells, looks, strict=True):
            counts = words.get(name, {})
            if kind is None:
                few = 0 < len(counts) <= min(MOST_WORDS, max(sum(counts.values()) // 2, 2))
                kind = "category" if few else "text"
            there = look.numbers - look.nans if kind == "number" else look.there
            if there:
                found = self._encoding(Encoding(name, each, kind, 0 < there < rows), look, counts)
                if any(found.widths.values()) and (kind != "category" or len(counts) > 1 or found.is_marked):
                    made.append(found)
                else:
                    left_out[name] = "has one value before the training cut"
            elif rows or name != self.row_time:
                left_out[name] = "has no value before the training cut"
        return made, left_out

    def _looks(self, cells: Sequence[Cells]) -> tuple[int, list[Any]]:
        """How many rows are before the cut, and what one look at all columns tells."""
        each_as = [
            f"{sql} AS {what}{at}"
            for at, each in enumerate(cells)
            for what, sql in (("w", each.value), ("n", each.number), ("d", each.seconds))
        ]
        rows = f"(SELECT {', '.join(each_as)}, {self.seen} AS seen FROM {self.table.name})"
        asked = [
            {"rows": "count(*) FILTER (seen)"},
            *(_asked(f"w{at}", f"n{at}", f"d{at}") for at in range(len(cells))),
        ]
        with self.work.one_thread():
            of_all, *looks = self.work.looks(replace(self.table, name=rows), asked)
        return of_all.rows, looks

    def _kind(self, name: str, cells: Cells, look: Any) -> str | None:
        """The kind that was told, or else the first that fits; None of a category, or a text."""
        is_number = cells.type in WHOLE or cells.is_real or (cells.is_text and look.there == look.numbers)
        is_time = cells.is_date or (cells.is_text and look.there == look.dates)
        kind = self.asked[name] or ("number" if is_number else "time" if is_time else None)
        if not look.there:
            return kind
        told, way_out = f"{self.table.source}: column {name!r}", "say that it is a category, or text."
        note = partial(self.work.refuse_cells, self.table, name)
        if kind == "number" and not is_number:
            self.work.problems.append(f"{told} is said to be a number, and holds words: {way_out}")
        elif kind == "time" and not is_time:
            self.work.problems.append(f"{told} is said to be a time, and holds other things than dates: 2024-07-01.")
        elif kind == "number" and look.all_numbers < look.all_there:
            what = "and is a column of numbers: empty cells are missing ones, and where words are meant"
            note(f"{cells.value} IS NOT NULL AND {cells.number} IS NULL", f"{what} {way_out}")
        elif kind == "number" and look.all_infinite:
            note(f"isinf({cells.number})", "which is no finite number: empty the cell, or give one.")
        elif kind == "time" and look.all_dates < look.all_there:
            bad = f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL"
            note(bad, "and is a column of dates, such as 2024-07-01.")
        return kind

    def _encoding(self, made: Encoding, look: Any, counts: Mapping[str, int]) -> Encoding:
        if made.kind == "number":
            mean, deviation = look.mean or 0.0, look.deviation or 0.0
            is_rounding = deviation <= 1e-12 * max(1.0, abs(mean))
            return replace(made, mean=mean, deviation=0.0 if is_rounding else deviation)
        if made.kind == "time":
            return replace(
                made,
                periods=[at for at in PERIODS if getattr(look, f"in_{at}")],
                has_moments=made.name != self.row_time,
            )
        if made.kind == "category":
            return replace(made, words=sorted(word for word, times in counts.items() if times > 1))
        return replace(made, embed=self.embed, width=self.embed([""]).shape[1])
