"""Tables as a database has them: what keys and times are, and what the other columns become.

Keys are whole numbers or words, times whole numbers, and each key names a row. A column gets its kind and statistics
from rows before the training cut alone, and then its numbers:

number    (v - mean) / deviation, within 10 of 0; a missing one is 0, with a mark beside it if any was missing
category  the place of a word among those seen twice; others share a row, as do those that are missing
time      sine and cosine of the hour, of the weekday and of the day of the year, and the moment itself, for an age
text      a row of numbers, of a function that is named, or by hashing
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import (
    CATEGORIES,
    MISSING,
    MOMENTS,
    NEVER,
    NO_MOMENT,
    NUMBERS,
    TIME,
    UNSEEN,
)
from lightning_gnn_dist.prepare.columns import LONG, MOST_WORDS, Feature, Made, arrays_of, words_of
from lightning_gnn_dist.prepare.engine import DATES, WHOLE, Cells, Table, Work, places_of, quoted, told
from lightning_gnn_dist.prepare.reading import load
from lightning_gnn_dist.prepare.text import Embed
from lightning_gnn_dist.prepare.unpack import Ids

NO_KEYS = "and keys are whole numbers or words."


@dataclass(frozen=True)
class Keyed:
    """A table.

    Args:
        table: What DuckDB reads.
        num_rows: How many rows there are.
        time: The SQL of the time of a row, ``NEVER`` where it has none; None without such a column.
        are_dates: Whether times are dates, in seconds since 1970.
    """

    table: Table
    num_rows: int
    time: str | None = None
    are_dates: bool = False

    @classmethod
    def load(cls, work: Work, name: str, path: Path, keys: Sequence[str], time: str | None) -> Keyed:
        """Load a file under a name; note what is wrong with keys and times."""
        with told(path):
            return cls.of(work, name, load(work, f"file of {name}", path), keys, time)

    @classmethod
    def of(cls, work: Work, name: str, table: Table, keys: Sequence[str], time: str | None = None) -> Keyed:
        """The same of a table that is loaded."""
        num_rows, looks = work.look_at_keys(name, table, [*keys, *([time] if time else [])])
        changed = {column: sql for column in keys if (sql := _key(work, table, column, looks[column]))}
        moment, are_dates = _time(work, table, time, looks[time]) if time else (None, False)
        if changed:
            columns = ", ".join(f"{sql} AS {quoted(column)}" for column, sql in changed.items())
            work.run(f"CREATE OR REPLACE VIEW {quoted(name)} AS SELECT * REPLACE ({columns}) FROM {table.name}")
            table = replace(table, name=quoted(name), types={**table.types, **dict.fromkeys(changed, "BIGINT")})
        return cls(table, num_rows, moment, are_dates)

    def refuse_unknown(self, work: Work, column: str, ids: Ids, table: str, key: str) -> None:
        """Note the cells that name no row of a table, which has such a key."""
        found, join = ids.join(Cells(f"e.{quoted(column)}", self.table.types[column]), "k", digits=True)
        rows = f'(SELECT e.*, {found} IS NULL AS " unknown" FROM {self.table.name} AS e{join})'
        what = f"which no row of {table} has as its {key}: add that row, or empty the cell."
        bad = f'" unknown" AND {quoted(column)} IS NOT NULL'
        work.refuse_cells(replace(self.table, name=rows), column, bad, what)


def span_of(times: Column, are_dates: bool) -> tuple[int, int, bool] | None:
    """The first and the last of some times, and whether they are dates, if there are any."""
    known = times[times != NEVER]
    return (int(known.min()), int(known.max()), are_dates) if known.size else None


def _key(work: Work, table: Table, column: str, look: Any) -> str | None:
    """The SQL of keys as whole numbers, if they are such and have another type."""
    cells = table.cells(column)
    if cells.is_list or cells.is_date:
        held = "dates" if cells.is_date else "lists"
        work.problems.append(f"{table.source}: column {column!r} holds {held}, {NO_KEYS}")
    elif cells.is_text and not table.is_typed and look.written == look.there:
        return f"CAST({cells.name} AS BIGINT)"
    elif cells.is_real or (cells.is_text and not table.is_typed and look.numbers == look.there > look.whole):
        number = f"({cells.real})"
        work.refuse_cells(table, column, f"abs({number}) >= {1 << 53} OR {number} % 1.0::DOUBLE <> 0", NO_KEYS)
        return f"TRY_CAST({number} AS BIGINT)"
    return None


def _time(work: Work, table: Table, column: str, look: Any) -> tuple[str, bool]:
    """The SQL of times, and whether they are dates."""
    cells = table.cells(column)
    is_number = look.numbers == look.there if cells.is_text else not cells.is_date
    if cells.is_date or (cells.is_text and not is_number):
        what = "and times are dates, such as 2024-07-01 12:00:00, or whole numbers."
        if look.dates < look.there:
            work.refuse_cells(table, column, f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", what)
        return f"coalesce({cells.seconds}, {NEVER})", True
    number = f"({cells.real})"
    if look.whole == look.there and not cells.is_real:
        return f"coalesce({cells.whole}, {NEVER})", False
    what = "and times are whole numbers, such as seconds since 1970, or dates."
    work.refuse_cells(table, column, f"{number} % 1.0::DOUBLE <> 0 OR abs({number}) >= {NEVER}", what)
    return f"coalesce(TRY_CAST({number} AS BIGINT), {NEVER})", False


MOST_DEVIATIONS = 10.0
PERIODS = (86_400, 7 * 86_400, 31_556_952)  # a day, a week, a year, in seconds
OF_SEEN = DATES | {  # what one look at a column tells of rows before the cut; of all rows, for what cannot be right
    "valued": "count({value}) FILTER (seen)",
    "numbers": "count({number})",
    "seen_numbers": "count({number}) FILTER (seen)",
    "nans": "count(*) FILTER (seen AND isnan({number}))",
    "mean": "avg({number}) FILTER (seen AND isfinite({number}))",
    "deviation": "stddev_pop({number}) FILTER (seen AND isfinite({number}))",
    "seen_dates": "count({seconds}) FILTER (seen)",
    "words": "approx_count_distinct({value}) FILTER (seen)",
    "all_valued": "count({value})",
    "infinite": "count(*) FILTER (isinf({number}))",
}
OF_SEEN |= {
    f"in_{at}": f"max({{seconds}} % {at}) FILTER (seen) > min({{seconds}} % {at}) FILTER (seen)" for at in PERIODS
}


@dataclass(frozen=True)
class Encoding(Feature):
    """Turns cells of a column into numbers, as those before the cut say.

    Args:
        deviation: Of numbers; 0 if all are one.
        periods: Those in which dates vary.
        has_moments: Whether dates are kept themselves.
        embed: Turns texts into rows of numbers.
        is_hidden: Whether a task must not see the column, which then has arrays of its own.
    """

    deviation: float = 0.0
    periods: Sequence[int] = ()
    has_moments: bool = False
    embed: Embed | None = None
    is_hidden: bool = False

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
            return {self._array(CATEGORIES): 1}
        numbers = {"number": int(self.deviation > 0), "time": 2 * len(self.periods), "text": self.width}[self.kind]
        found = {self._array(NUMBERS): numbers + self.is_marked, self._array(MOMENTS): int(self.has_moments)}
        return {array: width for array, width in found.items() if width}

    def _array(self, kind: str) -> str:
        return f"{self.name}_{kind}" if self.is_hidden else kind

    def of(self, column: Any) -> dict[str, Column]:
        """The numbers of a piece of pyarrow, by array."""
        missing: Column = column.is_null().to_numpy(zero_copy_only=False)
        if self.kind == "category":
            place = places_of(column, self.words)
            codes = np.where(missing, MISSING, np.where(place < 0, UNSEEN, place + UNSEEN + 1))
            return {self._array(CATEGORIES): codes.astype(np.int32)[:, None]}
        numbers, dates = list[Column](), missing
        if self.kind == "number":
            values = column.to_numpy(zero_copy_only=False).astype(np.float64)
            missing = np.isnan(values)
            if self.deviation > 0:
                standard = np.nan_to_num((values - self.mean) / self.deviation)
                numbers = [standard.clip(-MOST_DEVIATIONS, MOST_DEVIATIONS)]
        elif self.kind == "time":
            dates = column.fill_null(0).to_numpy(zero_copy_only=False)
            turns = [2 * np.pi * (dates % period) / period for period in self.periods]
            numbers = [np.where(missing, 0, wave(turn)) for turn in turns for wave in (np.sin, np.cos)]
        elif self.embed is not None:
            rows = self.embed(column.fill_null("").to_pylist())
            if rows.shape[1] != self.width:
                raise ValueError(
                    f"column {self.name!r}: the function of texts made rows of {rows.shape[1]} numbers, and of "
                    f"{self.width} before."
                )
            numbers = [np.where(missing[:, None], 0, rows)]
        numbers += [missing] if self.is_marked else []
        made = {self._array(NUMBERS): np.column_stack(numbers).astype(np.float32)} if numbers else {}
        if self.has_moments:
            made[self._array(MOMENTS)] = np.where(missing, NO_MOMENT, dates)[:, None]
        return made


class Encodings:
    """What the columns of a table of a database become: what :class:`Columns` is of other tables.

    Args:
        work: Reads the table.
        time: The SQL of the time of a row, if it has one.
        made: What others become.
        left_out: Why some become nothing.
    """

    categories: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self, work: Work, time: str | None, made: Sequence[Feature | Made], left_out: Mapping[str, str] | None = None
    ) -> None:
        self._work, self.left_out = work, left_out or {}
        self.all = [*([] if time is None else [Made(TIME, LONG, time)]), *made]

    @property
    def made(self) -> list[Made]:
        """Those that are no features."""
        return [each for each in self.all if isinstance(each, Made)]

    def of(self, piece: Mapping[str, Any]) -> dict[str, Column]:
        """The arrays of a piece."""
        return arrays_of(self.all, piece)

    def readings(self) -> Iterator[None]:
        """Come once, if nothing is wrong."""
        if not self._work.problems:
            yield


def encodings_of(
    work: Work,
    table: Table,
    asked: Mapping[str, str | None],
    seen: str,
    row_time: str | None,
    embed: Embed,
    hidden: Collection[str],
) -> tuple[list[Encoding], dict[str, str]]:
    """How each column of a table is encoded, and why others are left out. What cannot be right is noted.

    Args:
        work: Reads the table.
        table: The table.
        asked: The columns, and their kinds where these are told.
        seen: The SQL of whether a row is before the cut.
        row_time: The column of the dates of rows, whose ages are known without it.
        embed: Turns texts into rows of numbers.
        hidden: The columns that a task hides.
    """
    rows, looks = work.look_at(table, asked, OF_SEEN, seen) if asked else (0, {})
    kinds = {name: _kind(work, table, name, kind, looks[name]) for name, kind in asked.items()}
    of_words = {name: looks[name].words for name, kind in kinds.items() if kind in (None, "category")}
    told, way_out = [name for name in of_words if asked[name]], ", too many for a category: make it text."
    words = words_of(work, table, of_words, told, way_out, seen)
    made, left_out = [], dict[str, str]()
    for name, kind in kinds.items():
        look, counts = looks[name], words.get(name, {})
        if kind is None:
            few = 0 < len(counts) <= min(MOST_WORDS, max(sum(counts.values()) // 2, 2))
            kind = "category" if few else "text"
        there = look.seen_numbers - look.nans if kind == "number" else look.valued
        if there:
            found = Encoding(name, table.cells(name), kind, is_marked=0 < there < rows, is_hidden=name in hidden)
            found = _fitted(found, look, counts, has_moments=kind == "time" and name != row_time, embed=embed)
            if found.widths and (kind != "category" or len(counts) > 1 or found.is_marked):
                made.append(found)
            else:
                left_out[name] = "has one value before the training cut"
        elif rows or name != row_time:
            left_out[name] = "has no value before the training cut"
    return made, left_out


def _fitted(made: Encoding, look: Any, counts: Mapping[str, int], *, has_moments: bool, embed: Embed) -> Encoding:
    """The encoding with its statistics."""
    if made.kind == "number":
        mean, deviation = look.mean or 0.0, look.deviation or 0.0
        is_rounding = deviation <= 1e-12 * max(1.0, abs(mean))
        return replace(made, mean=mean, deviation=0.0 if is_rounding else deviation)
    if made.kind == "time":
        periods = [at for at in PERIODS if getattr(look, f"in_{at}")]
        return replace(made, periods=periods, has_moments=has_moments)
    if made.kind == "category":
        return replace(made, words=sorted(word for word, times in counts.items() if times > 1))
    return replace(made, embed=embed, width=embed([""]).shape[1])


def _kind(work: Work, table: Table, name: str, asked: str | None, look: Any) -> str | None:
    """The kind that was told, or else the first that fits; None of a category, or a text."""
    cells = table.cells(name)
    is_number = cells.type in WHOLE or cells.is_real or (cells.is_text and look.valued == look.seen_numbers)
    is_time = cells.is_date or (cells.is_text and look.valued == look.seen_dates)
    kind = asked or ("number" if is_number else "time" if is_time else None)
    if not look.valued:
        return kind
    told, way_out = f"{table.source}: column {name!r}", "say that it is a category, or text."
    note = partial(work.refuse_cells, table, name)
    if kind == "number" and not is_number:
        work.problems.append(f"{told} is said to be a number, and holds words: {way_out}")
    elif kind == "time" and not is_time:
        work.problems.append(f"{told} is said to be a time, and holds other things than dates: 2024-07-01.")
    elif kind == "number" and look.numbers < look.all_valued:
        what = "and is a column of numbers: empty cells are missing ones, and where words are meant"
        note(f"{cells.value} IS NOT NULL AND {cells.number} IS NULL", f"{what} {way_out}")
    elif kind == "number" and look.infinite:
        note(f"isinf({cells.number})", "which is no finite number: empty the cell, or give one.")
    elif kind == "time" and look.dates < look.all_valued:
        note(f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", "and is a column of dates, such as 2024-07-01.")
    return kind
