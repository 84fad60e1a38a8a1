"""What a column becomes: its kind and statistics, from rows before the training cut alone, and then its numbers.

number    (v - mean) / deviation, within 10 of 0; a missing one is 0, with a mark beside it if any was missing
category  the place of a word among those seen twice; others share a row, as do those that are missing
time      sine and cosine of the hour, of the weekday and of the day of the year, and the moment itself, for an age
text      a row of numbers, of a function that is named, or by hashing
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import CATEGORIES, MISSING, MOMENTS, NO_MOMENT, NUMBERS, UNSEEN
from lightning_gnn_dist.prepare.databases.cells import Cells, as_dates, as_numbers, unreadable
from lightning_gnn_dist.prepare.databases.text import Embed

MOST_LIKELY = 1_000  # different words of what is taken for a category unless it is said
MOST = 100_000  # different words of a category, for each of which a model learns a row
MOST_DEVIATIONS = 10.0
PERIODS = (86_400.0, 7 * 86_400.0, 365.2425 * 86_400.0)  # a day, a week, a year, in seconds


class Encoding(Protocol):
    """Turns cells of a column into numbers."""

    @property
    def size(self) -> int:
        """Of a category, the number of its values."""
        ...

    @property
    def widths(self) -> dict[str, int]:
        """How many columns of which node arrays it makes."""
        ...

    def __call__(self, cells: Cells, where: str, first: int) -> dict[str, Column]:
        """The numbers of cells, by array. ``where`` names the column, and ``first`` its first row, for errors."""
        ...


@dataclass
class Moments:
    """Mean and deviation of numbers that come piece by piece."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Column) -> None:
        if values.size:
            both, shift = self.count + values.size, float(values.mean()) - self.mean
            self.squares += float(((values - values.mean()) ** 2).sum()) + shift**2 * self.count * values.size / both
            self.mean, self.count = self.mean + shift * values.size / both, both

    @property
    def deviation(self) -> float:
        found = float(np.sqrt(self.squares / max(self.count, 1)))
        return found if found > 1e-12 * max(1.0, abs(self.mean)) else 0.0


@dataclass(frozen=True)
class Numbers:
    """Standardised numbers, with a mark for those that are missing if there were any before the cut."""

    mean: float
    deviation: float
    is_marked: bool
    size: int = 0

    @property
    def widths(self) -> dict[str, int]:
        return {NUMBERS: (self.deviation > 0) + self.is_marked}

    def __call__(self, cells: Cells, where: str, first: int) -> dict[str, Column]:
        numbers = as_numbers(cells)
        if numbers is None:
            told = cells.first_bad(unreadable(cells, as_numbers), first)
            raise ValueError(
                f"{where} {told}, and is a column of numbers: empty cells are missing ones, and where "
                "words are meant say that it is a category, or text."
            )
        if (is_bad := np.isinf(numbers)).any():
            raise ValueError(f"{where} {cells.first_bad(is_bad, first)}: empty the cell, or give a finite number.")
        made = [cells.missing] if self.is_marked else []
        if self.deviation > 0:
            standard = np.nan_to_num((numbers - self.mean) / self.deviation)
            made.insert(0, standard.clip(-MOST_DEVIATIONS, MOST_DEVIATIONS))
        return {NUMBERS: np.column_stack(made).astype(np.float32)}


@dataclass(frozen=True)
class Categories:
    """Words as numbers of rows of a table that a model learns."""

    words: Column
    size: int

    @property
    def widths(self) -> dict[str, int]:
        return {CATEGORIES: 1}

    def __call__(self, cells: Cells, where: str, first: int) -> dict[str, Column]:
        found = as_words(cells)
        at = np.searchsorted(self.words, found).clip(max=max(len(self.words) - 1, 0))
        known = self.words[at] == found if len(self.words) else np.zeros(len(found), np.bool_)
        codes = np.where(cells.missing, MISSING, np.where(known, at + UNSEEN + 1, UNSEEN))
        return {CATEGORIES: codes.astype(np.int32)[:, None]}


@dataclass(frozen=True)
class Dates:
    """Where in the day, the week and the year a date lies, as far as that varied, and the moment itself."""

    periods: tuple[float, ...]
    is_marked: bool
    has_moments: bool
    size: int = 0

    @property
    def widths(self) -> dict[str, int]:
        return {NUMBERS: 2 * len(self.periods) + self.is_marked, MOMENTS: int(self.has_moments)}

    def __call__(self, cells: Cells, where: str, first: int) -> dict[str, Column]:
        dates = as_dates(cells)
        if dates is None:
            told = cells.first_bad(unreadable(cells, as_dates), first)
            raise ValueError(f"{where} {told}, and is a column of dates, such as 2024-07-01.")
        turns = [2 * np.pi * (dates % period) / period for period in self.periods]
        made = [np.where(cells.missing, 0, wave(turn)) for turn in turns for wave in (np.sin, np.cos)]
        made += [cells.missing] if self.is_marked else []
        numbers = {NUMBERS: np.column_stack(made).astype(np.float32)} if made else {}
        return numbers | ({MOMENTS: np.where(cells.missing, NO_MOMENT, dates)[:, None]} if self.has_moments else {})


