"""DuckDB at work in a file, which holds what was read and which stages are done.

Files are views, read anew by each query: to load a text into DuckDB takes five times as long as to read it. Nothing
here needs an extension of DuckDB that is not in its wheel.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.journal import Journal

WHOLE = {f"{sign}{size}INT" for sign in ("", "U") for size in ("TINY", "SMALL", "BIG")}
WHOLE |= {"INTEGER", "UINTEGER", "HUGEINT", "BOOLEAN"}
REAL = {"FLOAT", "DOUBLE", '"NULL"'}  # the last of a column without a value
MOST_EXACT = (1 << 62) - 1


@dataclass(frozen=True)
class Cells:
    """The SQL of the cells of a column, as one kind or another: NULL where a cell is none of it.

    Args:
        name: The column, as SQL has it.
        type: Its type in DuckDB.
    """

    name: str
    type: str

    @property
    def is_list(self) -> bool:
        return self.type.endswith("]")

    @property
    def is_text(self) -> bool:
        return self.type == "VARCHAR"

    @property
    def is_real(self) -> bool:
        return self.type in REAL or self.type.startswith("DECIMAL")

    @property
    def is_number(self) -> bool:
        return self.type in WHOLE or self.is_real

    @property
    def is_read(self) -> bool:
        """Whether cells are numbers or dates, or texts that may be."""
        return self.is_text or self.is_number or self.is_date

    @property
    def is_date(self) -> bool:
        return self.type.startswith(("TIMESTAMP", "DATE"))

    @property
    def moment(self) -> str:
        """A date, of UTC if a zone is told. A text that is one begins with a digit."""
        if self.is_text:
            whole = f"{self.name} || CASE length({self.name}) WHEN 4 THEN '-01-01' WHEN 7 THEN '-01' ELSE '' END"
            return f"CASE WHEN {self.name} BETWEEN '0' AND ':' THEN TRY_CAST({whole} AS TIMESTAMPTZ) END"
        return f"CAST({self.name if self.is_date else 'NULL'} AS TIMESTAMPTZ)"

    @property
    def seconds(self) -> str:
        """A date as seconds since 1970."""
        return f"CAST(floor(epoch({self.moment})) AS BIGINT)"

    @property
    def word(self) -> str:
        return self.name if self.is_text else f"CAST({self.name} AS VARCHAR)"

    @property
    def value(self) -> str:
        """The word of a category: whole numbers without a fraction, whatever their type."""
        if self.type in WHOLE:
            return f"CAST(CAST({self.name} AS HUGEINT) AS VARCHAR)"
        if not self.is_real:
            return self.word
        whole = f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR)"
        return (
            f"CASE WHEN {self.number} % 1.0::DOUBLE = 0 THEN {whole} WHEN {self.real} IS NOT NULL THEN {self.word} END"
        )

    @property
    def whole(self) -> str:
        if self.is_text:
            return f"CASE WHEN regexp_full_match({self.name}, '[+-]?[0-9]+') THEN TRY_CAST({self.name} AS BIGINT) END"
        return f"TRY_CAST({self.name} AS BIGINT)" if self.type in WHOLE else "CAST(NULL AS BIGINT)"

    @property
    def number(self) -> str:
        if self.is_text:  # 1_000 is a word
            return f"CASE WHEN contains({self.name}, '_') THEN NULL ELSE TRY_CAST({self.name} AS DOUBLE) END"
        return f"CAST({self.name} AS DOUBLE)" if self.type in WHOLE or self.is_real else "CAST(NULL AS DOUBLE)"

    @property
    def real(self) -> str:
        """The number but for NaN. Of Parquet whose statistics know no NaN DuckDB's ``isnan`` is always false."""
        return f"CASE WHEN isfinite({self.number}) OR isinf({self.number}) THEN {self.number} END"

    @property
    def is_empty(self) -> str:
        """Whether there is no cell, or it is NaN."""
        return f"{self.name} IS NULL OR ({self.number} IS NOT NULL AND {self.real} IS NULL)"

    @property
    def is_fraction(self) -> str:
        """Whether a number is none of the whole ones that a DOUBLE holds to the bit."""
        return f"abs({self.real}) >= {1 << 53} OR ({self.real}) % 1.0::DOUBLE <> 0"

    @property
    def is_rounded(self) -> str:
        """Whether a whole number is one that float32 rounds."""
        whole = self.whole
        rounded = f"TRY_CAST(CAST({whole} AS FLOAT) AS BIGINT) IS DISTINCT FROM {whole}"
        return f"{rounded} OR coalesce({whole} NOT BETWEEN -{MOST_EXACT} AND {MOST_EXACT}, {self.name} IS NOT NULL)"

    @property
    def is_not_finite(self) -> str:
        """Whether a cell that is there holds other things than finite numbers of float32."""
        if self.is_list:
            finite = (
                f"list_bool_and(list_transform({self.name}, lambda e: coalesce(isfinite(TRY_CAST(e AS FLOAT)), false)))"
            )
        else:
            finite = f"isfinite(TRY_CAST({self.number} AS FLOAT))"
        return f"{self.name} IS NOT NULL AND NOT coalesce({finite}, false)"

    @property
    def written(self) -> str:
        """Itself where a text is a whole number as one is written: 007 and 1_000 are words."""
        is_written = f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR) = {self.name}"
        return f"CASE WHEN {is_written} THEN {self.name} END" if self.is_text else "NULL"

    @property
    def padded(self) -> str:
        """The number where a text is a whole one with zeros in front, such as 007."""
        return f"CASE WHEN {self.name} BETWEEN '00' AND '0:' THEN {self.whole} END" if self.is_text else "NULL"

    @property
    def length(self) -> str:
        """How long a list is."""
        return f"len({self.name})" if self.is_list else "NULL"


