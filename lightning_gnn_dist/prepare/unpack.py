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
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.tables import NEVER, TIME
from lightning_gnn_dist.graph.typed.types import within
from lightning_gnn_dist.prepare.arrays import EDGES, GrowingArrays, check_num_nodes, entries
from lightning_gnn_dist.prepare.columns import LONG, Columns, columns_of, time_of
from lightning_gnn_dist.prepare.engine import (
    NO_ROWS,
    OF_KEYS,
    OWN,
    ROW,
    WHOLE,
    Bad,
    Cells,
    Table,
    Work,
    numpy_of,
    quoted,
    told,
)
from lightning_gnn_dist.prepare.plan import NodeFiles, Plan, TablePlan, edges_in, turn_two_edges
from lightning_gnn_dist.prepare.reading import ENDS, is_parquet, load

NO_KEYS = "and keys are whole numbers or words."
NO_DATES = "and keys are whole numbers or words: write dates as texts."
UNITS = (
    (10**8, "small numbers, such as days"),
    (10**11, "seconds"),
    (10**14, "milliseconds"),
    (10**17, "microseconds"),
)
UNKNOWN = -2  # the node that a key names that names none; -1 if there is no key


@dataclass(frozen=True)
class Ids:
    """The ids of the nodes of a type.

    Args:
        source: Where they come from, for errors.
        count: How many nodes there are, if that is known.
        column: The column that holds them.
        table: The table of ids, with the number of each node; None if nodes are numbered.
        key: The SQL of an id in its table.
        dtype: The type of ids, whole numbers or words.
        are_known: Whether it is known which ids there are.
        digits: Whether a word of digits, such as 007, names the whole number.
    """

    source: Path
    count: int | None
    column: str = ""
    table: Table | None = None
    key: str = ROW
    dtype: np.dtype[Any] = LONG
    are_known: bool = True
    digits: bool = False

    @classmethod
    def of(cls, work: Work, name: str, table: Table, column: str, *, digits: bool) -> Ids:
        """Check the ids of nodes, and keep them with their numbers."""
        cells, kept = table.cells(column), Table(quoted(f"ids of {name}"), table.source, {})

        def keep() -> int:
            work.run(f"CREATE OR REPLACE TABLE {kept.name} AS SELECT {ROW} AS n, {key} AS k FROM {table.name}")
            of_all = f"SELECT k, count(*) AS c, min(n) AS n FROM {kept.name} WHERE k IS NOT NULL GROUP BY k"
            for each, times, _ in work.run(f"{of_all} HAVING c > 1 ORDER BY n LIMIT 3"):
                rows = work.run(f"SELECT n + 1 FROM {kept.name} WHERE k = ? ORDER BY n LIMIT 2", each)
                first, second = (work.place(table, row) for (row,) in rows)
                told = "twice" if times == 2 else f"{times} times"
                what = f"lists node {each} {told}, first in row {first}, then in row {second}: every node has one row."
                work.refuse(table, column, what)
            what = "and every node has an id: fill it, or remove the row."
            work.refuse_cells(table, [(column, f"{cells.name} IS NULL", what)])
            return int(work.run(f"SELECT max(length(CAST(k AS VARCHAR))) FROM {kept.name}")[0][0] or 1)

        are_whole = cells.type in WHOLE
        key = f"CAST({cells.name} AS BIGINT)" if are_whole else cells.word
        size = work.stage(f"ids of {name}", keep)
        dtype = LONG if are_whole else np.dtype(f"<U{size}")
        return cls(table.source, table.num_rows, column, kept, key, dtype, digits=digits)

    def join(self, cells: Cells, name: str) -> tuple[str, str]:
        """The SQL of the node that a cell names, and the join that finds it, in which ids have a name."""
        if self.table is None:
            return cells.whole, ""
        mine, theirs = cells.word, f"CAST({name}.k AS VARCHAR)"
        if self.dtype == LONG and (self.digits or cells.type in WHOLE):
            mine, theirs = cells.whole, f"{name}.k"
        return f"{name}.n", f" LEFT JOIN {self.table.name} AS {name} ON {mine} = {theirs}"

    def unknown(self, table: Table, column: str, *, may_be_empty: bool) -> tuple[Table, Bad]:
        """The cells of a column that name no node, and the table to look for them in."""
        cells = table.cells(column)
        if self.table is not None:
            found, join = self.join(Cells(f"e.{cells.name}", cells.type), "k")
            rows = f'(SELECT e.*, {found} IS NULL AS "{OWN}unknown" FROM {table.name} AS e{join})'
            way_out = "add that row, empty the cell, or" if may_be_empty else "add that row, or"
            what = f"which no row of {self.source} has as its {self.column}: {way_out} take this one away."
            return replace(table, name=rows), (column, f'"{OWN}unknown" AND {cells.name} IS NOT NULL', what)
        what = "and nodes are numbered 0, 1, 2, ...: give such numbers, or the table of nodes with their ids (--nodes)."
        if self.count is not None:
            what = f"but there are {self.count} nodes of its type: their ids are 0 to {self.count - 1}."
        is_node = f"{cells.whole} >= 0" + ("" if self.count is None else f" AND {cells.whole} < {self.count}")
        return table, (column, f"{cells.name} IS NOT NULL AND NOT coalesce({is_node}, false)", what)


