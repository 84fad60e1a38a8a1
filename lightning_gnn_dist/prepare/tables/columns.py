"""What the columns of a table become, as arrays that come piece by piece: labels, masks, times and features.

A feature is one of these kinds:

number    float32; an empty cell is the mean, with a mark beside the column
category  a whole number for each word, in order from 1; an empty cell, and a word that comes later, is 0
time      days since 1970-01-01, as a number is
text      64 numbers by hashing words
list      as many numbers as it is long
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import CATEGORIES
from lightning_gnn_dist.prepare.files.arrays import SPLIT_WORDS, SPLITS, check_classes, check_purposes, purpose_of
from lightning_gnn_dist.prepare.tables.engine import WHOLE, Cells, Table, Work, literal, numpy_of, places_of, quoted
from lightning_gnn_dist.prepare.tables.text import WIDTH, hash_words

KINDS = ("category", "number", "time", "text")
MOST_WORDS = 1_000  # different ones of what is taken for a category unless it is said
MOST = 100_000  # of a category, for each of which a model may learn a row
NEARLY_ALL = 0.9  # of the cells of a column that is taken for one of numbers
SECONDS_OF_DAY = 86_400
FLOAT = np.dtype(np.float32)


@dataclass(frozen=True)
class Feature:
    """A column, and the numbers that it becomes.

    Args:
        name: The column.
        cells: Its cells.
        kind: What it is.
        width: How many numbers a cell becomes, without a mark.
        is_marked: Whether some cells are empty.
        fill: What these are.
        words: Of a category, in order.
    """

    name: str
    cells: Cells
    kind: str = "number"
    width: int = 1
    is_marked: bool = False
    fill: float = 0.0
    words: Sequence[str] = ()

    @property
    def sql(self) -> str:
        """The SQL of a cell."""
        if self.kind == "list":
            return f"CAST({self.cells.name} AS FLOAT[])"
        if self.kind == "number":
            return f"TRY_CAST({self.cells.number} AS FLOAT)"
        return self.cells.seconds if self.kind == "time" else self.cells.value

    def of(self, column: Any) -> Column:
        """The numbers of a piece of pyarrow, a row for each cell."""
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
        return np.concatenate([np.where(missing, FLOAT.type(self.fill), values), missing.astype(FLOAT)], axis=1)

    @property
    def told(self) -> str:
        """What it becomes, in words."""
        gaps = f"; an empty cell is {self.fill:,.6g}, the mean, and a mark" if self.is_marked else ""
        return {
            "number": f"a number{gaps}",
            "time": f"days since 1970-01-01{gaps}",
            "category": f"one of {len(self.words):,} categories, numbered from 1; an empty cell is 0",
            "text": f"{WIDTH} numbers by hashing words",
            "list": f"{self.width} numbers",
        }[self.kind]


def features_of(work: Work, table: Table, names: Sequence[str], asked: Mapping[str, str]) -> list[Feature]:
    """Find out what columns hold in all of their cells; note what is none of the kinds.

    Args:
        work: Reads the table.
        table: The table.
        names: The columns.
        asked: The kinds of some, as told.
    """
    cells = [Cells(quoted(name), table.types[name]) for name in names]
    asked_of = [
        each.counts
        | {"dates": f"count({each.seconds})", "words": f"approx_count_distinct({each.word})"}
        | {"mean": f"avg({each.number}) FILTER (isfinite({each.number}))", "seconds": f"avg({each.seconds})"}
        for each in cells
    ]
    with work.one_thread():
        of_all, *looks = work.looks(table, [{"rows": "count(*)"}, *asked_of])
    rows = of_all.rows
    features = []
    for name, each, look in zip(names, cells, looks, strict=True):
        kind = _kind(work, table, name, each, look, asked.get(name))
        mean = (look.seconds or 0.0) / SECONDS_OF_DAY if kind == "time" else look.mean or 0.0
        is_marked = look.there < rows and kind in ("number", "time")
        width = look.longest if kind == "list" else WIDTH if kind == "text" else 1
        features.append(Feature(name, each, kind, width, is_marked, mean))
    of_words = {each.name: each.cells for each in features if each.kind == "category"}
    about, way_out = (
        {n: look.words for n, look in zip(names, looks, strict=True)},
        ": say that it is text (--as text {}).",
    )
    words = words_of(work, table, of_words, about, asked.keys() & of_words, way_out)
    return [replace(each, words=sorted(words.get(each.name, ()))) for each in features]


def words_of(
    work: Work,
    table: Table,
    cells: Mapping[str, Cells],
    about: Mapping[str, int],
    told: Collection[str],
    way_out: str,
    seen: str = "true",
) -> dict[str, dict[str, int]]:
    """How often each word occurs, in columns that are categories or may be; of too many words nothing is known.

    Args:
        work: Reads the table.
        table: The table.
        cells: The columns.
        about: About how many words each column has.
        told: Those that are said to be categories, which are refused if they have too many words.
        way_out: What to do then.
        seen: The SQL of which rows count.
    """
    few = {name: each for name, each in cells.items() if about[name] <= 2 * (MOST if name in told else MOST_WORDS)}
    histograms = [f"histogram({each.value}) FILTER ({seen})" for each in few.values()]
    counts = work.look(table, ", ".join(histograms)) if few else ()
    found = {name: each or {} for name, each in zip(few, counts, strict=True)}
    for name in told:
        if len(found.get(name, range(MOST + 1))) > MOST:
            what = f"has more than {MOST:,} different words{way_out.format(name)}"
            work.problems.append(f"{table.source}: column {name!r} {what}")
    return found


def _kind(work: Work, table: Table, name: str, cells: Cells, look: Any, asked: str | None) -> str:
    """The kind that was told, or else the first that fits."""
    note, way_out = (
        partial(work.refuse_cells, table, name),
        f"Give another number, or leave the column out (--drop {name}).",
    )
    told = f"{table.source}: column {name!r}"
    if not look.there:
        work.problems.append(f"{told} has no cell that is not empty: leave it out (--drop {name}).")
    if cells.is_list:
        if look.shortest != look.longest:
            work.problems.append(f"{told} holds lists of unequal length: leave it out (--drop {name}).")
        note(f"{cells.name} IS NULL", f"and a feature is a number. {way_out}")
        note(cells.is_not_finite, f"which is no finite float32. {way_out}")
        return "list"
    is_known = cells.is_text or cells.is_date or cells.is_real or cells.type in WHOLE
    if not is_known:
        work.problems.append(
            f"{told} holds {cells.type}, of which no number was made. Cast it, or leave it out (--drop {name})."
        )
    is_number = not cells.is_text and not cells.is_date
    are_numbers = is_number or look.numbers > NEARLY_ALL * look.there
    is_time = cells.is_date or look.dates == look.there
    kind = asked or ("number" if are_numbers else "time" if is_time else "category")
    if kind == "category" and asked is None and look.words > MOST_WORDS:
        kind = "text"
    if kind == "number" and look.numbers < look.there:
        bad = f"{cells.name} IS NOT NULL AND {cells.number} IS NULL"
        note(bad, f"which is no number, as nearly all others are. Correct it, empty it, or say: --as category {name}.")
    elif kind == "number" and look.whole == look.there and not cells.is_real:
        note(cells.is_rounded, f"which float32 rounds: write it with a fraction (.0) if that may be. {way_out}")
    elif kind == "number":
        note(cells.is_not_finite, f"which is no finite float32. {way_out}")
    elif kind == "time" and look.dates < look.there:
        note(f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", "and times are dates, such as 2024-07-01.")
    return kind


NO_SPLIT = ("", "none", "-")
SURELY_EXACT = 1 << 24  # whole numbers below are numbers of float32
NONE: Column = np.empty((0, 2), np.float32)
DOUBLE, LONG, BOOL = (np.dtype(kind) for kind in (np.float64, np.int64, np.bool_))


class Look(NamedTuple):
    """What a look at all cells of a column has told: their kind, and of lists their length."""

    cells: Cells
    kind: str
    width: int


def look_at(work: Work, table: Table, names: Collection[str]) -> dict[str, Look]:
    """Find out what columns hold in all of their cells: ``whole`` numbers, any ``number``, a ``word``, a ``list``."""
    cells = {name: Cells(quoted(name), table.types[name]) for name in names}
    found = work.looks(table, [each.counts for each in cells.values()]) if cells else []
    made = {}
    for (name, each), look in zip(cells.items(), found, strict=True):
        kind = "whole" if look.whole == look.there else "number" if look.numbers == look.there else "word"
        made[name] = Look(each, "list" if each.is_list else kind, look.longest or 0)
        if look.shortest != look.longest:
            told = "holds lists of unequal length: leave it out"
            work.problems.append(f"{table.source}: column {name!r} {told} (--drop {name}).")
    return made


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

    def of(self, column: Any) -> Column:
        """The rows of a piece, given its column of pyarrow."""
        if self.words is not None:
            return places_of(column, self.words).astype(self.dtype, copy=False)
        values = numpy_of(column.flatten() if self.width else column).astype(self.dtype, copy=False)
        return values.reshape(len(column), self.width) if self.width else values


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
        self._work, self._table, self.made, self._of_edges = work, table, list[Made](), of_edges
        self._bad: list[tuple[str, str, str]] = []  # column, SQL, and what is wrong with it
        roles = {name: "feature" if plain else _role(name, time) for name in names}
        features = [name for name in names if roles[name] == "feature"]
        self._kinds = {name: kind for name, kind in (kinds or {}).items() if name in features}
        self._suspects = bool(self._kinds) or any(not _is_number(table.types[name]) for name in features)
        arrays = {name: f"edge_{name.removeprefix('edge_')}" for name in features} if of_edges else {}
        arrays |= {name: purpose_of(name) for name in names if name not in arrays}
        of_split = [f"{split}_mask" for split in SPLITS]
        check_purposes(
            ((n, a) for n in names for a in (of_split if roles[n] == "split" else [arrays[n]])), table.source
        )
        looks = look_at(work, table, [n for n in names if roles[n] != "feature"])
        for name in names:
            if roles[name] != "feature":
                getattr(self, f"_{roles[name]}")(name, looks[name])
        self.features = [Feature(name, Cells(quoted(name), table.types[name])) for name in features]
        self._refuse()
        self._was_looked_at = False
        if self._suspects:
            self.look()

    @property
    def arrays(self) -> list[str]:
        """The names of all arrays."""
        return [*(made.array for made in self.made), *self._arrays_of([])]

    @property
    def cells(self) -> dict[str, str]:
        """The SQL of the cells of all columns of all arrays."""
        return {f"c{at}": made.sql for at, made in enumerate(self.made)} | {
            f"f{at}": each.sql for at, each in enumerate(self.features)
        }

    def of(self, piece: Mapping[str, Any]) -> dict[str, Column]:
        """The arrays of a piece of ``cells``."""
        found = {made.array: made.of(piece[f"c{at}"]) for at, made in enumerate(self.made)}
        rows = [each.of(piece[f"f{at}"]) for at, each in enumerate(self.features)]
        if not self._suspects:
            self._suspects = not all((np.abs(each) < SURELY_EXACT).all() for each in rows)
        return found | self._arrays_of(rows)

    def must_be_read_again(self) -> bool:
        """Whether features were no finite numbers, but are of another kind. What is of none is noted."""
        if not self._suspects or not self.features or self._was_looked_at:
            return False
        before = self.features
        self.look()
        return self.features != before and not self._work.problems

    def look(self) -> None:
        """Find out what features are, and note what is wrong with them."""
        names = [each.name for each in self.features]
        self.features, self._was_looked_at = features_of(self._work, self._table, names, self._kinds), True

    @property
    def told(self) -> list[tuple[str, str]]:
        """What features become that are more than numbers."""
        return [(each.name, each.told) for each in self.features if each.kind != "number" or each.is_marked]

    @property
    def categories(self) -> dict[str, Sequence[str]]:
        """The words of each column of categories, in order."""
        return {each.name: each.words for each in self.features if each.kind == "category"}

    def _arrays_of(self, rows: Sequence[Column]) -> dict[str, Column]:
        """The arrays of features, given the rows of each."""
        if not self._of_edges:
            of_kinds: dict[str, list[Column]] = {}
            for at, each in enumerate(self.features):
                array = CATEGORIES if each.kind == "category" else "x"
                of_kinds.setdefault(array, []).append(rows[at] if rows else NONE)
            return {name: parts[0] if len(parts) == 1 else np.concatenate(parts, 1) for name, parts in of_kinds.items()}
        found = {}
        for at, each in enumerate(self.features):
            name, made = f"edge_{each.name.removeprefix('edge_')}", rows[at] if rows else NONE
            if each.is_marked:
                found[f"{name}_is_missing"], made = made[:, 1], made[:, :1]
            found[name] = made if each.kind in ("list", "text") else made[:, 0]
        return found

    def _time(self, name: str, look: Look) -> None:
        """Numbers, or dates, which become seconds since 1970."""
        cells, array, real = look.cells, purpose_of(name), FLOAT if look.cells.type == "FLOAT" else DOUBLE
        empty = f"{cells.name} IS NULL OR coalesce(isnan({cells.number}), false)"
        self._bad.append((name, empty, "and every row needs a time: remove the row, or give one."))
        if look.kind in ("list", "word"):
            what = "and times are dates, such as 2024-07-01, or numbers, such as days or seconds since 1970."
            self._bad.append((name, f"{cells.name} IS NOT NULL AND {cells.seconds} IS NULL", what))
            self.made.append(Made(array, LONG, f"coalesce({cells.seconds}, 0)"))
        elif look.kind == "whole":
            self.made.append(Made(array, LONG, cells.whole))
        else:
            self.made.append(Made(array, real, cells.number))

    def _label(self, name: str, look: Look) -> None:
        """Whole numbers, numbers, or words, which get numbers in their order. An empty cell is no label."""
        cells, real = look.cells, FLOAT if look.cells.type in ("FLOAT", "FLOAT[]") else DOUBLE
        if look.kind == "list":
            entries = LONG if cells.type.removesuffix("[]") in WHOLE else real
            self.made.append(Made("y", entries, cells.name, look.width))
        elif look.kind == "whole" and not (cells.is_text and self._table.is_typed):
            self.made.append(Made("y", LONG, f"coalesce({cells.whole}, -1)"))
        elif look.kind == "number" and not (cells.is_text and self._table.is_typed):
            self.made.append(Made("y", real, f"coalesce({cells.number}, 'nan'::DOUBLE)"))
        else:
            rows = f"SELECT DISTINCT {cells.word} FROM {self._table.name} WHERE {cells.name} IS NOT NULL ORDER BY 1"
            words = [word for (word,) in self._work.run(rows)]
            check_classes(words, f"{self._table.source}: column {name!r}")
            self.made.append(Made("y", LONG, cells.word, words=words))

    def _split(self, name: str, look: Look) -> None:
        word = f"lower(coalesce({look.cells.word}, ''))"
        known = ", ".join(map(literal, [*SPLIT_WORDS, *NO_SPLIT]))
        self._bad.append((name, f"{word} NOT IN ({known})", "which is no split: train, val, test or nothing is known."))
        for split in SPLITS:
            words = ", ".join(literal(each) for each, meant in SPLIT_WORDS.items() if meant == split)
            self.made.append(Made(f"{split}_mask", BOOL, f"{word} IN ({words})"))

    def _mask(self, name: str, look: Look) -> None:
        word, number = f"lower({look.cells.word})", look.cells.number
        marked, unmarked = (f"({word} = {literal(a)} OR {number} = {b})" for a, b in (("true", 1), ("false", 0)))
        bad = f"NOT coalesce({marked} OR {unmarked}, false)"
        self._bad.append((name, bad, "and a mask holds 0 and 1, or False and True."))
        self.made.append(Made(purpose_of(name), BOOL, f"coalesce({marked}, false)"))

    def _refuse(self) -> None:
        """Note all cells that are bad, by one look at them all."""
        if self._bad:
            found = self._work.look(self._table, ", ".join(f"count(*) FILTER ({bad})" for _, bad, _ in self._bad))
            for (name, bad, what), count in zip(self._bad, found, strict=True):
                if count:
                    self._work.refuse_cells(self._table, name, bad, what)
            self._bad.clear()


def _is_number(kind: str) -> bool:
    """Whether the cells of a type are numbers, or texts that may be."""
    cells = Cells("", kind)
    return cells.is_text or cells.is_real or kind in WHOLE


def _role(name: str, time: str | None) -> str:
    """What a column is for: the name of the method that makes an array of it."""
    if name == time:
        return "time"
    purpose = purpose_of(name)
    return {"y": "label", "split": "split"}.get(purpose, "mask" if purpose.endswith("_mask") else "feature")
