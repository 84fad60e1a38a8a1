"""What the columns of a table become: labels, masks, times and features, as arrays that come piece by piece."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files.columns import SPLIT_WORDS, SPLITS, check_classes, check_purposes, purpose_of
from lightning_gnn_dist.prepare.tables.cells import WHOLE, Cells
from lightning_gnn_dist.prepare.tables.engine import Table, Work, literal, numpy_of, quoted

NO_SPLIT = ("", "none", "-")
SURELY_EXACT = 1 << 24  # whole numbers below are numbers of float32
FLOAT, DOUBLE, LONG, BOOL = (np.dtype(kind) for kind in (np.float32, np.float64, np.int64, np.bool_))


class Look(NamedTuple):
    """What a look at all cells of a column has told: their kind, and of lists their length."""

    cells: Cells
    kind: str
    width: int


def look_at(work: Work, table: Table, names: Collection[str]) -> dict[str, Look]:
    """Find out what columns hold in all of their cells: ``whole`` numbers, any ``number``, a ``word``, a ``list``."""
    cells, made = {name: Cells(quoted(name), table.types[name]) for name in names}, {}
    if not cells:
        return {}
    found = [*work.look(table, ", ".join(", ".join(each.look) for each in cells.values()))]
    for name, each in cells.items():
        count, one, other = (found.pop(0) for _ in range(3))
        kind = "list" if each.is_list else "whole" if one == count else "number" if other == count else "word"
        made[name] = Look(each, kind, other or 0)
        if each.is_list and one != other:
            told = "holds lists of unequal length: leave it out"
            work.problems.append(f"{table.source}: column {name!r} {told} (--drop {name}).")
    return made


@dataclass(frozen=True)
class Made:
    """An array, and the columns that it is made of.

    Args:
        array: What it is called in the graph.
        dtype: Its type.
        cells: The SQL of its columns, and how many numbers a cell has: 0 of a single one, which is no row of numbers.
        words: Classes in order, where cells are words.
        is_feature: Whether all must be finite numbers.
    """

    array: str
    dtype: np.dtype[Any]
    cells: tuple[tuple[str, int], ...]
    words: Sequence[str] | None = None
    is_feature: bool = False

    def of(self, columns: Sequence[Any]) -> Column:
        """The rows of a piece, given its columns of pyarrow."""
        parts = [self._part(column, width) for column, (_, width) in zip(columns, self.cells, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _part(self, column: Any, width: int) -> Column:
        if self.words is not None:
            import pyarrow as pa
            from pyarrow import compute

            column = compute.index_in(column, pa.array(self.words, column.type)).fill_null(-1)
        is_list = bool(column.type.num_fields)
        values = numpy_of(column.flatten() if is_list else column).astype(self.dtype, copy=False)
        return values.reshape(len(column), width) if width else values


class Columns:
    """What the columns of a table become.

    Features are taken for finite numbers that float32 does not round, and looked at again if one may be another.

    Args:
        work: Reads the table.
        table: The table.
        names: The columns.
        time: The column of times, if there is one.
        of_edges: Whether edges carry them: then each feature is an array of its own, and not a column of ``x``.
        plain: Whether all are features.
    """

    def __init__(
        self, work: Work, table: Table, names: Sequence[str], time: str | None, *, of_edges: bool, plain: bool = False
    ) -> None:
        self._work, self._table, self.made = work, table, list[Made]()
        self._bad: list[tuple[str, str, str]] = []  # column, SQL, and what is wrong with it
        self._suspects = False
        roles = {name: "feature" if plain else _role(name, time) for name in names}
        self._features = [name for name in names if roles[name] == "feature"]
        arrays = {name: f"edge_{name.removeprefix('edge_')}" for name in self._features} if of_edges else {}
        arrays |= {name: purpose_of(name) for name in names if name not in arrays}
        of_split = [f"{split}_mask" for split in SPLITS]
        check_purposes(
            ((n, a) for n in names for a in (of_split if roles[n] == "split" else [arrays[n]])), table.source
        )
        looks = look_at(work, table, [n for n in names if roles[n] != "feature" or table.types[n].endswith("]")])
        for name in names:
            if roles[name] != "feature":
                getattr(self, f"_{roles[name]}")(name, looks[name])
        parts = [(name, self._feature(name, looks)) for name in self._features]
        if of_edges:
            single = [(name, (sql, width if name in looks else 0)) for name, (sql, width) in parts]
            self.made += [Made(arrays[name], FLOAT, (part,), is_feature=True) for name, part in single]
        elif parts:
            self.made.append(Made("x", FLOAT, tuple(part for _, part in parts), is_feature=True))
        self._refuse()

    @property
    def select(self) -> list[str]:
        """The SQL of all columns of all arrays."""
        return [f"{sql} AS c{at}_{i}" for at, made in enumerate(self.made) for i, (sql, _) in enumerate(made.cells)]

    def of(self, piece: Mapping[str, Any]) -> dict[str, Column]:
        """The arrays of a piece of ``select``."""
        found = {}
        for at, made in enumerate(self.made):
            rows = found[made.array] = made.of([piece[f"c{at}_{i}"] for i in range(len(made.cells))])
            if made.is_feature and not self._suspects:
                self._suspects = not (np.abs(rows) < SURELY_EXACT).all()
        return found

    def refuse_features(self) -> None:
        """Note features that are none, if such were seen."""
        if self._suspects:
            for name, look in look_at(self._work, self._table, self._features).items():
                self._check_feature(name, look)
            self._refuse()

    def _time(self, name: str, look: Look) -> None:
        cells, real = look.cells, FLOAT if look.cells.type == "FLOAT" else DOUBLE
        if look.kind in ("list", "word"):
            what = "and times are numbers, such as days or seconds since 1970."
            bad = f"{cells.name} IS NOT NULL AND {cells.number} IS NULL" if look.kind == "word" else "true"
            self._bad.append((name, bad, what))
        empty = f"{cells.name} IS NULL OR coalesce(isnan({cells.number}), false)"
        self._bad.append((name, empty, "and every row needs a time: remove the row, or give one."))
        of_whole = Made(purpose_of(name), LONG, ((cells.whole, 0),))
        self.made.append(of_whole if look.kind == "whole" else Made(purpose_of(name), real, ((cells.number, 0),)))

    def _label(self, name: str, look: Look) -> None:
        """Whole numbers, numbers, or words, which get numbers in their order. An empty cell is no label."""
        cells, real = look.cells, FLOAT if look.cells.type in ("FLOAT", "FLOAT[]") else DOUBLE
        if look.kind == "list":
            entries = LONG if cells.type.removesuffix("[]") in WHOLE else real
            self.made.append(Made("y", entries, ((cells.name, look.width),)))
        elif look.kind == "whole" and not (cells.is_text and self._table.is_typed):
            self.made.append(Made("y", LONG, ((f"coalesce({cells.whole}, -1)", 0),)))
        elif look.kind == "number" and not (cells.is_text and self._table.is_typed):
            self.made.append(Made("y", real, ((f"coalesce({cells.number}, 'nan'::DOUBLE)", 0),)))
        else:
            rows = f"SELECT DISTINCT {cells.word} AS w FROM {self._table.name} WHERE w IS NOT NULL ORDER BY w"
            words = [word for (word,) in self._work.run(rows)]
            check_classes(words, f"{self._table.source}: column {name!r}")
            self.made.append(Made("y", LONG, ((cells.word, 0),), words))

    def _split(self, name: str, look: Look) -> None:
        word = f"lower(coalesce({look.cells.word}, ''))"
        known = ", ".join(map(literal, [*SPLIT_WORDS, *NO_SPLIT]))
        self._bad.append((name, f"{word} NOT IN ({known})", "which is no split: train, val, test or nothing is known."))
        for split in SPLITS:
            words = ", ".join(literal(each) for each, meant in SPLIT_WORDS.items() if meant == split)
            self.made.append(Made(f"{split}_mask", BOOL, ((f"{word} IN ({words})", 0),)))

    def _mask(self, name: str, look: Look) -> None:
        word, number = f"lower({look.cells.word})", look.cells.number
        marked, unmarked = (f"({word} = {literal(a)} OR {number} = {b})" for a, b in (("true", 1), ("false", 0)))
        bad = f"NOT coalesce({marked} OR {unmarked}, false)"
        self._bad.append((name, bad, "and a mask holds 0 and 1, or False and True."))
        self.made.append(Made(purpose_of(name), BOOL, ((f"coalesce({marked}, false)", 0),)))

    def _feature(self, name: str, looks: Mapping[str, Look]) -> tuple[str, int]:
        """The SQL of float32, and how many numbers it makes."""
        cells = Cells(quoted(name), self._table.types[name])
        if name in looks:
            return f"CAST({cells.name} AS FLOAT[])", looks[name].width
        return f"TRY_CAST({cells.number} AS FLOAT)", 1

    def _check_feature(self, name: str, look: Look) -> None:
        cells, way_out = look.cells, f"Give another number, or leave the column out (--drop {name})."
        note = partial(self._work.refuse_cells, self._table, name)
        note(f"{cells.name} IS NULL", f"and a feature is a number. {way_out}")
        if look.kind == "word" and not cells.is_text:
            told = f"holds {cells.type}, of which no number was made. Cast it"
            self._work.problems.append(
                f"{self._table.source}: column {name!r} {told}, or leave it out (--drop {name})."
            )
        elif look.kind == "whole":
            note(cells.is_rounded, f"which float32 rounds: write it with a fraction (.0) if that may be. {way_out}")
        else:
            what = "is no finite number" if look.kind == "word" else "is no finite float32"
            note(cells.is_not_finite, f"which {what}. {way_out}")

    def _refuse(self) -> None:
        """Note all cells that are bad, by one look at them all."""
        if self._bad:
            found = self._work.look(self._table, ", ".join(f"count(*) FILTER ({bad})" for _, bad, _ in self._bad))
            for (name, bad, what), count in zip(self._bad, found, strict=True):
                if count:
                    self._work.refuse_cells(self._table, name, bad, what)
            self._bad.clear()


def _role(name: str, time: str | None) -> str:
    """What a column is for: the name of the method that makes an array of it."""
    if name == time:
        return "time"
    purpose = purpose_of(name)
    return {"y": "label", "split": "split"}.get(purpose, "mask" if purpose.endswith("_mask") else "feature")