@dataclass(frozen=True)
class Texts:
    """Rows of numbers of texts, with a mark for those that are missing if there were any before the cut."""

    embed: Embed
    width: int
    is_marked: bool
    size: int = 0

    @property
    def widths(self) -> dict[str, int]:
        return {NUMBERS: self.width + self.is_marked}

    def __call__(self, cells: Cells, where: str, first: int) -> dict[str, Column]:
        rows = np.where(cells.missing[:, None], 0, self.embed(as_words(cells).tolist()))
        if rows.shape[1] != self.width:
            raise ValueError(
                f"{where}: the function of texts made rows of {rows.shape[1]} numbers, and of {self.width} before."
            )
        return {NUMBERS: np.column_stack([rows, cells.missing] if self.is_marked else [rows]).astype(np.float32)}


def as_words(cells: Cells) -> Column:
    """Cells as words; whole numbers without a fraction."""
    values = cells.values
    if values.dtype.kind == "f" and not (values[~cells.missing] % 1).any():
        values = np.where(cells.missing, 0, values).astype(np.int64)
    return values if cells.are_words else values.astype(np.str_)


@dataclass
class ColumnScan:
    """What the rows of a column before the cut hold.

    Args:
        name: Its name.
        asked: Its kind, if that is told.
        embed: Turns texts into rows of numbers.
        is_row_time: Whether it is the time of the row, whose age is known without it.
    """

    name: str
    asked: str | None
    embed: Embed
    is_row_time: bool = False
    numbers: Moments = field(default_factory=Moments)
    words: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0
    num_missing: int = 0
    may_be: set[str] = field(default_factory=lambda: {"number", "time", "category"})
    turns: dict[float, set[float]] = field(default_factory=lambda: {period: set() for period in PERIODS})

    def add(self, cells: Cells) -> None:
        """Look at some rows before the cut."""
        self.num_rows += len(cells.missing)
        self.num_missing += int(cells.missing.sum())
        there = Cells(cells.values[~cells.missing], cells.missing[~cells.missing])
        if not len(there.missing):
            return
        if "number" in self.may_be:
            self._add_numbers(as_numbers(there))
        if "time" in self.may_be:
            self._add_dates(as_dates(there))
        if "category" in self.may_be and (there.are_words or self.asked == "category"):
            self.words.update(as_words(there).tolist())
            if len(self.words) > MOST:
                self.may_be.discard("category")
                self.words.clear()

    def _add_numbers(self, numbers: Column | None) -> None:
        if numbers is None:
            self.may_be.discard("number")
        else:
            self.numbers.add(numbers[np.isfinite(numbers)])

    def _add_dates(self, dates: Column | None) -> None:
        if dates is None:
            self.may_be.discard("time")
            return
        for period, found in self.turns.items():
            if len(found) < 2:  # one day after the other may begin at one hour
                found.update(np.unique(dates % period)[:2].tolist())

    @property
    def kind(self) -> str:
        """The kind that was told, or else the first that fits: number, time, category, text."""
        if self.asked is not None:
            return self.asked
        found = next((kind for kind in ("number", "time") if kind in self.may_be), None)
        few = len(self.words) <= min(MOST_LIKELY, max(sum(self.words.values()) // 2, 2))
        return found or ("category" if "category" in self.may_be and few else "text")

    def encoding(self, where: str) -> Encoding | str:
        """How the column is encoded; or why it is left out, as the end of a sentence."""
        kind, is_marked = self.kind, 0 < self.num_missing < self.num_rows
        if self.num_missing == self.num_rows:
            return "has no value before the training cut"
        if kind == "number":
            if "number" not in self.may_be:
                raise ValueError(
                    f"{where} is said to be a number, and holds words: say that it is a category, or text."
                )
            made: Encoding = Numbers(self.numbers.mean, self.numbers.deviation, is_marked)
        elif kind == "time":
            if "time" not in self.may_be:
                raise ValueError(f"{where} is said to be a time, and holds other things than dates such as 2024-07-01.")
            varied = tuple(period for period, found in self.turns.items() if len(found) > 1)
            made = Dates(varied, is_marked, not self.is_row_time)
        elif kind == "category":
            if "category" not in self.may_be:
                raise ValueError(
                    f"{where} has more than {MOST:,} different words, too many for a category: make it text."
                )
            repeated = sorted(word for word, count in self.words.items() if count > 1)
            made = Categories(np.array(repeated, np.str_), len(repeated) + UNSEEN + 1)
            if len(self.words) == 1 and not is_marked:
                return "has one value before the training cut"
        else:
            made = Texts(self.embed, self.embed([""]).shape[1], is_marked)
        return made if any(made.widths.values()) else "has one value before the training cut"