def with_keys(work: Work, name: str, table: Table, keys: Sequence[str], time: str | None, *, digits: bool) -> Table:
    """The table under a name, with keys that are whole numbers where they can be; what is wrong with them is noted.

    Args:
        work: Reads the table.
        name: What it is called.
        table: The table.
        keys: The columns of keys.
        time: The column of the time of a row, if there is one.
        digits: Whether numbers with a fraction of 0 are whole numbers in a text, too, where 11.0 may be a word.
    """
    columns = dict.fromkeys([*keys, *([time] if time else [])])
    num_rows, looks = work.stage(f"look at {name}", lambda: work.look_at(table, columns, OF_KEYS))
    found, bad = {name: SimpleNamespace(**each) for name, each in looks.items()}, list[Bad]()
    casts, types = dict[str, str](), dict[str, str]()
    if not num_rows:
        work.problems.append(NO_ROWS.format(table.source))
    for column in keys:
        cells, look = table.cells(column), found[column]
        is_text = cells.is_text and not table.is_typed
        if cells.is_list or (digits and cells.is_date):
            bad.append((column, f"{cells.name} IS NOT NULL", NO_KEYS if cells.is_list else NO_DATES))
        elif cells.type in WHOLE and look.whole < look.there:  # ids of 64 bits without a sign
            casts[column], types[column] = cells.word, "VARCHAR"
        elif is_text and look.written == look.there:
            casts[column] = f"CAST({cells.name} AS BIGINT)"
        elif cells.is_real or (digits and is_text and look.numbers == look.there > look.whole):
            bad.append((column, cells.is_fraction, NO_KEYS))
            casts[column] = f"TRY_CAST({cells.real} AS BIGINT)"
    if time:
        made = time_of(table.cells(time), time, TIME, found[time], bad, NEVER)
        table = replace(table, time=made.sql, are_dates=made.are_dates)
    work.refuse_cells(table, bad)
    if casts:
        replaced = ", ".join(f"{sql} AS {quoted(column)}" for column, sql in casts.items())
        work.run(f"CREATE OR REPLACE VIEW {quoted(name)} AS SELECT * REPLACE ({replaced}) FROM {table.name}")
        table = replace(table, name=quoted(name), types={**table.types, **dict.fromkeys(casts, "BIGINT"), **types})
    return replace(table, num_rows=num_rows)


