"""What the columns of a table become, as arrays that come piece by piece: labels, masks, times and features.

A feature is one of these kinds:

number    float32; an empty cell is the mean, with a mark beside the column
category  a whole number for each word, in order from 1; an empty cell, and a word that comes later, is 0
time      days since 1970-01-01, as a number is
text      64 numbers by hashing words
list      as many numbers as it is long

In a database, kinds and statistics are those of rows before the training cut, and other numbers are made:

number    (v - mean) / deviation, within 10 of 0; a missing one is 0, with a mark beside it if any was missing
category  the place of a word among those seen twice; others share a row, as do those that are missing
time      sine and cosine of the hour, of the weekday and of the day of the year, and the moment itself, for an age
text      a row of numbers, of a function that is named, or by hashing; a mark if any was missing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import CATEGORIES, MISSING, MOMENTS, NO_MOMENT, NUMBERS, UNSEEN
from lightning_gnn_dist.graph.typed.types import EDGE
from lightning_gnn_dist.prepare.arrays import SPLIT_WORDS, SPLITS, check_classes, check_purposes, purpose_of
from lightning_gnn_dist.prepare.engine import COUNTS, WHOLE, Bad, Cells, Table, Work, literal, numpy_of, places_of
from lightning_gnn_dist.prepare.plan import Plan, TablePlan
from lightning_gnn_dist.prepare.text import WIDTH, Embed, hash_words

MOST_WORDS = 1_000  # different ones of what is taken for a category unless it is said
MOST = 100_000  # of a category, for each of which a model may learn a row
NEARLY_ALL = 0.9  # of the cells of a column that is taken for one of numbers
MOST_DEVIATIONS = 10.0
SECONDS_OF_DAY = 86_400
PERIODS = (SECONDS_OF_DAY, 7 * SECONDS_OF_DAY, 31_556_952)  # a day, a week, a year
NO_SPLIT = ("", "none", "-")
UNEQUAL = "holds lists of unequal length: leave it out (--drop {})."
SURELY_EXACT = 1 << 24  # whole numbers below are numbers of float32
FLOAT, DOUBLE, INT, LONG, BOOL = map(np.dtype, (np.float32, np.float64, np.int32, np.int64, np.bool_))
OF_FEATURES = {  # what one look tells of a column, in the rows that are seen; and in all, for what cannot be right
    "there": "count({value}) FILTER (seen)",
    "numbers": "count({number}) FILTER (seen)",
    "dates": "count({seconds}) FILTER (seen)",
    "words": "approx_count_distinct({value}) FILTER (seen)",
    "mean": "avg({number}) FILTER (seen AND isfinite({number}))",
    "all_there": "count({value})",
    "all_numbers": "count({number})",
    "all_dates": "count({seconds})",
}
OF_ROLES = COUNTS | {"padded": "count({padded})"}  # of columns that are no features
OF_ALL = OF_ROLES | OF_FEATURES | {"seconds": "avg({seconds})"}  # of features where there is no cut
BEFORE_CUT = OF_FEATURES | {
    "nans": "count(*) FILTER (seen AND isnan({number}))",
    "deviation": "stddev_pop({number}) FILTER (seen AND isfinite({number}))",
}
BEFORE_CUT |= {
    f"in_{at}": f"max({{seconds}} % {at}) FILTER (seen) > min({{seconds}} % {at}) FILTER (seen)" for at in PERIODS
}


@dataclass(frozen=True)
class Cut:
    """What a database says of all columns of a table.

    Args:
        seen: The SQL of whether a row is before the training cut.
        time: The column of the dates of rows, whose ages are known without it.
        embed: Turns texts into rows of numbers.
        hidden: The columns that a task must not see, which have arrays of their own.
    """

    seen: str
    time: str | None
    embed: Embed
    hidden: Collection[str]


@dataclass(frozen=True)
class Made:
    """An array, or columns of one, and the cells that they are made of.

    Args:
        array: What it is called in the graph.
        dtype: Its type.
        sql: The SQL of a cell.
        width: How many numbers a cell has: 0 of a single one, which is no row of numbers.
        words: Classes or categories in order, where cells are words.
        first: The number of the first word.
        embed: Turns texts into rows of numbers, where cells are texts.
        are_dates: Whether cells are dates, which become seconds since 1970.
    """

    array: str
    dtype: np.dtype[Any]
    sql: str
    width: int = 0
    words: Sequence[str] | None = None
    first: int = 0
    embed: Embed | None = None
    are_dates: bool = False

    def of(self, column: Any) -> Column:
        """The rows of a piece, given its column of pyarrow."""
        missing: Column = column.is_null().to_numpy(zero_copy_only=False)
        if self.words is not None:
            values = places_of(column, self.words) + self.first
            values = np.where(missing, MISSING, values) if self.first else values
        elif self.embed is not None:
            values = np.where(missing[:, None], 0, self.embed(column.fill_null("").to_pylist()))
        else:
            values = numpy_of(column.flatten() if hasattr(column, "flatten") else column)  # which lists alone have
        values = values.astype(self.dtype, copy=False)
        return values.reshape(len(column), self.width) if self.width else values


@dataclass(frozen=True)
class Feature:
    """A column, and the numbers that it becomes.

    Args:
        name: The column.
        cells: Its cells.
        array: What edges call it. Nodes have categories in one array, and all else in others.
        cut: What a database says of it.
        asked: The kind that it is said to be.
        kind: What it is.
        width: How many numbers a cell becomes, without a mark.
        is_marked: Whether some cells are empty.
        mean: Of its numbers.
        deviation: Of its numbers; 0 if all are one.
        words: Of a category, in order.
        periods: In which its dates vary.
    """

    name: str
    cells: Cells
    array: str = ""
    cut: Cut | None = None
    asked: str | None = None
    kind: str = "number"
    width: int = 1
    is_marked: bool = False
    mean: float = 0.0
    deviation: float = 0.0
    words: Sequence[str] = ()
    periods: Sequence[int] = ()

    @property
    def mark(self) -> str:
        """The array of its mark, if it has one of its own, as edges have."""
        return f"{self.array}_is_missing" if self.array and self.is_marked else ""

    @property
    def size(self) -> int:
        """Of a category of a database, the number of its values."""
        return len(self.words) + UNSEEN + 1 if self.kind == "category" else 0

    @property
    def parts(self) -> list[Made]:
        """What is made of its cells: numbers, side by side with a mark, and of a date of a database a moment."""
        cells, cut, before = self.cells, self.cut, f"{self.name}_" if self.cut and self.name in self.cut.hidden else ""
        array, width = (self.array, 0) if self.array else (before + NUMBERS, 1)
        if self.kind == "category":
            array = self.array or before + CATEGORIES
            return [Made(array, INT, cells.value, width, self.words, UNSEEN + 1 if cut else 1)]
        there = cells.value
        if self.kind == "list":
            made = [Made(array, FLOAT, f"CAST({cells.name} AS FLOAT[])", self.width)]
        elif self.kind == "text":
            made = [Made(array, FLOAT, there, self.width, embed=self.embedded)]
        else:
            there, numbers = self._numbers
            made = [Made(array, FLOAT, sql, width) for sql in numbers]
        if self.is_marked:
            made.append(Made(self.mark or array, FLOAT, f"CAST({there} IS NULL AS FLOAT)", width))
        if self.kind == "time" and cut and self.name != cut.time:
            made.append(Made(before + MOMENTS, LONG, f"coalesce({there}, {NO_MOMENT})", 1))
        return made

    @property
    def _numbers(self) -> tuple[str, list[str]]:
        """The SQL of a number or a date, which may be missing, and of the numbers that are made of it."""
        cells, mean = self.cells, f"'{self.mean!r}'::DOUBLE"
        if self.cut is None:
            days = f"CAST({cells.seconds} / {SECONDS_OF_DAY}::DOUBLE AS FLOAT)"
            number = cells.number
            if cells.is_text and not self.asked:  # NaN, for which rows are looked at
                number = f"CASE WHEN {cells.padded} IS NULL THEN {number} END"
            there = days if self.kind == "time" else f"TRY_CAST({number} AS FLOAT)"
            return there, [f"coalesce({there}, CAST({mean} AS FLOAT))" if self.is_marked else there]
        if self.kind == "time":
            turns = [f"2 * pi() * (({cells.seconds} % {at} + {at}) % {at}) / {at}" for at in self.periods]
            return cells.seconds, [f"coalesce({wave}({turn}), 0)" for turn in turns for wave in ("sin", "cos")]
        standard = f"coalesce(({cells.real} - {mean}) / '{self.deviation!r}'::DOUBLE, 0)"
        within = f"least(greatest({standard}, -{MOST_DEVIATIONS}), {MOST_DEVIATIONS})"
        return cells.real, [within] if self.width else []

    @property
    def widths(self) -> dict[str, int]:
        """How many columns of which arrays it makes."""
        widths: dict[str, int] = {}
        for each in self.parts:
            widths[each.array] = widths.get(each.array, 0) + each.width
        return widths

    def embedded(self, texts: Sequence[str]) -> Column:
        """A row of numbers for each text."""
        rows = (self.cut.embed if self.cut else hash_words)(texts)
        if rows.shape[1] != self.width:
            raise ValueError(
                f"column {self.name!r}: the function of texts made rows of {rows.shape[1]} numbers, and of "
                f"{self.width} before."
            )
        return rows

    def fitted(self, kind: str, look: Any, rows: int, counts: Mapping[str, int]) -> Feature:
        """The same with what was found: its kind, and the statistics of so many rows.

        Args:
            kind: The kind.
            look: What a look has told.
            rows: How many rows were seen.
            counts: How often each word occurs.
        """
        there = look.numbers - look.nans if self.cut and kind == "number" else look.there
        is_marked = 0 < there < rows and (self.cut is not None or kind in ("number", "time"))
        found = replace(self, kind=kind, is_marked=is_marked, mean=look.mean or 0.0)
        if kind == "category":
            return replace(found, words=tuple(sorted(w for w, times in counts.items() if times > 1 or not self.cut)))
        if kind == "text":
            return replace(found, width=self.cut.embed([""]).shape[1] if self.cut else WIDTH)
        if kind == "list":
            return replace(found, width=look.longest)
        if self.cut is None:
            return replace(found, mean=(look.seconds or 0.0) / SECONDS_OF_DAY) if kind == "time" else found
        if kind == "time":
            periods = tuple(at for at in PERIODS if getattr(look, f"in_{at}"))
            return replace(found, periods=periods, width=2 * len(periods))
        is_rounding = (look.deviation or 0.0) <= 1e-12 * max(1.0, abs(found.mean))
        return replace(found, deviation=0.0 if is_rounding else look.deviation, width=int(not is_rounding))

    @property
    def told(self) -> str:
        """What it becomes, in words."""
        gaps = f"; an empty cell is {self.mean:,.6g}, the mean, and a mark" if self.is_marked else ""
        return {
            "number": f"a number{gaps}",
            "time": f"days since 1970-01-01{gaps}",
            "category": f"one of {len(self.words):,} categories, numbered from 1; an empty cell is 0",
            "text": f"{WIDTH} numbers by hashing words",
            "list": f"{self.width} numbers",
        }[self.kind]


class Columns:
    """What the columns of a table become.

    Features are taken for finite numbers that float32 does not round, and looked at if one may be another.

    Args:
        work: Reads the table.
        table: The table.
        made: What is made of columns that are no features.
        features: The features.

    Attributes:
        left_out: Why features of a database become nothing.
    """

    def __init__(self, work: Work, table: Table, made: Sequence[Made] = (), features: Sequence[Feature] = ()) -> None:
        self._work, self._table, self.made, self.features = work, table, [*made], [*features]
        self._refuse = partial(work.refuse, table)
        self.left_out = dict[str, str]()
        self._suspects = any(
            each.cut or each.asked or not (each.cells.is_text or each.cells.is_number) for each in features
        )
        self._was_looked_at = False
        if self._suspects:
            self.look()

    @property
    def all(self) -> list[Made]:
        """What is made of all of them."""
        return [*self.made, *(part for each in self.features for part in each.parts)]

    @property
    def cells(self) -> dict[str, str]:
        """The SQL of their cells."""
        return {f"c{at}": each.sql for at, each in enumerate(self.all)}

    def of(self, piece: Mapping[str, Any]) -> dict[str, Column]:
        """The arrays of a piece of ``cells``: what several columns become of one stands side by side."""
        parts: dict[str, list[Column]] = {}
        for at, each in enumerate(self.all):
            parts.setdefault(each.array, []).append(each.of(piece[f"c{at}"]))
        found = {name: rows[0] if len(rows) == 1 else np.concatenate(rows, 1) for name, rows in parts.items()}
        if not self._suspects:
            names = {name for each in self.features for name in each.widths}
            self._suspects = not all((np.abs(found[name]) < SURELY_EXACT).all() for name in names)
        return found

    def readings(self) -> Iterator[None]:
        """Come once for each time that rows are to be read: again if features are of other kinds than was thought.

        Where something is wrong already, rows are not read, and what is wrong with features is noted.
        """
        if not self._work.problems:
            yield
            before, is_open = self.features, self._suspects and not self._was_looked_at
        if self._work.problems or is_open:
            self.look()
        if not self._work.problems and self.features != before:
            yield

    def look(self) -> None:
        """Find out what features hold in all of their cells; note what is none of the kinds."""
        if self._was_looked_at or not self.features:
            return
        self._was_looked_at, (cut, work, table) = True, (self.features[0].cut, self._work, self._table)
        if cut:
            self.left_out = {each.name: "holds lists, or the like" for each in self.features if not each.cells.is_read}
            self.features = [each for each in self.features if each.name not in self.left_out]
        names, asked, seen = [each.name for each in self.features], BEFORE_CUT if cut else OF_ALL, "true"
        rows, looks = work.look_at(table, names, asked, cut.seen if cut else seen) if names else (0, {})
        kinds, bad = dict[str, str | None](), list[Bad]()
        for each in self.features:
            kinds[each.name] = self._kind(each, looks[each.name], bad)
        work.refuse_cells(table, bad)
        words = self._words({name: looks[name].words for name, kind in kinds.items() if kind in (None, "category")})
        made = []
        for each in self.features:
            name, look, counts = each.name, looks[each.name], words.get(each.name, {})
            limit = min(MOST_WORDS, max(sum(counts.values()) // 2, 2))
            is_category = 0 < len(counts) <= limit if cut else name in words and len(counts) <= MOST_WORDS
            kind = kinds[name] or ("category" if is_category else "text")
            found = each.fitted(kind, look, rows, counts)
            has_one = not found.widths or (kind == "category" and len(counts) < 2 and not found.is_marked)
            if cut is None:
                made.append(found)
            elif not (look.numbers - look.nans if kind == "number" else look.there):
                if rows or name != cut.time:
                    self.left_out[name] = "has no value before the training cut"
            elif has_one:
                self.left_out[name] = "has one value before the training cut"
            else:
                made.append(found)
        arrays = {each.array: each.name for each in made if each.array}
        for each in made if cut is None else ():
            if other := arrays.get(each.mark):
                self._refuse(other, f"is called as the mark of empty cells of {each.name!r}: rename one of them.")
        self.features = made

    @property
    def told(self) -> list[tuple[str, str]]:
        """What features become that are more than numbers."""
        return [(each.name, each.told) for each in self.features if each.kind != "number" or each.is_marked]

    def _kind(self, each: Feature, look: Any, bad: list[Bad]) -> str | None:
        """The kind that was told, or else the first that fits; None of a category, or a text. What is wrong is added.

        Of a database all cells before the cut are numbers, or dates; elsewhere nearly all.
        """
        name, cells, asked = each.name, each.cells, each.asked
        instead = f"say: columns: {{{name}: category}}." if each.cut else f"say: --as category {name}."
        way_out = f"Give another number, or leave the column out (--drop {name})."
        if not each.cut and not look.there:
            self._refuse(name, f"has no cell that is not empty: leave it out (--drop {name}).")
        if cells.is_list and Cells("", cells.type.rpartition("[")[0]).is_number:
            if look.shortest != look.longest:
                self._refuse(name, UNEQUAL.format(name))
            bad.append((name, f"{cells.name} IS NULL", f"and a feature is a number. {way_out}"))
            bad.append((name, cells.is_not_finite, f"which is no finite float32. {way_out}"))
            return "list"
        if not cells.is_read and asked not in ("category", "text"):
            self._refuse(
                name, f"holds {cells.type}, of which no number was made. Cast it, or leave it out (--drop {name})."
            )
            return "number"

        def are_nearly_all(count: int) -> bool:
            return bool(count == look.there if each.cut else count > NEARLY_ALL * look.there)

        are_codes = each.cut is None and look.padded  # of which 0421 is no number, nor the year 421
        are_numbers = are_nearly_all(look.numbers) and not are_codes
        are_dates = cells.is_date or (are_nearly_all(look.dates) and not are_codes)
        kind = asked or ("number" if are_numbers or cells.is_number else "time" if are_dates else None)
        others = "" if asked else ", as nearly all others are"
        if each.cut and not look.there:
            return kind
        if kind == "number" and look.all_numbers < look.all_there:
            no_number = f"{cells.value} IS NOT NULL AND {cells.number} IS NULL"
            bad.append((name, no_number, f"which is no number{others}. Correct it, empty it, or {instead}"))
        elif kind == "number" and each.cut:
            what = f"empty the cell, give another number, or leave the column out (--drop {name})."
            bad.append((name, f"isinf({cells.number})", f"which is no finite number: {what}"))
        elif kind == "number" and (cells.type in WHOLE or (cells.is_text and look.whole == look.there)):
            what = f"which float32 rounds: write it with a fraction (.0) if that may be; of times say --time {name}."
            bad.append((name, cells.is_rounded, f"{what} {way_out}"))
        elif kind == "number":
            bad.append((name, cells.is_not_finite, f"which is no finite float32. {way_out}"))
        elif kind == "time" and look.all_dates < look.all_there:
            no_date = f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL"
            what = f"and times are dates, such as 2024-07-01{others}: correct it, or {instead}"
            bad.append((name, no_date, what))
        return kind

    def _words(self, about: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """How often each word occurs, in columns of about so many words; of too many words nothing is known.

        Categories that are told are refused if they have too many words.
        """
        asked = {each.name for each in self.features if each.asked}
        few = [name for name, count in about.items() if count <= 2 * (MOST if name in asked else MOST_WORDS)]
        cut = self.features[0].cut if few else None
        seen = cut.seen if cut else "true"
        histograms = [f"histogram({self._table.cells(name).value}) FILTER ({seen})" for name in few]
        counts = self._work.look(self._table, ", ".join(histograms)) if few else ()
        found = {name: each or {} for name, each in zip(few, counts, strict=True)}
        for name in about.keys() & asked:
            if len(found.get(name, range(MOST + 1))) > MOST:
                instead = f"columns: {{{name}: text}}" if cut else f"--as text {name}"
                self._refuse(name, f"has more than {MOST:,} different words: say that it is text ({instead}).")
        return found


def columns_of(work: Work, table: Table, plan: TablePlan, whole: Plan) -> Columns:
    """What the columns of a table become by their names: labels, splits, masks, times, and features.

    Each of edges of a graph without types is an array of its own, ``edge_...``, and that of labels ``edge_y``.

    Args:
        work: Reads the table.
        table: The table.
        plan: What it holds.
        whole: What is told of all tables: the column of times, kinds of features, and whether labels have fractions.
    """
    names, of_edges, of_one_type = plan.columns, plan.kind is None, EDGE in plan.edges
    roles = plan.roles(whole.time)
    arrays = {name: _of_edges(name) if of_edges else "" for name in names if name not in roles}
    of_split = [(name, f"{split}_mask") for name, role in roles.items() if role == "split" for split in SPLITS]
    known = {name: name.lower() if roles.get(name, "time") != "time" else name for name in names}
    named = {name: _of_edges(name) if of_one_type else purpose_of(known[name]) for name in names}
    purposes = [(name, arrays.get(name) or named[name]) for name in names if roles.get(name) != "split"]
    check_purposes([*of_split, *purposes], table.source)
    looks, bad = work.look_at(table, roles, OF_ROLES)[1] if roles else {}, list[Bad]()
    made = list[Made]()
    for name, role in roles.items():
        if role == "y":
            made.append(_label(work, table, name, named[name], looks[name], has_fractions=whole.float_labels))
        else:
            made += _made(work, table, name, named[name], role, looks[name], bad)
    of_role = {role: name for name, role in roles.items()}
    classes = {each.array for each in made if each.dtype == LONG}
    if {"y", "split"} <= of_role.keys() and not of_edges and not whole.float_labels and named[of_role["y"]] in classes:
        label, split = (table.cells(of_role[role]) for role in ("y", "split"))
        what = f"where {of_role['y']!r} is empty, and a node to train on has a label: fill it, or empty the split."
        bad.append((of_role["split"], f"lower({split.word}) = 'train' AND {label.name} IS NULL", what))
    work.refuse_cells(table, bad)
    features = [Feature(name, table.cells(name), array, asked=whole.kinds.get(name)) for name, array in arrays.items()]
    return Columns(work, table, made, features)


def _made(work: Work, table: Table, name: str, array: str, role: str, look: Any, bad: list[Bad]) -> Iterable[Made]:
    """The arrays of a column that is no feature; what is wrong with it is added."""
    cells, word = table.cells(name), f"lower(coalesce({table.cells(name).word}, ''))"
    if role == "time":
        bad.append((name, cells.is_empty, "and every row needs a time: remove the row, or give one."))
        return [time_of(cells, name, array, look, bad)]
    if role == "split":
        known = ", ".join(map(literal, [*SPLIT_WORDS, *NO_SPLIT]))
        what = "which is no split: train, val, test or nothing is known."
        bad.append((name, f"{word} NOT IN ({known})", what))
        of_splits = {split: [w for w, meant in SPLIT_WORDS.items() if meant == split] for split in SPLITS}
        return [Made(f"{s}_mask", BOOL, f"{word} IN ({', '.join(map(literal, ws))})") for s, ws in of_splits.items()]
    marked, unmarked = (f"({word} = {literal(a)} OR {cells.number} = {b})" for a, b in (("true", 1), ("false", 0)))
    is_mask = f"coalesce({marked} OR {unmarked}, false)"
    bad.append((name, f"NOT {is_mask}", "and a mask holds 0 and 1, or False and True."))
    return [Made(array, BOOL, f"coalesce({marked}, false)")]


def _label(work: Work, table: Table, name: str, array: str, look: Any, *, has_fractions: bool) -> Made:
    """Whole numbers, numbers, or words, which get numbers in their order; an empty cell is no label.

    Whole numbers may be written with a fraction of 0, as pandas does where cells are empty.
    """
    cells = table.cells(name)
    are_words = cells.is_text and (table.is_typed or look.padded > 0)
    real = FLOAT if cells.type in ("FLOAT", "FLOAT[]") else DOUBLE
    if cells.is_list:
        if look.shortest != look.longest:
            work.refuse(table, name, UNEQUAL.format(name))
        is_short = f"coalesce(list_count({cells.name}) < len({cells.name}), true)"
        work.refuse_cells(table, [(name, is_short, "and each row has a list of labels without a gap: fill it.")])
        return Made(array, LONG if cells.type.removesuffix("[]") in WHOLE else real, cells.name, look.longest or 0)
    if look.whole == look.there and not are_words:
        return Made(array, LONG, f"coalesce({cells.whole}, -1)")
    if look.numbers == look.there and not are_words:
        if not has_fractions and not work.look(table, f"count(*) FILTER ({cells.is_fraction})")[0]:
            return Made(array, LONG, f"coalesce(TRY_CAST({cells.real} AS BIGINT), -1)")
        return Made(array, real, f"coalesce({cells.number}, 'nan'::DOUBLE)")
    rows = f"SELECT DISTINCT {cells.word} FROM {table.name} WHERE {cells.name} IS NOT NULL ORDER BY 1"
    words = [each for (each,) in work.run(rows)]
    check_classes(words, f"{table.source}: column {name!r}")
    return Made(array, LONG, cells.word, words=words)


def time_of(cells: Cells, name: str, array: str, look: Any, bad: list[Bad], never: int | None = None) -> Made:
    """The array of times, of dates in seconds since 1970; what is wrong with them is added.

    Args:
        cells: The cells of times.
        name: The column.
        array: What the array is called.
        look: What a look at the column has told, as in ``COUNTS``.
        bad: Gets what is wrong.
        never: The time of a row without one; None where each has one, which may be a number with a fraction then.
    """
    if cells.is_date or cells.is_list or look.numbers < look.there:
        numbers = "whole numbers" if never else "numbers, such as days or seconds since 1970"
        what = f"and times are dates, such as 2024-07-01 12:00:00, or {numbers}."
        bad.append((name, f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", what))
        return Made(array, LONG, f"coalesce({cells.seconds}, {never or 0})", are_dates=True)
    if look.whole == look.there and not cells.is_real:
        return Made(array, LONG, cells.whole if never is None else f"coalesce({cells.whole}, {never})")
    if never is None:
        return Made(array, FLOAT if cells.type == "FLOAT" else DOUBLE, cells.number)
    what = "and times are whole numbers, such as seconds since 1970, or dates."
    bad.append((name, f"({cells.real}) % 1.0::DOUBLE <> 0 OR abs({cells.real}) >= {never}", what))
    return Made(array, LONG, f"coalesce(TRY_CAST({cells.real} AS BIGINT), {never})")


def _of_edges(name: str) -> str:
    """What edges call a column."""
    if (lower := name.lower()) in ("weight", "edge_weight"):
        name = lower
    return f"edge_{'y' if purpose_of(lower) == 'y' else name.removeprefix('edge_')}"