FORMS = ("name", "word", "value", "whole", "number", "seconds", "written", "padded", "length")
COUNTS = {  # what a look may tell of a column, by SQL with the forms of a cell in braces
    "there": "count({name})",
    "whole": "count({whole})",
    "numbers": "count({number})",
    "shortest": "min({length})",
    "longest": "max({length})",
}
OF_KEYS = COUNTS | {"written": "count({written})"}
LEAST_ROWS, ROWS_AT_ONCE = 1 << 11, 122_880  # DuckDB's vector, and its row group
BYTES_PER_ROW = 1 << 9  # of a piece, about
LEAST_BYTES = 1 << 27  # that DuckDB is given: with less it reads no table at all
BYTES_PER_THREAD = 1 << 28
NO_ROWS = "{} has no rows: leave the table out, or fill it."
OWN = "\x1f"  # begins the names of columns of ours, as no name in a file does
ROW = f'"{OWN}row"'  # the column of the number of a row, from 0


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: object) -> str:
    """A text as SQL has it."""
    return "'" + str(text).replace("'", "''") + "'"


@cache
def duckdb_for() -> Any:
    """DuckDB's module."""
    try:
        import duckdb
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            "Tables (CSV, Parquet, databases) take DuckDB and pyarrow, which are not installed: "
            'pip install "lightning-gnn-dist[tables]". Arrays in .npy, .npz and .pt need neither.'
        ) from error
    return duckdb


Run = Callable[..., list[tuple[Any, ...]]]
Bad = tuple[str, str, str]  # a column, the SQL of which of its cells are wrong, and why


@dataclass(frozen=True)
class Table:
    """Rows that DuckDB reads.

    Args:
        name: What they are called in SQL.
        source: Where they come from, for errors.
        types: The type of each column in DuckDB.
        is_typed: Whether types are those of the file: then texts are words. Those of a text are found out.
        check: Refuses lines that are no rows, given what runs statements where they were read.
        lengths: Of several files the query of how many rows each has.
        texts: The files of text that it is read from.
        row: The SQL of the number of a row that errors tell.
        num_rows: How many rows there are, once they were looked at.
        time: The SQL of the time of a row, if it has one.
        are_dates: Whether times are dates, in seconds since 1970.
    """

    name: str
    source: Path
    types: Mapping[str, str]
    is_typed: bool = True
    check: Callable[[Run], list[str]] = lambda run: []
    lengths: Mapping[Path, str] = field(default_factory=dict)
    texts: Sequence[Any] = ()
    row: str = ROW
    num_rows: int | None = None
    time: str | None = None
    are_dates: bool = False

    def cells(self, column: str) -> Cells:
        """The cells of a column."""
        return Cells(quoted(column), self.types[column])


class Problems(ValueError):
    """All that is wrong with some tables."""

    def __init__(self, told: Sequence[str]) -> None:
        told = list(dict.fromkeys(told))  # two looks may find the same
        more = f"{len(told)} things are wrong:\n- " if len(told) > 1 else ""
        super().__init__(more + "\n- ".join(told))