class Unpacking:
    """The work of turning the tables of a plan into arrays in a folder; what a kill has left done stays.

    Args:
        plan: The plan.
        folder: The folder.
        memory_bytes: What this may take.
        on_progress: Called with the name of a stage and the share of it that is done.
    """

    of_database = False  # whether keys may be empty, naming no node, and digits such as 007 and 11.0 are whole numbers
    may_dangle = False  # whether edges are left out whose keys name no node

    def __init__(self, plan: Plan, folder: Path, memory_bytes: int, on_progress: Callable[[str, float], None]) -> None:
        self.plan, self.folder, self.on_progress = plan, folder / "tables", on_progress
        self.work = Work(self.folder, memory_bytes)
        digits = self.of_database
        self.ids = {kind: Ids(files.source, files.num_nodes, digits=digits) for kind, files in plan.nodes.items()}
        self.loaded, self.facts = list[Table](), list[dict[str, Any]]()

    def run(self) -> Plan:
        """Do all of it; return what to prepare without tables."""
        tables = [*enumerate(self.plan.tables)]
        with self.work:
            for at, each in tables:
                self.on_progress(f"looking at {each.words}", 0.0)
                with told(each.path):
                    self._load(at, each)
            if self.of_database:
                self.work.check()  # what has a wrong time, or key, is wrong in other ways, too
            for at, each in tables:
                self.on_progress(f"reading {each.words}", 0.0)
                with told(each.path), within("" if each.kind is not None else next(iter(each.edges))):
                    self.facts.append(self.work.stage(f"write {at}", partial(self.write, at, each)))
                self.on_progress(f"reading {each.words}", 1.0)
            self.work.check()
            self._check_units()
            nodes, edges, ids = dict(self.plan.nodes), dict(self.plan.edges), dict[str, Path]()
            for at, each in tables:
                folder = self.place(at)
                if each.kind is not None:
                    arrays = NodeFiles.of(each.path, entries(folder / "arrays"))
                    nodes[each.kind] = arrays.beside(nodes[each.kind])
                    ids[each.kind] = folder / "ids.npy"
                for edge_type, as_written in each.all_edges.items():
                    edges[edge_type] = edges_in(folder / "edges" / as_written[1], flip=edge_type != as_written)
            lines = [(each.words, *line) for at, each in tables for line in self.facts[at].get("told", ())]
            return replace(self.plan, nodes=nodes, edges=edges, tables=(), ids=ids, told=lines)

    def _check_units(self) -> None:
        """Refuse tables whose times are dates beside others whose times are numbers, and no seconds."""
        dates, others = list[str](), list[str]()
        for at, plan in enumerate(self.plan.tables):
            for are_dates in self.facts[at].get("dates", ()):
                times = [np.load(file, mmap_mode="r") for file in self.place(at).rglob(f"{self.plan.time}.npy")]
                latest = max(each.max(initial=0) for each in times)
                if are_dates:
                    dates.append(plan.words)
                elif unit_of(latest) != "seconds":
                    others.append(f"{plan.words} (up to {latest})")
        if dates and others:
            raise ValueError(
                f"Times of {dates[0]} are dates, and become seconds since 1970; those of {others[0]} are numbers of "
                "another unit: give all as dates, or in one unit."
            )

    def place(self, at: int) -> Path:
        """The folder of what becomes of a table."""
        return self.folder / f"{at:05}"

    def _load(self, at: int, plan: TablePlan) -> None:
        """Have a table read, and learn the ids of its nodes."""
        before = len(self.work.problems)
        self.loaded.append(table := self.load(f"table {at}", plan))
        if plan.kind is not None and len(self.work.problems) > before:
            self.ids[plan.kind] = replace(self.ids[plan.kind], are_known=False)
        elif plan.kind is not None and plan.key is not None:
            self.ids[plan.kind] = Ids.of(self.work, f"table {at}", table, plan.key, digits=self.of_database)
        elif plan.kind is not None:
            self.ids[plan.kind] = replace(self.ids[plan.kind], count=table.num_rows)

    def load(self, name: str, plan: TablePlan) -> Table:
        """Have a table read under a name, and its keys looked at; ends of edges alone if they may be no keys."""
        table = load(self.work, f"file of {name}", plan.path)
        keys = [*([plan.key] if plan.key is not None else []), *plan.fkeys]
        if plan.kind is None and not self.of_database:
            keys = [key for key in keys if table.cells(key).is_real or table.cells(key).is_list]
            if not keys:
                return table
        return with_keys(self.work, name, table, keys, plan.time_col, digits=self.of_database)

    def columns(self, at: int, plan: TablePlan, table: Table) -> Columns:
        """What its columns become."""
        columns = columns_of(self.work, table, plan, self.plan)
        if plan.kind is None:
            convert.check_each_name([each.array for each in columns.all], allowed=())
            self._check_heading(table, plan)
        return columns

    def tell(self, at: int, plan: TablePlan, columns: Columns) -> dict[str, Any]:
        """What is to be known of a table that is written."""
        dates = [made.are_dates for made in columns.made if made.array == self.plan.time]
        return {"told": columns.told, "dates": dates}

    def write(self, at: int, plan: TablePlan) -> dict[str, Any]:
        """Write what becomes of a table; return what is to be known of it."""
        table, folder, work = self.loaded[at], self.place(at), self.work
        columns, ids = self.columns(at, plan, table), self.ids
        keys = [(column, ids[kind]) for column, kind in plan.fkeys.items()]
        counts = [ids[kind].count for each in plan.edges for kind in each[::2]]
        are_short = all(count is not None and count <= np.iinfo(np.int32).max for count in counts)
        dtype, lowest, highest = np.int32 if are_short else np.int64, dict[str, int](), dict[str, int]()

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made, found = columns.of(piece), dict[str, Column]()
            if plan.kind is not None:
                found = {f"arrays/{name}": array for name, array in made.items()}
                found["ids"] = numpy_of(piece["id"]).astype(ids[plan.kind].dtype)
            nodes: dict[str | None, Column] = {None: piece["row"].to_numpy()}
            for n, (column, _) in enumerate(keys):
                nodes[column] = some = piece[f"n{n}"].to_numpy()
                lowest[column] = min(lowest.get(column, 0), int(some.min(initial=0)))
                highest[column] = max(highest.get(column, -1), int(some.max(initial=-1)))
            for each, ends in plan.edges.items():
                edges: Column = np.stack([nodes[end] for end in ends], 1, dtype=dtype, casting="same_kind")
                arrays, is_known = {EDGES: edges} | self.carried(plan, made), (edges >= 0).all(1)
                for name, array in arrays.items():
                    found[f"edges/{each[1]}/{name}"] = array if is_known.all() else array[is_known]
            return found

        cells = {} if plan.kind is None else {"id": ids[plan.kind].key}
        for _ in columns.readings():
            write_rows(work, table, query_of(table, cells | columns.cells, keys), folder, of)
        self._check_keys(at, plan, lowest, highest)
        if plan.kind is not None and not work.problems:
            (folder / "arrays").mkdir(parents=True, exist_ok=True)
            save(folder / "arrays" / "num_nodes.npy", np.array(self.ids[plan.kind].count))
            for made in columns.made:
                if made.words is not None:
                    save(folder / "classes.npy", np.array(made.words, np.str_))
            features = [each for each in columns.features if each.kind == "category" and not each.cut]
            if categories := {each.name: each.words for each in features}:
                (folder / "categories.json").write_text(json.dumps(categories))
        return self.tell(at, plan, columns)

    def carried(self, plan: TablePlan, made: Mapping[str, Column]) -> dict[str, Column]:
        """What edges carry of the arrays that became of a table: all, if it has nothing but edges."""
        return {} if plan.kind is not None else dict(made)

    def _check_heading(self, table: Table, plan: TablePlan) -> None:
        """Refuse two columns that are called as nodes are: their names are an edge."""
        ((edge_type, ends),) = plan.edges.items()
        names, ids = [str(end) for end in ends], self.ids[edge_type[0]]
        is_heading = is_parquet(table.source) or tuple(name.lower() for name in names) in ENDS
        if is_heading or ids.table is None or ids.dtype == LONG:
            return
        if len(self.work.run(f"SELECT DISTINCT k FROM {ids.table.name} WHERE k IN (?, ?)", *names)) == 2:
            self.work.problems.append(
                f"{table.source}: the first line names the nodes {names[0]!r} and {names[1]!r}, and would be taken as "
                "heading: write a heading above it, such as source,target."
            )

    def _check_keys(self, at: int, plan: TablePlan, lowest: Mapping[str, int], highest: Mapping[str, int]) -> None:
        """Note what is wrong with keys, of which the lowest and the highest node are known if they were read."""
        table, work = self.loaded[at], self.work
        if plan.fkeys and not (highest or work.problems or self.of_database):
            work.problems.append(NO_ROWS.format(table.source))
        for column, kind in plan.fkeys.items():
            ids, low, high = self.ids[kind], lowest.get(column, UNKNOWN), highest.get(column, -1)
            is_beyond = ids.count is not None and high >= ids.count
            if not ids.are_known or not (is_beyond or low == UNKNOWN or (low < 0 and not self.of_database)):
                continue
            if not self.of_database:
                what = "and an edge has two ends: fill it, or remove the row."
                work.refuse_cells(table, [(column, f"{quoted(column)} IS NULL", what)])
            if not self.may_dangle:
                may_be_empty = self.of_database and type(plan) is TablePlan  # others are questions, and answers
                looked_in, bad = ids.unknown(table, column, may_be_empty=may_be_empty)
                work.refuse_cells(looked_in, [bad])
        if not work.problems and any(self.ids[kind].count is None for kind in plan.fkeys.values()):
            _check_largest(table.source, self.place(at) / "edges" / f"{EDGES}.npy", max(highest.values()))


