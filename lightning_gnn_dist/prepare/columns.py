"""What the columns of a table become, as arrays that come piece by piece: labels, masks, times and features.

A feature is one of these kinds:

number    float32; an empty cell is the mean, with a mark beside the column
category  a whole number for each word, in order from 1; an empty cell, and a word that comes later, is 0
time      days since 1970-01-01, as a number is
text      64 numbers by hashing words
list      as many numbers as it is long
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.arrays import SPLIT_WORDS, SPLITS, check_classes, check_purposes, purpose_of
from lightning_gnn_dist.prepare.engine import (
    COUNTS,
    DATES,
    WHOLE,
    Cells,
    Table,
    Work,
    literal,
    numpy_of,
    places_of,
)
from lightning_gnn_dist.prepare.text import WIDTH, hash_words

MOST_WORDS = 1_000  # different ones of what is taken for a category unless it is said
MOST = 100_000  # of a category, for each of which a model may learn a row
NEARLY_ALL = 0.9  # of the cells of a column that is taken for one of numbers
SECONDS_OF_DAY = 86_400
CATEGORIES = "categories"  # the node array
NO_SPLIT = ("", "none", "-")
SURELY_EXACT = 1 << 24  # whole numbers below are numbers of float32
OF_FEATURES = COUNTS | DATES | {"words": "approx_count_distinct({word})", "seconds": "avg({seconds})"}
OF_FEATURES |= {"mean": "avg({number}) FILTER (isfinite({number}))"}
FLOAT, DOUBLE, LONG, BOOL = (np.dtype(kind) for kind in (np.float32, np.float64, np.int64, np.bool_))


@dataclass(frozen=True)
class Feature:
    """A column, and the numbers that it becomes.

    Args:
        name: The column.
        cells: Its cells.
        kind: What it is.
        width: How many numbers a cell becomes, without a mark.
        is_marked: Whether some cells are empty.
        mean: What these are.
        words: Of a category, in order.
        array: What edges call it. Nodes have categories in one array, and all else in another.
    """

    name: str
    cells: Cells
    kind: str = "number"
    width: int = 1
    is_marked: bool = False
    mean: float = 0.0
    words: Sequence[str] = ()
    array: str = ""

    @property
    def sql(self) -> str:
        """The SQL of a cell."""
        if self.kind == "list":
            return f"CAST({self.cells.name} AS FLOAT[])"
        if self.kind == "number":
            return f"TRY_CAST({self.cells.number} AS FLOAT)"
        return self.cells.seconds if self.kind == "time" else self.cells.value

    @property
    def arrays(self) -> list[str]:
        """What its arrays are called."""
        if self.array:
            return [self.array, f"{self.array}_is_missing"][: 1 + self.is_marked]
        return [CATEGORIES if self.kind == "category" else "x"]

    def of(self, column: Any) -> dict[str, Column]:
        """The numbers of a piece of pyarrow, a row for each cell, by array."""
        rows = self._rows(column)
        if not self.array:
            return {self.arrays[0]: rows}
        found = {self.array: rows if self.kind in ("list", "text") else rows[:, 0]}
        return found | ({f"{self.array}_is_missing": rows[:, 1]} if self.is_marked else {})

    def _rows(self, column: Any) -> Column:
        if self.kind == "list":
            return numpy_of(column.flatten()).astype(FLOAT, copy=False).reshape(len(column), self.width)
        if self.kind == "category":
            return places_of(column, self.words).astype(np.int32)[:, None] + np.int32(1)
        if self.kind == "text":
            return hash_words(column.fill_null("").to_pylist()).astype(FLOAT)
        values = numpy_of(column)
        if self.kind == "time":
            values = values / SECONDS_OF_DAY
        values = values.astype(FLOAT, copy=False)[:, None]
        if not self.is_marked:
            return values
        missing = np.isnan(values)
        return np.concatenate([np.where(missing, FLOAT.type(self.mean), values), missing.astype(FLOAT)], axis=1)

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


@dataclass(frozen=True)
class Made:
    """An array, and the column that it is made of.

    Args:
        array: What it is called in the graph.
        dtype: Its type.
        sql: The SQL of a cell.
        width: How many numbers a cell has: 0 of a single one, which is no row of numbers.
        words: Classes in order, where cells are words.
    """

    array: str
    dtype: np.dtype[Any]
    sql: str
    width: int = 0
    words: Sequence[str] | None = None

    def of(self, column: Any) -> dict[str, Column]:
        """The rows of a piece, given its column of pyarrow."""
        if self.words is not None:
            return {self.array: places_of(column, self.words).astype(self.dtype, copy=False)}
        values = numpy_of(column.flatten() if self.width else column).astype(self.dtype, copy=False)
        return {self.array: values.reshape(len(column), self.width) if self.width else values}


def cells_of(made: Sequence[Feature | Made]) -> dict[str, str]:
    """The SQL of the cells of all columns."""
    return {f"c{at}": each.sql for at, each in enumerate(made)}


def arrays_of(made: Sequence[Feature | Made], piece: Mapping[str, Any]) -> dict[str, Column]:
    """The arrays of a piece of ``cells_of``: what several columns become of one stands side by side."""
    found: dict[str, list[Column]] = {}
    for at, each in enumerate(made):
        for array, rows in each.of(piece[f"c{at}"]).items():
            found.setdefault(array, []).append(rows)
    return {name: parts[0] if len(parts) == 1 else np.concatenate(parts, 1) for name, parts in found.items()}


def words_of(
    work: Work,
    table: Table,
    columns: Mapping[str, int],
    told: Collection[str],
    way_out: str,
    seen: str = "true",
) -> dict[str, dict[str, int]]:
    """How often each word occurs, in columns that are categories or may be; of too many words nothing is known.

    Args:
        work: Reads the table.
        table: The table.
        columns: The columns, and about how many words each has.
        told: Those that are said to be categories, which are refused if they have too many words.
        way_out: What to do then.
        seen: The SQL of which rows count.
    """
    few = [name for name, about in columns.items() if about <= 2 * (MOST if name in told else MOST_WORDS)]
    histograms = [f"histogram({table.cells(name).value}) FILTER ({seen})" for name in few]
    counts = work.look(table, ", ".join(histograms)) if few else ()
    found = {name: each or {} for name, each in zip(few, counts, strict=True)}
    for name in told:
        if len(found.get(name, range(MOST + 1))) > MOST:
            what = f"has more than {MOST:,} different words{way_out.format(name)}"
            work.problems.append(f"{table.source}: column {name!r} {what}")
    return found


class Columns:
    """What the columns of a table become.

    Features are taken for finite numbers that float32 does not round, and looked at if one may be another.

    Args:
        work: Reads the table.
        table: The table.
        names: The columns.
        time: The column of times, if there is one.
        of_edges: Whether edges carry them: then each feature is an array of its own, and not a column of ``x``.
        plain: Whether all are features.
        kinds: The kinds of features, where they are told.
    """

    def __init__(
        self,
        work: Work,
        table: Table,
        names: Sequence[str],
        time: str | None,
        *,
        of_edges: bool,
        plain: bool = False,
        kinds: Mapping[str, str] | None = None,
    ) -> None:
        self._work, self._table, self.made = work, table, list[Made]()
        roles = {} if plain else {name: role for name in names if (role := _role(name, time))}
        features = [name for name in names if name not in roles]
        arrays = {name: f"edge_{name.removeprefix('edge_')}" for name in features if of_edges}
        of_split = [(name, f"{split}_mask") for name, role in roles.items() if role == "split" for split in SPLITS]
        purposes = [(name, arrays.get(name, purpose_of(name))) for name in names if roles.get(name) != "split"]
        check_purposes([*of_split, *purposes], table.source)
        looks = work.look_at(table, roles, COUNTS)[1] if roles else {}
        bad = [each for name, role in roles.items() for each in self._make(name, role, looks[name])]
        if bad:
            found = work.look(table, ", ".join(f"count(*) FILTER ({sql})" for _, sql, _ in bad))
            for (name, sql, what), count in zip(bad, found, strict=True):
                if count:
                    self._note(name, sql, what)
        self.features = [Feature(name, table.cells(name), array=arrays.get(name, "")) for name in features]
        self._kinds = {name: kind for name, kind in (kinds or {}).items() if name in features}
        self._suspects = bool(self._kinds) or any(not _is_number(each.cells) for each in self.features)
        self._was_looked_at = False
        if self._suspects:
            self.look()

    @property
    def all(self) -> list[Feature | Made]:
        """All of them."""
        return [*self.made, *self.features]

    @property
    def arrays(self) -> list[str]:
        """The names of all arrays."""
        return [*(made.array for made in self.made), *(name for each in self.features for name in each.arrays)]

    def of(self, piece: Mapping[str, Any]) -> dict[str, Column]:
        """The arrays of a piece."""
        found = arrays_of(self.all, piece)
        if not self._suspects:
            names = {name for each in self.features for name in each.arrays}
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
        self._was_looked_at, work, table = True, self._work, self._table
        rows, looks = work.look_at(table, (each.name for each in self.features), OF_FEATURES)
        made = []
        for each in self.features:
            look, kind = looks[each.name], self._kind(each.name, each.cells, looks[each.name])
            mean = (look.seconds or 0.0) / SECONDS_OF_DAY if kind == "time" else look.mean or 0.0
            is_marked = look.there < rows and kind in ("number", "time")
            width = look.longest if kind == "list" else WIDTH if kind == "text" else 1
            made.append(replace(each, kind=kind, width=width, is_marked=is_marked, mean=mean))
        of_words = {each.name: looks[each.name].words for each in made if each.kind == "category"}
        words = words_of(work, table, of_words, self._kinds.keys() & of_words, ": say that it is text (--as text {}).")
        self.features = [replace(each, words=tuple(sorted(words.get(each.name, ())))) for each in made]

    @property
    def told(self) -> list[tuple[str, str]]:
        """What features become that are more than numbers."""
        return [(each.name, each.told) for each in self.features if each.kind != "number" or each.is_marked]

    @property
    def categories(self) -> dict[str, Sequence[str]]:
        """The words of each column of categories, in order."""
        return {each.name: each.words for each in self.features if each.kind == "category"}

    def _kind(self, name: str, cells: Cells, look: Any) -> str:
        """The kind that was told, or else the first that fits."""
        note, way_out = self._note, f"Give another number, or leave the column out (--drop {name})."
        if not look.there:
            self._tell(name, f"has no cell that is not empty: leave it out (--drop {name}).")
        if cells.is_list:
            self._check_lengths(name, look)
            note(name, f"{cells.name} IS NULL", f"and a feature is a number. {way_out}")
            note(name, cells.is_not_finite, f"which is no finite float32. {way_out}")
            return "list"
        if not (_is_number(cells) or cells.is_date):
            out = f"Cast it, or leave it out (--drop {name})."
            self._tell(name, f"holds {cells.type}, of which no number was made. {out}")
        is_number, asked = not cells.is_text and not cells.is_date, self._kinds.get(name)
        are_numbers = is_number or look.numbers > NEARLY_ALL * look.there
        is_time = cells.is_date or look.dates == look.there
        kind = asked or ("number" if are_numbers else "time" if is_time else "category")
        if kind == "category" and asked is None and look.words > MOST_WORDS:
            kind = "text"
        if kind == "number" and look.numbers < look.there:
            bad, way_out = f"{cells.name} IS NOT NULL AND {cells.number} IS NULL", f"say: --as category {name}."
            note(name, bad, f"which is no number, as nearly all others are. Correct it, empty it, or {way_out}")
        elif kind == "number" and look.whole == look.there and not cells.is_real:
            what = "which float32 rounds: write it with a fraction (.0) if that may be."
            note(name, cells.is_rounded, f"{what} {way_out}")
        elif kind == "number":
            note(name, cells.is_not_finite, f"which is no finite float32. {way_out}")
        elif kind == "time" and look.dates < look.there:
            bad = f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL"
            note(name, bad, "and times are dates, such as 2024-07-01.")
        return kind

    def _make(self, name: str, role: str, look: Any) -> Iterator[tuple[str, str, str]]:
        """Make the arrays of a column that is no feature; yield its name, the SQL of cells that are bad, and why."""
        cells, array = self._table.cells(name), purpose_of(name)
        self._check_lengths(name, look)
        are_whole, are_numbers = look.whole == look.there, look.numbers == look.there
        real = FLOAT if cells.type in ("FLOAT", "FLOAT[]") else DOUBLE
        word, number = f"lower(coalesce({cells.word}, ''))", cells.number
        if role == "time":  # numbers, or dates, which become seconds since 1970
            empty = f"{cells.name} IS NULL OR ({number} IS NOT NULL AND {cells.real} IS NULL)"
            yield name, empty, "and every row needs a time: remove the row, or give one."
            if cells.is_list or not (are_whole or are_numbers):
                what = "and times are dates, such as 2024-07-01, or numbers, such as days or seconds since 1970."
                yield name, f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", what
                self.made.append(Made(array, LONG, f"coalesce({cells.seconds}, 0)"))
            else:
                self.made.append(Made(array, LONG, cells.whole) if are_whole else Made(array, real, number))
        elif role == "y":  # whole numbers, numbers, or words, which get numbers in their order; an empty cell is none
            are_words = (cells.is_text and self._table.is_typed) or not are_numbers
            if cells.is_list:
                entries = LONG if cells.type.removesuffix("[]") in WHOLE else real
                self.made.append(Made("y", entries, cells.name, look.longest or 0))
            elif are_whole and not (cells.is_text and self._table.is_typed):
                self.made.append(Made("y", LONG, f"coalesce({cells.whole}, -1)"))
            elif not are_words:
                self.made.append(Made("y", real, f"coalesce({number}, 'nan'::DOUBLE)"))
            else:
                rows = f"SELECT DISTINCT {cells.word} FROM {self._table.name} WHERE {cells.name} IS NOT NULL ORDER BY 1"
                words = [each for (each,) in self._work.run(rows)]
                check_classes(words, f"{self._table.source}: column {name!r}")
                self.made.append(Made("y", LONG, cells.word, words=words))
        elif role == "split":
            known = ", ".join(map(literal, [*SPLIT_WORDS, *NO_SPLIT]))
            yield name, f"{word} NOT IN ({known})", "which is no split: train, val, test or nothing is known."
            for split in SPLITS:
                of_split = ", ".join(literal(each) for each, meant in SPLIT_WORDS.items() if meant == split)
                self.made.append(Made(f"{split}_mask", BOOL, f"{word} IN ({of_split})"))
        else:
            marked, unmarked = (f"({word} = {literal(a)} OR {number} = {b})" for a, b in (("true", 1), ("false", 0)))
            bad = f"NOT coalesce({marked} OR {unmarked}, false)"
            yield name, bad, "and a mask holds 0 and 1, or False and True."
            self.made.append(Made(array, BOOL, f"coalesce({marked}, false)"))

    def _check_lengths(self, name: str, look: Any) -> None:
        if look.shortest != look.longest:
            self._tell(name, f"holds lists of unequal length: leave it out (--drop {name}).")

    def _note(self, name: str, bad: str, what: str) -> None:
        self._work.refuse_cells(self._table, name, bad, what)

    def _tell(self, name: str, what: str) -> None:
        self._work.problems.append(f"{self._table.source}: column {name!r} {what}")


def _role(name: str, time: str | None) -> str:
    """What a column is beside a feature: ``time``, ``y``, ``split``, ``mask``, or nothing."""
    purpose = purpose_of(name)
    if name == time:
        return "time"
    return purpose if purpose in ("y", "split") else "mask" if purpose.endswith("_mask") else ""


def _is_number(cells: Cells) -> bool:
    """Whether the cells of a type are numbers, or texts that may be."""
    return cells.is_text or cells.is_real or cells.type in WHOLE
