"""Tables of nodes and edges as arrays: columns become labels, masks, times and features, and ids numbers of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of, within
from lightning_gnn_dist.prepare.files.arrays import Carried, Choice, RowFiles, check_num_nodes, entries, id_of
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles, Told, Unpacked, count_edges
from lightning_gnn_dist.prepare.tables.columns import Columns, cells_of
from lightning_gnn_dist.prepare.tables.engine import ROW, Table, Work, numpy_of, told
from lightning_gnn_dist.prepare.tables.reading import ENDS, ends_first, is_parquet, load
from lightning_gnn_dist.prepare.tables.rows import EDGES, NO_ROWS, Ends, Ids, can_be_keys, edges_in, ids_of, write_rows


def unpack(
    inputs: Inputs, folder: Path, choice: Choice, memory_bytes: int, on_progress: Callable[[str, float], None]
) -> Unpacked:
    """Turn all tables into arrays in a folder; what a kill has left done stays."""
    nodes, edges = dict(inputs.nodes), dict(inputs.edges)
    with Work(folder, memory_bytes) as work:
        unpacking = Unpacking(work, choice, inputs.time)
        for kind, files in inputs.nodes.items():
            on_progress(f"reading {kind or 'nodes'}", 0.0)
            nodes[kind] = unpacking.nodes(kind, files)
        for edge_type, of_type in inputs.edges.items():
            on_progress(f"reading {' '.join(edge_type).strip() or 'edges'}", 0.0)
            with within(edge_type):
                edges[edge_type] = unpacking.edges(edge_type, of_type)
        work.check()
    ids = {kind: folder / "nodes" / kind / "ids.npy" for kind, each in unpacking.ids.items() if each.table is not None}
    return Unpacked(replace(inputs, nodes=nodes, edges=edges), ids, unpacking.told)


@dataclass(frozen=True)
class Unpacking:
    """The work of turning tables into arrays.

    Args:
        work: Reads them.
        choice: What is said of columns.
        time: The column of times, if there is one.
        ids: The ids of each type, as they are found.
        told: What columns become, as it is found.
    """

    work: Work
    choice: Choice
    time: str | None
    ids: dict[str, Ids] = field(default_factory=dict)
    told: Told = field(default_factory=list)

    def nodes(self, kind: str, files: NodeFiles) -> NodeFiles:
        """The arrays of the nodes of a type, whose ids are kept."""
        self.ids[kind] = Ids(files.source, files.num_nodes)
        if files.table is None:
            return files
        folder = self.work.folder / "nodes" / kind
        with told(files.table):
            table = load(self.work, f"nodes {kind}", files.table)
            ids = self.ids[kind] = ids_of(self.work, f"ids {kind}", table, id_of([*table.types]))
            self._stage(f"nodes {kind}", kind or "nodes", partial(self._write_nodes, table, ids, folder))
        if self.work.problems:
            return replace(files, table=None, num_nodes=ids.count)
        arrays = NodeFiles.of(folder / "arrays", entries(folder / "arrays"))
        return replace(arrays.beside(files.arrays), source=files.source)

    def _write_nodes(self, table: Table, ids: Ids, folder: Path) -> Columns:
        kept = [name for name in table.types if name not in self.choice.drop and name != id_of([*table.types])]
        columns = Columns(self.work, table, kept, self.time, of_edges=False, kinds=self.choice.kinds)

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made = {f"arrays/{name}": array for name, array in columns.of(piece).items()}
            return {"ids": numpy_of(piece["id"]).astype(ids.dtype), **made}

        for _ in columns.readings():
            write_rows(self.work, table, {"id": ids.key, **cells_of(columns.all)}, (), folder, of)
        if not self.work.problems:
            (folder / "arrays").mkdir(exist_ok=True)
            save(folder / "arrays" / "num_nodes.npy", np.array(ids.count))
            for made in columns.made:
                if made.words is not None:
                    save(folder / "classes.npy", np.array(made.words, np.str_))
            if columns.categories:
                (folder / "categories.json").write_text(json.dumps(columns.categories))
        return columns

    def edges(self, edge_type: EdgeType, files: EdgeFiles) -> EdgeFiles:
        """The edges of a type in arrays, file by file, and what they carry."""
        parts = []
        for at, file in enumerate(files.files):
            if not isinstance(file, Path):
                parts.append(replace(files, files=(file,), num_edges=count_edges(file), carried=Carried({})))
                continue
            name, folder = f"edges {'__'.join(edge_type)} {at}", self.work.folder / "edges" / folder_of(edge_type)
            with told(file):
                write = partial(self._write_edges, load(self.work, name, file), edge_type, folder / f"{at:05}")
                lines = self._stage(name, " ".join(edge_type).strip() or "edges", write)
            if lines and len(files.files) > 1:
                self.work.problems.append(
                    f"{file}: column {lines[0][0]!r} is no column of numbers, and files of one edge list are read "
                    "one by one: write them as one, or leave the column out (--drop)."
                )
            if not self.work.problems:
                parts.append(edges_in(folder / f"{at:05}"))
        names = parts[-1].carried.arrays if parts else {}
        rows = {name: RowFiles.of_files([part.carried.arrays[name].files[0] for part in parts]) for name in names}
        return replace(
            files,
            files=tuple(file for part in parts for file in part.files),
            num_edges=sum(part.num_edges for part in parts),
            columns=(),
            carried=Carried(files.carried.arrays | rows),
        )

    def _write_edges(self, table: Table, edge_type: EdgeType, folder: Path) -> Columns:
        """Write ends and what edges carry, in the order of the rows."""
        work, names, ids = self.work, ends_first(table.source), (self.ids[edge_type[0]], self.ids[edge_type[2]])
        ends, kept = names[:2], [name for name in names[2:] if name not in self.choice.drop]
        _check_heading(work, table, ends, ids[0])
        columns = Columns(
            work, table, kept, self.time, of_edges=True, plain=not any(edge_type), kinds=self.choice.kinds
        )
        convert.check_each_name(columns.arrays, allowed=())
        for end in ends:
            can_be_keys(work, table, end)
        found = Ends(ids)
        if work.problems:
            found.lowest = [-1, -1]  # what is wrong with ends is said, too

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            senders, receivers = (piece[name].to_numpy(zero_copy_only=False) for name in ("n0", "n1"))
            return found.of(senders, receivers, columns.of(piece))

        for _ in columns.readings():
            write_rows(work, table, cells_of(columns.all), [*zip(ends, ids, strict=True)], folder, of)
        if found.highest[0] < found.lowest[0] and not work.problems:  # no row was seen
            work.problems.append(NO_ROWS.format(table.source))
        for at, of_end in enumerate(ids):
            if found.lowest[at] < 0 or (of_end.count is not None and found.highest[at] >= of_end.count):
                _refuse(work, table, ends[at], of_end, ("sender", "receiver")[at])
        if None in (ids[0].count, ids[1].count) and not work.problems:
            _check_largest(table.source, folder / f"{EDGES}.npy", max(found.highest))
        return columns

    def _stage(self, name: str, what: str, write: Callable[[], Columns]) -> list[tuple[str, str]]:
        """Write what becomes of a table, unless it is written; return what columns become."""
        lines: list[tuple[str, str]] = self.work.stage(f"write {name}", lambda: write().told)
        self.told.extend((what, *each) for each in lines)
        return lines


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


def _check_heading(work: Work, table: Table, names: list[str], ids: Ids) -> None:
    """Refuse two columns that are called as nodes are: their names are an edge."""
    is_heading = is_parquet(table.source) or tuple(name.lower() for name in names) in ENDS
    if is_heading or ids.table is None or ids.are_whole:
        return
    if len(work.run(f"SELECT DISTINCT k FROM {ids.table.name} WHERE k IN (?, ?)", *names)) == 2:
        work.problems.append(
            f"{table.source}: the first line names the nodes {names[0]!r} and {names[1]!r}, and would be taken as "
            "heading: write a heading above it, such as source,target."
        )