def unit_of(time: float) -> str:
    """What times since 1970 are likely to count, given the latest."""
    return next((name for most, name in UNITS if abs(time) < most), "nanoseconds")


def _check_largest(source: Path, file: Path, highest: int) -> None:
    """Refuse ids that say that there are more nodes than can be meant."""
    try:
        check_num_nodes(highest + 1, "")
    except ValueError:  # only now are all edges looked through for it
        row = int((np.load(file, mmap_mode="r") == highest).any(1).argmax()) + 1
        check_num_nodes(highest + 1, f"{source} names node {highest} in row {row}. It would be one of")


def query_of(table: Table, cells: Mapping[str, str], keys: Sequence[tuple[str, Ids]]) -> str:
    """The query of cells by name, and of ``n0``, ``n1``, ..., the nodes that keys name.

    That of an empty cell is -1, and that of a key that names none is ``UNKNOWN``.
    """
    inner, outer, joins = [f"{ROW} AS row", *(f"{sql} AS {name}" for name, sql in cells.items())], ["e.*"], ""
    for at, (column, ids) in enumerate(keys):
        inner.append(f"{quoted(column)} AS key{at}")
        found, join = ids.join(Cells(f"e.key{at}", table.types[column]), f"k{at}")
        outer.append(f"coalesce({found}, CASE WHEN e.key{at} IS NULL THEN -1 ELSE {UNKNOWN} END) AS n{at}")
        joins += join
    outer[0] += f" EXCLUDE ({', '.join(f'key{at}' for at in range(len(keys)))})" if keys else ""
    return f"SELECT {', '.join(outer)} FROM (SELECT {', '.join(inner)} FROM {table.name}) AS e{joins}"