class Work:
    """A DuckDB file in a folder. It is closed at the end of a ``with`` block.

    Args:
        folder: The folder, which is made.
        memory_bytes: What this may take: DuckDB gets a part of it, and the rest are the pieces that come out.
    """

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self.folder, self.problems = folder, list[str]()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(folder, {})
        self.db = duckdb_for().connect(str(folder / "tables.duckdb"))
        self.rows_at_once = max(LEAST_ROWS, min(memory_bytes // BYTES_PER_ROW, ROWS_AT_ONCE))
        most, cores = max(memory_bytes * 7 // 10, LEAST_BYTES), os.cpu_count() or 1
        self._threads = max(1, min(cores, most // BYTES_PER_THREAD))
        for setting in (
            f"memory_limit = '{most}B'",
            f"threads = {self._threads}",
            f"temp_directory = {literal(self.folder / 'spill')}",
            "TimeZone = 'UTC'",
            "enable_progress_bar = false",
            "autoinstall_known_extensions = false",
            "disabled_optimizers = 'join_order,build_side_probe_side'",  # so that rows stay in order
        ):
            self.run(f"SET {setting}")

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def run(self, statement: str, *given: object) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""
        return _run(self.db, statement, *given)

    def stage(self, name: str, do: Callable[[], Any]) -> Any:
        """Run a stage unless it is done, and return what it tells. After a kill, or a problem, in it it runs again."""
        if (found := self._journal.get(name)) is None:
            before = len(self.problems)
            found = json.loads(json.dumps([do()], default=vars))
            if len(self.problems) == before:
                self._journal.record(**{name: found})
        return found[0]

    def look(self, table: Table, what: str) -> tuple[Any, ...]:
        """Return what one look at all rows tells."""
        (found,) = self.run(f"SELECT {what} FROM {table.name}")
        self.problems += table.check(self.run)
        return found

    def look_at(
        self, table: Table, names: Iterable[str], asked: Mapping[str, str], seen: str = "true"
    ) -> tuple[int, dict[str, Any]]:
        """How many rows are seen, and what one look at them all tells of some columns.

        Args:
            table: The table.
            names: The columns.
            asked: What to find out, by name, as in ``COUNTS``.
            seen: The SQL of whether a row is seen.
        """
        names = [*names]
        forms = [f"{getattr(table.cells(name), form)} AS {form}{at}" for at, name in enumerate(names) for form in FORMS]
        rows = f"(SELECT {', '.join([*forms, f'{seen} AS seen'])} FROM {table.name})"
        told = ["count(*) FILTER (seen)"]
        for at in range(len(names)):
            told += [sql.format(**{form: f"{form}{at}" for form in FORMS}) for sql in asked.values()]
        # Sums by one thread are the same every time.
        self.run(f"SET threads = {1 if 'mean' in asked else self._threads}")
        num_rows, *found = self.look(replace(table, name=rows), ", ".join(told))
        self.run(f"SET threads = {self._threads}")
        cells = iter(found)
        return num_rows, {name: SimpleNamespace(**dict(zip(asked, cells, strict=False))) for name in names}

    def stream(self, query: str, table: Table) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query of a table in pieces, as columns of pyarrow by name."""
        with self.db.cursor() as cursor:
            for batch in cursor.sql(query).to_arrow_reader(self.rows_at_once):
                yield {name: batch.column(name) for name in batch.schema.names}
            self.problems += table.check(partial(_run, cursor))

    def refuse(self, table: Table, column: str, what: str) -> None:
        """Note what is wrong with a column."""
        self.problems.append(f"{table.source}: column {column!r} {what}")

    def refuse_cells(self, table: Table, bad: Sequence[Bad]) -> None:
        """Note the first cells of columns that are wrong, and how many there are."""
        counts = self.look(table, ", ".join(f"count(*) FILTER ({sql})" for _, sql, _ in bad)) if bad else ()
        for (column, sql, what), count in zip(bad, counts, strict=True):
            if not count:
                continue
            cells = f"SELECT {table.row} + 1, CAST({quoted(column)} AS VARCHAR) FROM {table.name} WHERE {sql}"
            (row, cell), *others = self.run(f"{cells} ORDER BY 1 LIMIT 2")
            holds = f"is empty in row {self.place(table, row)}"
            if cell is not None:
                holds = f"holds {cell!r} in row {self.place(table, row)}"
            more = f" (and in {count - 1:,} more, such as row {self.place(table, others[0][0])})" if others else ""
            self.refuse(table, column, f"{holds}{more}, {what}")

    def place(self, table: Table, row: int) -> str:
        """A row in words: its number, and of several files the one that it is in."""
        for file, length in table.lengths.items():
            ((count,),) = self.run(length)
            if row <= count:
                return f"{row:,} of {file}"
            row -= count
        return f"{row:,}"

    def check(self) -> None:
        """Refuse all that was noted."""
        if self.problems:
            raise Problems(self.problems)


def _run(db: Any, statement: str, *given: object) -> list[tuple[Any, ...]]:
    return list(db.execute(statement, list(given)).fetchall())


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn errors of DuckDB and pyarrow about a file into one that says what to do."""
    duckdb = duckdb_for()
    from pyarrow import ArrowException

    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise MemoryError(f"{_first_line(error)}.") from error
    except (duckdb.Error, ArrowException) as error:
        if "No space left" in str(error) or "File too large" in str(error):
            raise OSError(errno.ENOSPC, _first_line(error)) from error
        raise ValueError(f"{path} is no table, or is damaged ({_first_line(error)}). Write it again.") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


def places_of(column: Any, words: Sequence[str]) -> Column:
    """The place of each cell of a column of pyarrow among words, -1 of one that is none of them or is missing."""
    import pyarrow as pa
    from pyarrow import compute

    return numpy_of(compute.index_in(column, pa.array(words, column.type)).fill_null(-1))


def numpy_of(column: Any) -> Column:
    """A column of pyarrow as array, that may be written to."""
    return np.require(column.to_numpy(zero_copy_only=False), requirements="W")
