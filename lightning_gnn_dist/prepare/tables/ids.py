"""The ids of nodes, the keys that name them, and the rows of queries as arrays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.prepare.files.arrays import GrowingArrays
from lightning_gnn_dist.prepare.tables.engine import ROW, WHOLE, Cells, Table, Work, numpy_of, quoted

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