OfPiece = Callable[[Mapping[str, Any]], dict[str, Column]]


def write_rows(work: Work, table: Table, query: str, folder: Path, of: OfPiece) -> None:
    """Write what ``of`` makes of each piece of a query as arrays, in the order of rows, in which a join may not be."""
    shutil.rmtree(folder, ignore_errors=True)
    arrays, last, in_order = GrowingArrays(folder, table.source), -1, True
    for piece in work.stream(query, table):
        rows = numpy_of(piece["row"])
        in_order &= bool((np.diff(rows, prepend=last) > 0).all())
        last = int(rows[-1])
        arrays.add({"row": rows} | of(piece))
    files = arrays.finish()
    for file in files[1:]:
        # Edges that are fewer than the rows are sorted later by all that they have, their ends and times.
        if not in_order and NpyFile.of(file).shape[0] == NpyFile.of(files[0]).shape[0]:
            _put_in_order(file, np.load(files[0], mmap_mode="r"), work.rows_at_once)
        if file.stem == EDGES:
            turn_two_edges(file)
        flush(file)
    for file in files[:1]:
        file.unlink()


def _put_in_order(file: Path, places: Column, rows_at_once: int) -> None:
    """Write the rows of a file to their places, some at a time."""
    found, draft = np.load(file, mmap_mode="r"), file.with_suffix(".draft")
    placed = np.lib.format.open_memmap(draft, "w+", found.dtype, found.shape)
    if hasattr(os, "posix_fallocate"):
        with draft.open("r+b") as written:
            os.posix_fallocate(written.fileno(), 0, draft.stat().st_size)  # a map of a full disk would end the process
    for first in range(0, len(places), rows_at_once):
        some = slice(first, first + rows_at_once)
        placed[places[some]] = found[some]
    placed.flush()
    os.replace(draft, file)
