"""Tables as a database has them: keys are whole numbers or words, times are whole numbers, and a key is a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import NEVER
from lightning_gnn_dist.prepare.engine import OF_KEYS, Cells, Table, Work, quoted, told
from lightning_gnn_dist.prepare.reading import load
from lightning_gnn_dist.prepare.unpack import NO_ROWS, Ids

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

        def look() -> list[Any]:
            num_rows, looks = work.look_at(table, {*keys, *([time] if time else [])}, OF_KEYS)
            return [num_rows, {column: vars(each) for column, each in looks.items()}]

        num_rows, found = work.stage(f"look at {name}", look)
        if not num_rows:
            work.problems.append(NO_ROWS.format(table.source))
        looks = {column: SimpleNamespace(**each) for column, each in found.items()}
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
        number = f"nullif({cells.number}, 'nan'::DOUBLE)"
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
    number = f"nullif({cells.number}, 'nan'::DOUBLE)"
    if look.whole == look.there and not cells.is_real:
        return f"coalesce({cells.whole}, {NEVER})", False
    what = "and times are whole numbers, such as seconds since 1970, or dates."
    work.refuse_cells(table, column, f"{number} % 1.0::DOUBLE <> 0 OR abs({number}) >= {NEVER}", what)
    return f"coalesce(TRY_CAST({number} AS BIGINT), {NEVER})", False
