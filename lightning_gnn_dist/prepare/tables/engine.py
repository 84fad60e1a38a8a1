"""DuckDB at work in a file, which holds what was read and which stages are done; ids, and rows as arrays.

Files are views, read anew by each query: to load a text into DuckDB takes five times as long as to read it. Nothing
here needs an extension of DuckDB that is not in its wheel.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.prepare.files.arrays import GrowingArrays

WHOLE = {
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "UTINYINT",
    "USMALLINT",
    "UINTEGER",
    "UBIGINT",
    "HUGEINT",
    "BOOLEAN",
}
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
    def is_date(self) -> bool:
        return self.type.startswith(("TIMESTAMP", "DATE"))

    @property
    def seconds(self) -> str:
        """A date as seconds since 1970, of UTC if a zone is told. A text that is one begins with a digit."""
        moment = f"CAST({self.name} AS TIMESTAMPTZ)" if self.is_date else "CAST(NULL AS TIMESTAMPTZ)"
        if self.is_text:
            whole = f"{self.name} || CASE length({self.name}) WHEN 4 THEN '-01-01' WHEN 7 THEN '-01' ELSE '' END"
            moment = f"CASE WHEN {self.name} BETWEEN '0' AND ':' THEN TRY_CAST({whole} AS TIMESTAMPTZ) END"
        return f"CAST(floor(epoch({moment})) AS BIGINT)"

    @property
    def word(self) -> str:
        return self.name if self.is_text else f"CAST({self.name} AS VARCHAR)"

    @property
    def value(self) -> str:
        """The word of a category: whole numbers without a fraction, whatever their type."""
        if self.type in WHOLE:
            return f"CAST(CAST({self.name} AS BIGINT) AS VARCHAR)"
        if not self.is_real:
            return self.word
        whole = f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR)"
        return (
            f"CASE WHEN {self.number} % 1.0::DOUBLE = 0 THEN {whole} WHEN NOT isnan({self.number}) THEN {self.word} END"
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
    def is_rounded(self) -> str:
        """Whether a whole number is one that float32 rounds."""
        whole = self.whole
        rounded = f"TRY_CAST(CAST({whole} AS FLOAT) AS BIGINT) IS DISTINCT FROM {whole}"
        return f"{rounded} OR coalesce({whole} NOT BETWEEN -{MOST_EXACT} AND {MOST_EXACT}, false)"

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
    def written_whole(self) -> str:
        """Whether a text is a whole number as one is written: 007 and 1_000 are words."""
        return f"CAST(TRY_CAST({self.name} AS BIGINT) AS VARCHAR) = {self.name}"

    @property
    def counts(self) -> dict[str, str]:
        """The SQL of how many cells there are, and how many of each kind; of lists the shortest and the longest."""
        lengths = [f"{of}(len({self.name}))" if self.is_list else "0" for of in ("min", "max")]
        cells = {"there": self.name, "whole": self.whole, "numbers": self.number}
        counts = {what: f"count({sql})" for what, sql in cells.items()}
        return counts | {"shortest": lengths[0], "longest": lengths[1]}


LEAST_ROWS, ROWS_AT_ONCE = 1 << 11, 122_880  # DuckDB's vector, and its row group
BYTES_PER_ROW = 1 << 9  # of a piece, about
LEAST_BYTES = 1 << 27  # that DuckDB is given: with less it reads no table at all
BYTES_PER_THREAD = 1 << 28
MOST_SHOWN = 3
ROW = '" row"'  # the column of the number of a row, from 0: none of a file is called so


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
    """

    name: str
    source: Path
    types: Mapping[str, str]
    is_typed: bool = True
    check: Callable[[Run], list[str]] = lambda run: []
    lengths: Mapping[Path, str] = field(default_factory=dict)


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
        self.db = duckdb_for().connect(str(folder / "tables.duckdb"))
        self.rows_at_once = max(LEAST_ROWS, min(memory_bytes // BYTES_PER_ROW, ROWS_AT_ONCE))
        most, cores = max(memory_bytes * 7 // 10, LEAST_BYTES), os.cpu_count() or 1
        self.run(f"SET memory_limit = '{most}B'")
        self._threads = max(1, min(cores, most // BYTES_PER_THREAD))
        self.run(f"SET threads = {self._threads}")
        self.run(f"SET temp_directory = {literal(self.folder / 'spill')}")
        self.run("SET TimeZone = 'UTC'")
        self.run("SET enable_progress_bar = false")
        self.run("SET autoinstall_known_extensions = false")
        self.run("SET disabled_optimizers = 'join_order,build_side_probe_side'")  # so that rows stay in order
        self.run("CREATE TABLE IF NOT EXISTS done (stage VARCHAR PRIMARY KEY, facts VARCHAR)")

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def run(self, statement: str, *given: object) -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""
        return _run(self.db, statement, *given)

    def stage(self, name: str, do: Callable[[], Any]) -> Any:
        """Run a stage unless it is done, and return what it tells. After a kill, or a problem, in it it runs again."""
        found = self.run("SELECT facts FROM done WHERE stage = ?", name)
        if found:
            return json.loads(found[0][0])
        before = len(self.problems)
        facts = json.dumps(do())
        if len(self.problems) == before:
            self.run("INSERT INTO done VALUES (?, ?)", name, facts)
        return json.loads(facts)

    def look(self, table: Table, what: str) -> tuple[Any, ...]:
        """Return what one look at all rows tells."""
        (found,) = self.run(f"SELECT {what} FROM {table.name}")
        self.problems += table.check(self.run)
        return found

    def looks(self, table: Table, asked: Iterable[Mapping[str, str]]) -> list[Any]:
        """What one look at all rows tells: for each mapping of names to SQL an object with these names."""
        asked = list(asked)
        found = iter(self.look(table, ", ".join(sql for each in asked for sql in each.values())))
        return [SimpleNamespace(**dict(zip(each, found, strict=False))) for each in asked]

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Sums of floating point numbers by one thread are the same every time."""
        self.run("SET threads = 1")
        yield
        self.run(f"SET threads = {self._threads}")

    def stream(self, query: str, table: Table) -> Iterator[dict[str, Any]]:
        """Yield the rows of a query of a table in pieces, as columns of pyarrow by name."""
        with self.db.cursor() as cursor:
            for batch in cursor.sql(query).to_arrow_reader(self.rows_at_once):
                yield {name: batch.column(name) for name in batch.schema.names}
            self.problems += table.check(partial(_run, cursor))

    def refuse_cells(self, table: Table, column: str, bad: str, what: str) -> None:
        """Note the first cells of a column that are bad, by SQL, and how many there are."""
        rows = f"FROM {table.name} WHERE {bad}"
        cells = self.run(f"SELECT {ROW} + 1, CAST({quoted(column)} AS VARCHAR) {rows} ORDER BY 1 LIMIT {MOST_SHOWN}")
        if not cells:
            return
        ((count,),), (row, cell) = self.run(f"SELECT count(*) {rows}"), cells[0]
        place = self.place_of(table, row)
        holds = f"is empty in row {place}" if cell is None else f"holds {cell!r} in row {place}"
        more = f" (and in {count - 1:,} more, such as row {self.place_of(table, cells[1][0])})" if count > 1 else ""
        self.problems.append(f"{table.source}: column {column!r} {holds}{more}, {what}")

    def place_of(self, table: Table, row: int) -> str:
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
    """Turn DuckDB's errors about a file into one that says what to do."""
    duckdb = duckdb_for()
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise MemoryError(f"{_first_line(error)}.") from error
    except duckdb.Error as error:
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


LONG = np.dtype(np.int64)
UNKNOWN = -2  # the node that a key names that names none; -1 if there is no key


@dataclass(frozen=True)
class Ids:
    """The ids of the nodes of a type.

    Args:
        source: Where they come from, for errors.
        count: How many nodes there are, if that is known.
        table: The table of ids, with the number of each node, and the SQL of one; None if nodes are numbered.
        key: The SQL of an id in its table.
        dtype: The type of ids, whole numbers or words.
        are_known: Whether there are such ids.
    """

    source: Path
    count: int | None
    table: Table | None = None
    key: str = ""
    dtype: np.dtype[Any] = LONG
    are_known: bool = True

    @property
    def are_whole(self) -> bool:
        return self.dtype == LONG

    def join(self, cells: Cells, name: str, *, digits: bool = False) -> tuple[str, str]:
        """The SQL of the node that a cell names, and the join that finds it.

        Args:
            cells: The cells.
            name: What the ids are called in the query.
            digits: Whether a word of digits, such as 007, names the whole number.
        """
        if self.table is None:
            return cells.whole, ""
        mine, theirs = cells.word, f"CAST({name}.k AS VARCHAR)"
        if self.are_whole and (digits or cells.type in WHOLE):
            mine, theirs = cells.whole, f"{name}.k"
        return f"{name}.n", f" LEFT JOIN {self.table.name} AS {name} ON {mine} = {theirs}"


def ids_of(work: Work, name: str, table: Table, column: str) -> Ids:
    """Check the ids of nodes, and keep them with their numbers. They are whole numbers if each is written as one."""
    cells = Cells(quoted(column), table.types[column])
    kept = Table(quoted(name), table.source, {})

    def look() -> list[int]:
        written = f"count(*) FILTER ({cells.written_whole})" if cells.is_text else "0"
        return [*work.look(table, f"count(*), count({cells.name}), {written}, max(length({cells.word}))")]

    count, num_there, num_written, longest = work.stage(f"look at {name}", look)
    are_whole = cells.type in WHOLE or (not table.is_typed and num_there == num_written)
    key = f"CAST({cells.name} AS BIGINT)" if are_whole else cells.word

    def keep() -> None:
        work.run(f"CREATE OR REPLACE TABLE {kept.name} AS SELECT {ROW} AS n, {key} AS k FROM {table.name}")
        of_all = f"SELECT k, count(*) AS c, min(n) AS n FROM {kept.name} WHERE k IS NOT NULL GROUP BY k HAVING c > 1"
        for each, times, row in work.run(f"{of_all} ORDER BY n LIMIT 3"):
            told = "twice" if times == 2 else f"{times} times"
            work.problems.append(
                f"{table.source} lists node {each} {told}, first in row {row + 1:,}: every node has one row."
            )
        work.refuse_cells(
            table, column, f"{cells.name} IS NULL", "and every node has an id: fill it, or remove the row."
        )

    if not count:
        work.problems.append(f"{table.source} has no rows: leave the table out, or fill it.")
    are_known = not (cells.is_real or cells.is_list)
    if not are_known:
        work.problems.append(no_ids(table.source, column, cells.type))
    else:
        work.stage(name, keep)
    dtype = LONG if are_whole else np.dtype(f"<U{max(longest or 1, 1)}")
    return Ids(table.source, count, kept, key, dtype, are_known)


def dtype_of(*counts: int | None) -> np.dtype[Any]:
    """The type of ends among so many nodes; of unknown ones the longer."""
    known = [count for count in counts if count is not None]
    return np.dtype(np.int32) if len(known) == len(counts) and max(known) <= np.iinfo(np.int32).max else LONG


def no_ids(source: Path, column: str, kind: str) -> str:
    """Why a column names no nodes."""
    return (
        f"{source} names nodes by numbers with a fraction (column {column!r} holds {kind.lower()}): an id is a whole "
        "number or a word. Empty cells become such numbers: remove those rows, and cast the column to int64."
    )


def query_of(
    table: Table, cells: Mapping[str, str], keys: Sequence[tuple[str, Ids]] = (), *, digits: bool = False
) -> str:
    """The query of cells by name, and of the nodes that columns of keys name: ``n0``, ``n1``, ...

    Args:
        table: The table.
        cells: The SQL of each cell.
        keys: The columns, and the ids that they are of. An empty cell is -1, and one that names no node ``UNKNOWN``.
        digits: Whether a word of digits, such as 007, names the whole number.
    """
    inner, outer, joins = [f"{ROW} AS row", *(f"{sql} AS {name}" for name, sql in cells.items())], ["e.*"], ""
    for at, (column, ids) in enumerate(keys):
        inner.append(f"{quoted(column)} AS key{at}")
        found, join = ids.join(Cells(f"e.key{at}", table.types[column]), f"k{at}", digits=digits)
        outer.append(f"coalesce({found}, CASE WHEN e.key{at} IS NULL THEN -1 ELSE {UNKNOWN} END) AS n{at}")
        joins += join
    outer[0] += f" EXCLUDE ({', '.join(f'key{at}' for at in range(len(keys)))})" if keys else ""
    return f"SELECT {', '.join(outer)} FROM (SELECT {', '.join(inner)} FROM {table.name}) AS e{joins}"


def write_rows(
    work: Work, query: str, table: Table, folder: Path, of: Callable[[Mapping[str, Any]], dict[str, Column]]
) -> None:
    """Write what becomes of the rows of a query as arrays, in the order of the numbers in its column ``row``.

    Rows come in another order where a join went to the disk.
    """
    shutil.rmtree(folder, ignore_errors=True)
    arrays, order, last, in_order = GrowingArrays(folder, table.source), GrowingArrays(folder, table.source), -1, True
    for piece in work.stream(query, table):
        rows = numpy_of(piece["row"])
        in_order &= bool((np.diff(rows, prepend=last) > 0).all())
        order.add({"row": rows})
        last = int(rows[-1])
        arrays.add(of(piece))
    files = arrays.finish()
    for rows_file in order.finish():
        for file in () if in_order else files:
            _put_in_order(file, np.load(rows_file, mmap_mode="r"), work.rows_at_once)
        rows_file.unlink()
    for file in files:
        flush(file)


def write_ends(
    folder: Path, senders: Column, receivers: Column, dtype: np.dtype[Any], carried: Mapping[str, Column] | None = None
) -> None:
    """Write edges in memory, and what they carry."""
    (folder / "carried").mkdir(parents=True, exist_ok=True)
    save(folder / "edge_index.npy", np.stack([senders, receivers]).astype(dtype))
    for name, array in (carried or {}).items():
        save(folder / "carried" / f"{name}.npy", array)


def _put_in_order(file: Path, places: Column, rows_at_once: int) -> None:
    """Write the rows of a file to their places, some at a time."""
    found, draft = np.load(file, mmap_mode="r"), file.with_suffix(".draft")
    placed = np.lib.format.open_memmap(draft, "w+", found.dtype, found.shape)
    for first in range(0, len(places), rows_at_once):
        some = slice(first, first + rows_at_once)
        placed[places[some]] = found[some]
    placed.flush()
    os.replace(draft, file)
