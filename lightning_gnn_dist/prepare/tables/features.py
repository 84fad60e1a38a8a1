"""What the features of a table become, with the kinds of columns that are no finite numbers.

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
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.tables.engine import WHOLE, Cells, Table, Work, numpy_of, places_of, quoted
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
