"""Tables of nodes and edges as arrays: columns become labels, masks, times and features, and ids numbers of nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of, within
from lightning_gnn_dist.prepare.files.arrays import Carried, Choice, RowFiles, check_num_nodes, entries, id_of
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles, Told, Unpacked
from lightning_gnn_dist.prepare.tables.columns import Columns
from lightning_gnn_dist.prepare.tables.engine import (
    ROW,
    Cells,
    Ids,
    Table,
    Work,
    dtype_of,
    ids_of,
    no_ids,
    numpy_of,
    query_of,
    quoted,
    told,
    write_rows,
)
from lightning_gnn_dist.prepare.tables.reading import ENDS, ends_first, is_parquet, load

NUM_NODES = "num_nodes"


def unpack(
    inputs: Inputs, folder: Path, choice: Choice, memory_bytes: int, on_progress: Callable[[str, float], None]
) -> Unpacked:
    """Turn all tables into arrays in a folder; what a kill has left done stays."""
    nodes, edges, ids, lines = dict(inputs.nodes), dict(inputs.edges), {}, Told()
    with Work(folder, memory_bytes) as work:
        for kind, files in inputs.nodes.items():
            on_progress(f"reading {kind or 'nodes'}", 0.0)
            ids[kind] = Ids(files.source, files.num_nodes)
            if isinstance(files.table, Path):
                with told(files.table):
                    nodes[kind], ids[kind] = _unpack_nodes(work, kind, files, choice, inputs.time, lines)
        for edge_type, of_type in inputs.edges.items():
            ends = ids[edge_type[0]], ids[edge_type[2]]
            on_progress(f"reading {' '.join(edge_type).strip() or 'edges'}", 0.0)
            with within(edge_type):
                edges[edge_type] = _unpack_edges(work, edge_type, of_type, ends, (choice, inputs.time), lines)
        work.check()
    files_of_ids = {kind: _folder(folder, kind) / "ids.npy" for kind, each in ids.items() if each.table is not None}
    return Unpacked(replace(inputs, nodes=nodes, edges=edges), files_of_ids, lines)


def _folder(folder: Path, kind: str) -> Path:
    return folder / "nodes" / kind


def _unpack_nodes(
    work: Work, kind: str, files: NodeFiles, choice: Choice, time: str | None, lines: Told
) -> tuple[NodeFiles, Ids]:
    """The arrays, and the ids, of a table of nodes."""
    assert isinstance(files.table, Path)
    table, folder = load(work, f"nodes {kind}", files.table), _folder(work.folder, kind)
    id_column = id_of([*table.types])
    kept = [name for name in table.types if name not in choice.drop and name != id_column]
    ids = ids_of(work, f"ids {kind}", table, id_column)

    def write() -> dict[str, Any]:
        columns = Columns(work, table, kept, time, of_edges=False, kinds=choice.kinds)

        def rows_of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made = {f"arrays/{name}": array for name, array in columns.of(piece).items()}
            return {"ids": numpy_of(piece["id"]).astype(ids.dtype), **made}

        is_open = not work.problems
        while is_open:
            write_rows(work, query_of(table, {"id": ids.key, **columns.cells}), table, folder, rows_of)
            is_open = columns.must_be_read_again()
        if work.problems:
            return {}
        (folder / "arrays").mkdir(exist_ok=True)
        save(folder / "arrays" / f"{NUM_NODES}.npy", np.array(ids.count))
        for made in columns.made:
            if made.words is not None:
                save(folder / "classes.npy", np.array(made.words, np.str_))
        if columns.categories:
            (folder / "categories.json").write_text(json.dumps(columns.categories))
        return {"told": columns.told}

    if work.problems:
        Columns(work, table, kept, time, of_edges=False, kinds=choice.kinds).look()  # that is said, too
    else:
        told_of = work.stage(f"write nodes {kind}", write).get("told", ())
        lines += [(kind or "nodes", *each) for each in told_of]
    if work.problems:
        return replace(files, table=None, num_nodes=ids.count), ids
    arrays = NodeFiles.of(folder / "arrays", entries(folder / "arrays"))
    return replace(arrays.beside(files.arrays), source=files.source), ids


def _unpack_edges(
    work: Work,
    edge_type: EdgeType,
    files: EdgeFiles,
    ends: tuple[Ids, Ids],
    choice: tuple[Choice, str | None],
    lines: Told,
) -> EdgeFiles:
    """The edges of a type in arrays, file by file, and what they carry."""
    found, carried = [], dict[str, list[NpyFile]]()
    for at, file in enumerate(files.files):
        if not isinstance(file, Path):
            found.append(file)
            continue
        folder = work.folder / "edges" / folder_of(edge_type) / f"{at:05}"
        with told(file):
            name = f"edges {'__'.join(edge_type)} {at}"
            reader = _EdgeTable(work, load(work, name, file), edge_type, ends, *choice)
            told_of = work.stage(f"write {name}", partial(reader.write, folder)).get("told", ())
            lines += [(" ".join(edge_type).strip() or "edges", *each) for each in told_of]
            if told_of and len(files.files) > 1:
                work.problems.append(
                    f"{file}: column {told_of[0][0]!r} is no column of numbers, and files of one edge list are read "
                    "one by one: write them as one, or leave the column out (--drop)."
                )
        if work.problems:
            continue
        found.append(NpyFile.of(folder / "edge_index.npy"))
        for path in sorted((folder / "carried").glob("*.npy")):
            carried.setdefault(path.stem, []).append(NpyFile.of(path))
    rows = files.carried.arrays | {name: RowFiles.of_files(each) for name, each in carried.items()}
    num_edges = sum(
        file.shape[1] if file.shape[0] == 2 else file.shape[0] for file in found if isinstance(file, NpyFile)
    )
    return replace(files, files=tuple(found), num_edges=num_edges, columns=(), carried=Carried(rows))


@dataclass(frozen=True, eq=False)
class _EdgeTable:
    """A table of edges.

    Args:
        work: Reads it.
        table: The table.
        edge_type: The type of the edges.
        ids: The ids of senders, and of receivers.
        choice: What is said of columns.
        time: The column of times, if there is one.
    """

    work: Work
    table: Table
    edge_type: EdgeType
    ids: tuple[Ids, Ids]
    choice: Choice
    time: str | None

    @property
    def ends(self) -> list[str]:
        return ends_first(self.table.source)[:2]

    @cached_property
    def columns(self) -> Columns:
        """What the edges carry."""
        names = [name for name in ends_first(self.table.source)[2:] if name not in self.choice.drop]
        plain, kinds = not any(self.edge_type), self.choice.kinds
        columns = Columns(self.work, self.table, names, self.time, of_edges=True, plain=plain, kinds=kinds)
        convert.check_each_name(columns.arrays, allowed=())
        return columns

    def write(self, folder: Path) -> dict[str, Any]:
        """Write ends and what edges carry, in the order of the rows; return what columns become."""
        self._check_heading()
        columns, counts = self.columns, [ids.count for ids in self.ids]
        self._check_keys()
        keys, dtype = [*zip(self.ends, self.ids, strict=True)], dtype_of(*counts)
        lowest, highest, is_open = [0, 0], [-1, -1], not self.work.problems

        def edges_of(piece: Mapping[str, Any]) -> dict[str, Column]:
            both = np.empty((len(piece["n0"]), 2), dtype)
            for at in (0, 1):
                ends = piece[f"n{at}"].to_numpy(zero_copy_only=False)
                lowest[at], highest[at] = min(lowest[at], int(ends.min())), max(highest[at], int(ends.max()))
                both[:, at] = ends
            return {"edge_index": both} | {f"carried/{name}": array for name, array in columns.of(piece).items()}

        if not is_open:  # what else is wrong is said, too
            columns.look()
            lowest = [-1, -1]
        while is_open:
            write_rows(self.work, query_of(self.table, columns.cells, keys), self.table, folder, edges_of)
            is_open = columns.must_be_read_again()
        if highest[0] < lowest[0] and not self.work.problems:  # no row was seen
            self.work.problems.append(f"{self.table.source} has no rows: leave the table out, or fill it.")
        for at, of_end in enumerate(counts):
            if lowest[at] < 0 or (of_end is not None and highest[at] >= of_end):
                self._refuse(at)
        if self.work.problems:
            return {}
        if None in counts:
            self._check_largest(folder / "edge_index.npy", max(highest))
        _as_two_rows(folder / "edge_index.npy")
        return {"told": columns.told}

    def _check_keys(self) -> None:
        for end in self.ends:
            cells = Cells(quoted(end), self.table.types[end])
            if cells.is_real or cells.is_list:
                self.work.problems.append(no_ids(self.table.source, end, cells.type))

    def _refuse(self, at: int) -> None:
        """Say which nodes are named that are none, if it is known which there are."""
        if not self.ids[at].are_known:
            return
        work, path, end, ids, word = (
            self.work,
            self.table.source,
            self.ends[at],
            self.ids[at],
            ("sender", "receiver")[at],
        )
        cells = Cells(quoted(end), self.table.types[end])
        work.refuse_cells(
            self.table, end, f"{cells.name} IS NULL", "and an edge has two ends: fill it, or remove the row."
        )
        if ids.table is not None:
            known = f"SELECT CAST(k AS VARCHAR) FROM {ids.table.name} WHERE k IS NOT NULL"
            bad = f"{cells.name} IS NOT NULL AND {cells.word} NOT IN ({known})"
            what = f"names node {{}}, which {ids.source} does not list: add a row for it."
        elif cells.is_text and work.run(
            f"SELECT 1 FROM {self.table.name} WHERE {cells.name} IS NOT NULL AND {cells.whole} IS NULL LIMIT 1"
        ):
            bad = f"{cells.name} IS NOT NULL AND {cells.whole} IS NULL"
            what = (
                "names nodes by words, such as {!r}, and numbers 0, 1, 2, ... are needed: give these, or a table of "
                "nodes with their ids (--nodes)."
            )
        elif ids.count is None:
            bad = f"{cells.whole} < 0 OR ({cells.whole} IS NULL AND {cells.name} IS NOT NULL)"
            what = "names nodes by other things than 0, 1, 2, ... ({}): give the table of nodes (--nodes)."
        else:
            bad = f"{cells.whole} NOT BETWEEN 0 AND {ids.count - 1}"
            what = (
                f"names the {word} {{}}, but there are {ids.count} nodes of its type: ids count from 0, so they must "
                f"lie in [0, {ids.count})."
            )
        rows = f"FROM {self.table.name} WHERE {bad}"
        found = work.run(f"SELECT {cells.word}, min({ROW}) {rows} GROUP BY 1 ORDER BY 2 LIMIT 3")
        if found:
            count = work.run(f"SELECT count(*), count(DISTINCT {cells.word}) {rows}")[0]
            some = ", ".join(f"{each} in row {row + 1:,}" for each, row in found)
            more = f"{count[0]:,} edges name {count[1]:,} such nodes, first {some}." if count[0] > 1 else ""
            work.problems.append(f"{path} {what.format(found[0][0])} {more or f'It is in row {found[0][1] + 1:,}.'}")

    def _check_largest(self, file: Path, highest: int) -> None:
        """Refuse ids that say that there are more nodes than can be meant."""
        try:
            check_num_nodes(highest + 1, "")
        except ValueError:
            row = int((np.load(file, mmap_mode="r") == highest).any(1).argmax()) + 1
            check_num_nodes(highest + 1, f"{self.table.source} names node {highest} in row {row}. It would be one of")

    def _check_heading(self) -> None:
        """Refuse two columns that are called as nodes are: their names are an edge."""
        ids, names = self.ids[0], self.ends
        if (
            is_parquet(self.table.source)
            or ids.table is None
            or ids.are_whole
            or tuple(n.lower() for n in names) in ENDS
        ):
            return
        if len(self.work.run(f"SELECT DISTINCT k FROM {ids.table.name} WHERE k IN (?, ?)", *names)) == 2:
            self.work.problems.append(
                f"{self.table.source}: the first line names the nodes {names[0]!r} and {names[1]!r}, and would be "
                "taken as heading: write a heading above it, such as source,target."
            )


def _as_two_rows(file: Path) -> None:
    """Turn two edges into two rows of ends: they would be taken for them."""
    if NpyFile.of(file).shape[0] == 2:
        save(file, np.ascontiguousarray(np.load(file).T))
