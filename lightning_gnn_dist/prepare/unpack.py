"""Tables become arrays: ids numbers of nodes, keys the nodes that they name, columns labels, masks, times and features.

Each table is looked at, its ids are kept, and it is read once more and written. All that is wrong is said at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import within
from lightning_gnn_dist.prepare.arrays import EDGES, GrowingArrays, check_num_nodes, entries
from lightning_gnn_dist.prepare.columns import Columns, cells_of
from lightning_gnn_dist.prepare.engine import NO_ROWS, ROW, WHOLE, Cells, Table, Work, numpy_of, quoted, told
from lightning_gnn_dist.prepare.plan import NodeFiles, Plan, TablePlan, edges_in, turn_two_edges
from lightning_gnn_dist.prepare.reading import ENDS, is_parquet, load

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.tables import Tables

LONG = np.dtype(np.int64)
UNKNOWN = -2  # the node that a key names that names none; -1 if there is no key
Told = list[tuple[str, str, str]]  # a table, a column, and what it becomes


class Unpacked(NamedTuple):
    """What to prepare without tables, the files of ids, by the types of nodes, and what columns and tables became."""

    plan: Plan
    ids: dict[str, Path]
    told: Told
    tables: Tables | None = None


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
    key: str = ROW
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


class Ends:
    """The ends of edges, as they come piece by piece; keys that name no node leave the edge out.

    Args:
        ids: Those of senders, and of receivers.

    Attributes:
        lowest: The lowest node of each end, ``UNKNOWN`` if a key has named none.
        highest: The highest.
    """

    def __init__(self, ids: tuple[Ids, Ids]) -> None:
        self.ids, self.lowest, self.highest = ids, [0, 0], [-1, -1]
        is_short = all(each.count is not None and each.count <= np.iinfo(np.int32).max for each in ids)
        self._dtype = np.int32 if is_short else np.int64

    def of(self, senders: Column, receivers: Column, carried: Mapping[str, Column]) -> dict[str, Column]:
        """The edges of a piece, and what they carry."""
        edges = np.empty((len(senders), 2), self._dtype)
        for at, ends in enumerate((senders, receivers)):
            self.lowest[at] = min(self.lowest[at], int(ends.min(initial=0)))
            self.highest[at] = max(self.highest[at], int(ends.max(initial=-1)))
            edges[:, at] = ends
        found = {EDGES: edges} | dict(carried)
        if min(self.lowest) < 0:
            known = (edges >= 0).all(1)
            found = {name: array[known] for name, array in found.items()}
        return found


class Unpacking:
    """The work of turning the tables of a plan into arrays in a folder; what a kill has left done stays.

    Args:
        plan: The plan.
        folder: The folder.
        memory_bytes: What this may take.
        on_progress: Called with the name of a stage and the share of it that is done.
    """

    digits = False  # whether a key of digits, such as 007, names the whole number

    def __init__(self, plan: Plan, folder: Path, memory_bytes: int, on_progress: Callable[[str, float], None]) -> None:
        self.plan, self.folder, self.on_progress = plan, folder, on_progress
        self.work = Work(folder, memory_bytes)
        self.ids = {kind: Ids(files.source, files.num_nodes) for kind, files in plan.nodes.items()}
        self.loaded, self.facts = list[Table](), list[dict[str, Any]]()

    def run(self) -> Unpacked:
        """Do all of it."""
        tables = [*enumerate(self.plan.tables)]
        with self.work:
            for at, each in tables:
                with told(each.path):
                    self.loaded.append(self.load(at, each))
            self.work.check()
            for at, each in tables:
                if each.kind is not None and each.key is not None:
                    self.on_progress(f"reading {each.words}", 0.0)
                    with told(each.path):
                        self.ids[each.kind] = ids_of(self.work, f"table {at}", self.loaded[at], each.key)
            for at, each in tables:
                self.on_progress(f"reading {each.words}", 0.0)
                with told(each.path), within("" if each.kind is not None else next(iter(each.edges))):
                    self.facts.append(self.work.stage(f"write {at}", partial(self.write, at, each)))
                self.on_progress(f"reading {each.words}", 1.0)
            self.work.check()
            nodes, edges, ids = dict(self.plan.nodes), dict(self.plan.edges), dict[str, Path]()
            for at, each in tables:
                folder = self.place(at)
                if each.kind is not None:
                    arrays = NodeFiles.of(folder / "arrays", entries(folder / "arrays"))
                    nodes[each.kind] = replace(arrays.beside(nodes[each.kind]), source=each.path)
                    ids[each.kind] = folder / "ids.npy"
                for edge_type, as_written in each.all_edges.items():
                    edges[edge_type] = edges_in(folder / "edges" / as_written[1], flip=edge_type != as_written)
            made = replace(self.plan, nodes=nodes, edges=edges, tables=())
            lines = [(each.words, *line) for at, each in tables for line in self.facts[at].get("told", ())]
            return Unpacked(made, ids, lines, self.tables(made))

    def place(self, at: int) -> Path:
        """The folder of what becomes of a table."""
        return self.folder / "tables" / f"{at:05}"

    def load(self, at: int, plan: TablePlan) -> Table:
        """Have a table read."""
        return load(self.work, f"table {at}", plan.path)

    def columns(self, at: int, plan: TablePlan, table: Table) -> Any:
        """What its columns become."""
        is_edges, is_plain = plan.kind is None, ("", "", "") in plan.edges
        given = self.work, table, plan.columns, self.plan.time
        columns = Columns(*given, of_edges=is_edges, plain=is_plain, kinds=self.plan.kinds)
        if is_edges:
            convert.check_each_name(columns.arrays, allowed=())
        return columns

    def tell(self, at: int, plan: TablePlan, columns: Any) -> dict[str, Any]:
        """What is to be known of a table that is written."""
        return {"told": columns.told}

    def tables(self, made: Plan) -> Tables | None:
        """What became of all tables, if they are those of a database."""
        return None

    def write(self, at: int, plan: TablePlan) -> dict[str, Any]:
        """Write what becomes of a table; return what is to be known of it."""
        table, folder, work = self.loaded[at], self.place(at), self.work
        self.check_ends(table, plan)
        columns = self.columns(at, plan, table)
        ends = {each: Ends((self.ids[each[0]], self.ids[each[2]])) for each in plan.edges}
        if work.problems:
            for each in ends.values():
                each.lowest = [-1, -1]  # what is wrong with ends is said, too
        keys = [key for each, of_both in plan.edges.items() for key in zip(of_both, each[::2], strict=True)]
        named = {(end, kind): f"n{n}" for n, (end, kind) in enumerate(key for key in keys if key[0] is not None)}

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made, found = columns.of(piece), dict[str, Column]()
            if plan.kind is not None:
                found = {f"arrays/{name}": array for name, array in made.items()}
                found["ids"] = numpy_of(piece["id"]).astype(self.ids[plan.kind].dtype)
            carried = self.carried(plan, made)
            nodes = [piece[named.get(key, "row")].to_numpy(zero_copy_only=False) for key in keys]
            for at, each in enumerate(plan.edges):
                edges = ends[each].of(nodes[2 * at], nodes[2 * at + 1], carried)
                found |= {f"edges/{each[1]}/{name}": array for name, array in edges.items()}
            return found

        of_keys = [(str(end), self.ids[kind]) for end, kind in named]
        cells = {} if plan.kind is None else {"id": self.ids[plan.kind].key}
        for _ in columns.readings():
            write_rows(work, table, cells | cells_of(columns.all), of_keys, folder, of, digits=self.digits)
        for n, (end, kind) in enumerate(keys):
            if end is not None:
                self.check_keys(at, end, kind, ends[[*plan.edges][n // 2]], n % 2)
        if plan.kind is not None and not work.problems:
            (folder / "arrays").mkdir(parents=True, exist_ok=True)
            save(folder / "arrays" / "num_nodes.npy", np.array(self.ids[plan.kind].count))
            for made in columns.made:
                if made.words is not None:
                    save(folder / "classes.npy", np.array(made.words, np.str_))
            if columns.categories:
                (folder / "categories.json").write_text(json.dumps(columns.categories))
        return self.tell(at, plan, columns)

    def carried(self, plan: TablePlan, made: Mapping[str, Column]) -> dict[str, Column]:
        """What edges carry of the arrays that became of a table: all, if it has nothing but edges."""
        return {} if plan.kind is not None else dict(made)

    def check_ends(self, table: Table, plan: TablePlan) -> None:
        """Refuse ends that name no nodes, and two columns that are called as nodes are: their names are an edge."""
        if plan.kind is not None:
            return
        ((edge_type, ends),) = plan.edges.items()
        names, ids = [str(end) for end in ends], self.ids[edge_type[0]]
        for end in names:
            can_be_keys(self.work, table, end)
        is_heading = is_parquet(table.source) or tuple(name.lower() for name in names) in ENDS
        if is_heading or ids.table is None or ids.are_whole:
            return
        if len(self.work.run(f"SELECT DISTINCT k FROM {ids.table.name} WHERE k IN (?, ?)", *names)) == 2:
            self.work.problems.append(
                f"{table.source}: the first line names the nodes {names[0]!r} and {names[1]!r}, and would be taken as "
                "heading: write a heading above it, such as source,target."
            )

    def check_keys(self, at: int, end: str, kind: str, found: Ends, place: int) -> None:
        """Note what is wrong with one of the two ends of edges, as they were read."""
        table, ids, work = self.loaded[at], self.ids[kind], self.work
        if found.highest[0] < found.lowest[0] and not work.problems:  # no row was seen
            work.problems.append(NO_ROWS.format(table.source))
        if found.lowest[place] < 0 or (ids.count is not None and found.highest[place] >= ids.count):
            _refuse(work, table, end, ids, ("sender", "receiver")[place])
        if place and None in (found.ids[0].count, found.ids[1].count) and not work.problems:
            _check_largest(table.source, self.place(at) / "edges" / f"{EDGES}.npy", max(found.highest))


def ids_of(work: Work, name: str, table: Table, column: str) -> Ids:
    """Check the ids of nodes, and keep them with their numbers. They are whole numbers if each is written as one."""
    cells, kept = table.cells(column), Table(quoted(f"ids of {name}"), table.source, {})
    count, looks = work.look_at_keys(name, table, [column])
    look = looks[column]
    are_whole = cells.type in WHOLE or (not table.is_typed and look.there == look.written)
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

    if are_known := can_be_keys(work, table, column):
        work.stage(f"ids of {name}", keep)
    dtype = LONG if are_whole else np.dtype(f"<U{max(look.size or 1, 1)}")
    return Ids(table.source, count, kept, key, dtype, are_known)


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


def _refuse(work: Work, table: Table, end: str, ids: Ids, word: str) -> None:
    """Say which nodes are named that are none, if it is known which there are."""
    if not ids.are_known:
        return
    cells = table.cells(end)
    work.refuse_cells(table, end, f"{cells.name} IS NULL", "and an edge has two ends: fill it, or remove the row.")
    are_words = f"{cells.name} IS NOT NULL AND {cells.whole} IS NULL"
    if ids.table is not None:
        known = f"SELECT CAST(k AS VARCHAR) FROM {ids.table.name} WHERE k IS NOT NULL"
        bad = f"{cells.name} IS NOT NULL AND {cells.word} NOT IN ({known})"
        what = f"names node {{}}, which {ids.source} does not list: add a row for it."
    elif cells.is_text and work.run(f"SELECT 1 FROM {table.name} WHERE {are_words} LIMIT 1"):
        bad = are_words
        what = (
            "names nodes by words, such as {!r}, and numbers 0, 1, 2, ... are needed: give these, or a table of "
            "nodes with their ids (--nodes)."
        )
    elif ids.count is None:
        bad = f"{cells.whole} < 0 OR ({are_words})"
        what = "names nodes by other things than 0, 1, 2, ... ({}): give the table of nodes (--nodes)."
    else:
        bad = f"{cells.whole} NOT BETWEEN 0 AND {ids.count - 1}"
        what = (
            f"names the {word} {{}}, but there are {ids.count} nodes of its type: ids count from 0, so they must "
            f"lie in [0, {ids.count})."
        )
    rows = f"FROM {table.name} WHERE {bad}"
    if found := work.run(f"SELECT {cells.word}, min({ROW}) {rows} GROUP BY 1 ORDER BY 2 LIMIT 3"):
        ((count, different),) = work.run(f"SELECT count(*), count(DISTINCT {cells.word}) {rows}")
        some = ", ".join(f"{each} in row {row + 1:,}" for each, row in found)
        more = f"{count:,} edges name {different:,} such nodes, first {some}." if count > 1 else ""
        work.problems.append(
            f"{table.source} {what.format(found[0][0])} {more or f'It is in row {found[0][1] + 1:,}.'}"
        )


def _check_largest(source: Path, file: Path, highest: int) -> None:
    """Refuse ids that say that there are more nodes than can be meant."""
    try:
        check_num_nodes(highest + 1, "")
    except ValueError:
        row = int((np.load(file, mmap_mode="r") == highest).any(1).argmax()) + 1
        check_num_nodes(highest + 1, f"{source} names node {highest} in row {row}. It would be one of")


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


def write_rows(
    work: Work,
    table: Table,
    cells: Mapping[str, str],
    keys: Sequence[tuple[str, Ids]],
    folder: Path,
    of: Callable[[Mapping[str, Any]], dict[str, Column]],
    *,
    digits: bool,
) -> None:
    """Write what ``of`` makes of each piece of rows as arrays, in their order, which is another where a join spilled.

    The columns ``n0``, ``n1``, ... of a piece are the nodes that ``keys`` name; others have the names of ``cells``.
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


def _put_in_order(file: Path, places: Column, rows_at_once: int) -> None:
    """Write the rows of a file to their places, some at a time."""
    found, draft = np.load(file, mmap_mode="r"), file.with_suffix(".draft")
    placed = np.lib.format.open_memmap(draft, "w+", found.dtype, found.shape)
    for first in range(0, len(places), rows_at_once):
        some = slice(first, first + rows_at_once)
        placed[places[some]] = found[some]
    placed.flush()
    os.replace(draft, file)
