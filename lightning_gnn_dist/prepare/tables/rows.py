"""Rows as arrays: ids get numbers, keys become the nodes that they name, and columns what was found out of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.prepare.files.arrays import Carried, GrowingArrays, RowFiles
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, turn_two_edges
from lightning_gnn_dist.prepare.tables.engine import OF_KEYS, ROW, WHOLE, Cells, Table, Work, numpy_of, quoted

LONG = np.dtype(np.int64)
UNKNOWN = -2  # the node that a key names that names none; -1 if there is no key
NO_ROWS = "{} has no rows: leave the table out, or fill it."


@dataclass(frozen=True)
class Ids:
    """The ids of the nodes of a type.

    Args:
        source: Where they come from, for errors.
        count: How many nodes there are, if that is known.
        table: The table of ids, with the number of each node; None if nodes are numbered.
        key: The SQL of an id in its table.
        dtype: The type of ids, whole numbers or words.
        are_known: Whether there are such ids.
    """

    source: Path
    count: int | None
    table: Table | None = None
    key: str = "NULL"
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
    cells, kept = table.cells(column), Table(quoted(name), table.source, {})

    def look() -> dict[str, Any]:
        count, found = work.look_at(table, [column], OF_KEYS)
        return {"count": count, **vars(found[column])}

    found = SimpleNamespace(**work.stage(f"look at {name}", look))
    are_whole = cells.type in WHOLE or (not table.is_typed and found.there == found.written)
    key = f"CAST({cells.name} AS BIGINT)" if are_whole else cells.word

    def keep() -> None:
        work.run(f"CREATE OR REPLACE TABLE {kept.name} AS SELECT {ROW} AS n, {key} AS k FROM {table.name}")
        of_all = f"SELECT k, count(*) AS c, min(n) AS n FROM {kept.name} WHERE k IS NOT NULL GROUP BY k HAVING c > 1"
        for each, times, row in work.run(f"{of_all} ORDER BY n LIMIT 3"):
            told = "twice" if times == 2 else f"{times} times"
            work.problems.append(
                f"{table.source} lists node {each} {told}, first in row {row + 1:,}: every node has one row."
            )
        what = "and every node has an id: fill it, or remove the row."
        work.refuse_cells(table, column, f"{cells.name} IS NULL", what)

    if not found.count:
        work.problems.append(NO_ROWS.format(table.source))
    if are_known := can_be_keys(work, table, column):
        work.stage(name, keep)
    dtype = LONG if are_whole else np.dtype(f"<U{max(found.size or 1, 1)}")
    return Ids(table.source, found.count, kept, key, dtype, are_known)


def can_be_keys(work: Work, table: Table, column: str) -> bool:
    """Whether cells may name nodes, as numbers with a fraction and lists do not, which is noted."""
    cells = table.cells(column)
    if not (cells.is_real or cells.is_list):
        return True
    work.problems.append(
        f"{table.source} names nodes by numbers with a fraction (column {column!r} holds {cells.type.lower()}): an id "
        "is a whole number or a word. Empty cells become such numbers: remove those rows, and cast the column to int64."
    )
    return False


def write_rows(
    work: Work,
    table: Table,
    cells: Mapping[str, str],
    keys: Sequence[tuple[str, Ids]],
    folder: Path,
    of: Callable[[Mapping[str, Any]], dict[str, Column]],
    *,
    digits: bool = False,
) -> None:
    """Write what becomes of rows as arrays, in their order, which is another where a join went to the disk.

    Args:
        work: Reads the table.
        table: The table.
        cells: The SQL of each cell that is read, by name.
        keys: The columns of keys, and the ids that they are of: ``n0``, ``n1``, ... are the nodes that they name.
        folder: Gets the arrays.
        of: What becomes of a piece.
        digits: Whether a key of digits, such as 007, names the whole number.
    """
    shutil.rmtree(folder, ignore_errors=True)
    arrays, order, last, in_order = GrowingArrays(folder, table.source), GrowingArrays(folder, table.source), -1, True
    for piece in work.stream(query_of(table, cells, keys, digits=digits), table):
        rows = numpy_of(piece["row"])
        in_order &= bool((np.diff(rows, prepend=last) > 0).all())
        order.add({ROW[1:-1]: rows})
        last = int(rows[-1])
        arrays.add(of(piece))
    files = arrays.finish()
    for rows_file in order.finish():
        places = np.load(rows_file, mmap_mode="r")
        for file in () if in_order else files:
            # Edges that are fewer than the rows are sorted later by all that they have, their ends and times.
            if NpyFile.of(file).shape[0] == len(places):
                _put_in_order(file, places, work.rows_at_once)
        rows_file.unlink()
    for file in files:
        if file.stem == EDGES:
            turn_two_edges(file)
        flush(file)


def query_of(table: Table, cells: Mapping[str, str], keys: Sequence[tuple[str, Ids]], *, digits: bool = False) -> str:
    """The query of cells by name and of the nodes that keys name: -1 of an empty cell, ``UNKNOWN`` if there is none."""
    inner, outer, joins = [f"{ROW} AS row", *(f"{sql} AS {name}" for name, sql in cells.items())], ["e.*"], ""
    for at, (column, ids) in enumerate(keys):
        inner.append(f"{quoted(column)} AS key{at}")
        found, join = ids.join(Cells(f"e.key{at}", table.types[column]), f"k{at}", digits=digits)
        outer.append(f"coalesce({found}, CASE WHEN e.key{at} IS NULL THEN -1 ELSE {UNKNOWN} END) AS n{at}")
        joins += join
    outer[0] += f" EXCLUDE ({', '.join(f'key{at}' for at in range(len(keys)))})" if keys else ""
    return f"SELECT {', '.join(outer)} FROM (SELECT {', '.join(inner)} FROM {table.name}) AS e{joins}"


EDGES = "edge_index"


@dataclass
class Ends:
    """The ends of edges, as they come piece by piece; keys that name no node leave the edge out.

    Args:
        ids: Those of senders, and of receivers.
        lowest: The lowest node of each end, ``UNKNOWN`` if a key has named none.
        highest: The highest.
    """

    ids: tuple[Ids, Ids]
    lowest: list[int] = field(default_factory=lambda: [0, 0])
    highest: list[int] = field(default_factory=lambda: [-1, -1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of unknown numbers of nodes the longer."""
        is_short = all(ids.count is not None and ids.count <= np.iinfo(np.int32).max for ids in self.ids)
        return np.dtype(np.int32) if is_short else LONG

    def of(self, senders: Column, receivers: Column, carried: Mapping[str, Column]) -> dict[str, Column]:
        """The edges of a piece, and what they carry."""
        edges = np.empty((len(senders), 2), self.dtype)
        for at, ends in enumerate((senders, receivers)):
            self.lowest[at] = min(self.lowest[at], int(ends.min(initial=0)))
            self.highest[at] = max(self.highest[at], int(ends.max(initial=-1)))
            edges[:, at] = ends
        found = {EDGES: edges} | dict(carried)
        if min(self.lowest) < 0:
            known = (edges >= 0).all(1)
            found = {name: array[known] for name, array in found.items()}
        return found


def write_edges(folder: Path, ids: tuple[Ids, Ids], senders: Column, receivers: Column, **carried: Column) -> None:
    """Write edges in memory, and what they carry, as :func:`write_rows` does."""
    folder.mkdir(parents=True, exist_ok=True)
    found = Ends(ids).of(senders, receivers, carried)
    for name, array in (found | {EDGES: np.ascontiguousarray(found[EDGES].T)}).items():
        save(folder / f"{name}.npy", array)


def edges_in(folder: Path, *, flip: bool = False) -> EdgeFiles:
    """The edges in a folder, and what they carry."""
    carried = {file.stem: RowFiles.of(file) for file in sorted(folder.glob("*.npy")) if file.stem != EDGES}
    return replace(EdgeFiles.of(folder / f"{EDGES}.npy"), carried=Carried(carried), flip=flip)


def _put_in_order(file: Path, places: Column, rows_at_once: int) -> None:
    """Write the rows of a file to their places, some at a time."""
    found, draft = np.load(file, mmap_mode="r"), file.with_suffix(".draft")
    placed = np.lib.format.open_memmap(draft, "w+", found.dtype, found.shape)
    for first in range(0, len(places), rows_at_once):
        some = slice(first, first + rows_at_once)
        placed[places[some]] = found[some]
    placed.flush()
    os.replace(draft, file)
