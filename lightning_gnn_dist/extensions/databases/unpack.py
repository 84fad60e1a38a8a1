"""A database as arrays: rows become nodes, foreign keys edges in both directions, and questions nodes with answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.databases.encodings import Encoding, Scan
from lightning_gnn_dist.extensions.databases.keyed import Keyed, span_of
from lightning_gnn_dist.extensions.databases.manifest import PLAIN, RELBENCH, Manifest, TableSpec
from lightning_gnn_dist.extensions.databases.questions import Questions
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.graph.typed.tables import ANSWER, ASKED, NEVER, TIME, Feature, Tables, TableTask, as_told
from lightning_gnn_dist.prepare.files.arrays import Carried, Choice, RowFiles, check_drop, entries
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles, Unpacked
from lightning_gnn_dist.prepare.tables.engine import (
    UNKNOWN,
    WHOLE,
    Cells,
    Ids,
    Work,
    dtype_of,
    ids_of,
    numpy_of,
    query_of,
    told,
    write_ends,
    write_rows,
)
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows
from lightning_gnn_dist.prepare.tables.text import embedding

UNITS = (
    (10**8, "small numbers, such as days"),
    (10**11, "seconds"),
    (10**14, "milliseconds"),
    (10**17, "microseconds"),
)


def unpack_database(
    manifest: Manifest,
    inputs: Inputs,
    folder: Path,
    choice: Choice,
    memory_bytes: int,
    on_progress: Callable[[str, float], None],
) -> Unpacked:
    """Turn all tables into arrays in a folder; what a kill has left done stays."""
    with Work(folder, memory_bytes) as work:
        unpacking = Unpacking(manifest, work, frozenset(choice.drop), on_progress)
        facts = unpacking.facts()
    made = replace(inputs, nodes=unpacking.nodes(inputs), edges=unpacking.edges)
    tables = _tables_of(manifest, facts, unpacking.cut, made.edges)
    return Unpacked(made, {kind: folder / "nodes" / kind / "ids.npy" for kind in inputs.nodes}, [], tables)


@dataclass(frozen=True)
class Unpacking:
    """The work of turning a database into arrays.

    Args:
        manifest: What is known of the tables.
        work: Reads them.
        drop: Columns to leave out.
        on_progress: Called with the name of a stage and the share of it that is done.
        edges: The edges of each type, as they are found.
    """

    manifest: Manifest
    work: Work
    drop: frozenset[str]
    on_progress: Callable[[str, float], None]
    edges: dict[EdgeType, EdgeFiles] = field(default_factory=dict)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Do all of it; return what is to be known of each type of nodes."""
        facts, specs = {}, self.manifest.tables.values()
        for spec in specs:
            self.on_progress(f"looking at {spec.name}", 0.0)
            assert self.tables[spec.name] is not None
        self.work.check()
        assert self.ids is not None
        self.work.check()
        for spec in specs:
            with told(spec.path):
                found = self._stage(spec.name, partial(self._write_links if spec.is_links else self._write, spec))
            self._take_in(spec)
            if not spec.is_links:
                facts[spec.name] = found
        self.work.check()
        for task in self.manifest.tasks.values():
            folder = self.folder(task.name)
            questions = Questions(task, self.manifest, self.work, folder, self.ids)
            facts[task.name] = self._stage(task.name, questions.write)
            self.add_edges((task.entity_table, ASKED, task.name), folder / "asked")
            if task.receiver is not None:
                self.add_edges((task.name, ANSWER, task.receiver), folder / "answers")
        self.work.check()
        return facts

    def _take_in(self, spec: TableSpec) -> None:
        """The edges of a table, in both directions."""
        if spec.is_links:
            first, second = spec.fkeys.values()
            self.add_edges((first, spec.name, second), self.folder(spec.name))
            self.add_edges((second, f"rev_{spec.name}", first), self.folder(spec.name), flip=True)
            return
        for name, target in spec.fkeys.items():
            folder = self.folder(spec.name) / "edges" / name
            self.add_edges((spec.name, name, target), folder)
            self.add_edges((target, f"rev_{name}", spec.name), folder, flip=True)

    def nodes(self, inputs: Inputs) -> dict[str, NodeFiles]:
        """The arrays of the nodes of each type."""
        found = {}
        for kind, files in inputs.nodes.items():
            arrays = self.folder(kind) / "arrays"
            made = NodeFiles.of(arrays, entries(arrays))
            found[kind] = replace(made, source=files.source, float_labels=files.float_labels)
        return found

    def folder(self, kind: str) -> Path:
        """What becomes of the nodes of a type."""
        return self.work.folder / "nodes" / kind

    def _stage(self, kind: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self.on_progress(f"reading {kind}", 0.0)
        found: dict[str, Any] = self.work.stage(f"write {kind}", do)
        self.on_progress(f"reading {kind}", 1.0)
        return found

    @cached_property
    def tables(self) -> dict[str, Keyed]:
        """The tables."""
        found = {}
        for name, spec in self.manifest.tables.items():
            keys = [*([spec.pkey] if spec.pkey else []), *spec.fkeys]
            found[name] = Keyed.load(self.work, f"table {name}", spec.path, keys, spec.time_col)
        return found

    @cached_property
    def ids(self) -> dict[str, Ids]:
        """The ids of the rows of tables; those without a key are numbered."""
        found = {}
        for name, spec in self.manifest.tables.items():
            keyed = self.tables[name]
            with told(spec.path):
                if spec.pkey is not None:
                    found[name] = ids_of(self.work, f"ids {name}", keyed.table, spec.pkey)
                else:
                    found[name] = Ids(spec.path, keyed.num_rows)
        return found

    @cached_property
    def cut(self) -> int | None:
        """The time from which on rows are in no statistics: as told, or that of the first question to validate."""
        if self.manifest.val_time is not None:
            return self.manifest.val_time
        first = list[int]()
        for task in self.manifest.tasks.values():
            if task.time_col and "val" in task.files:
                keyed = Keyed.load(self.work, f"cut {task.name}", task.files["val"], [], task.time_col)
                self.work.check()
                first += self.work.run(f"SELECT min({keyed.time}) FROM {keyed.table.name}")[0]
        return min(first, default=None)

    def _write(self, spec: TableSpec) -> dict[str, Any]:
        """Write the arrays, the ids and the keys of a table; return what is to be known of them."""
        keyed, folder = self.tables[spec.name], self.folder(spec.name)
        encodings, left_out = self._scan(spec)
        places, features = _places(encodings, self.manifest.hidden(spec.name))
        if self.work.problems:
            return {}
        ids = self.ids[spec.name]
        cells = {f"v{at}": each.sql for at, each in enumerate(encodings)}
        cells |= ({} if keyed.time is None else {"t": keyed.time}) | ({"id": ids.key} if ids.table else {})

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made = _encoded(encodings, places, piece)
            made |= {f"keys/{name}": numpy_of(piece[f"n{at}"]) for at, name in enumerate(spec.fkeys)}
            if keyed.time is not None:
                made[f"arrays/{TIME}"] = numpy_of(piece["t"])
            return made if ids.table is None else made | {"ids": numpy_of(piece["id"]).astype(ids.dtype)}

        write_rows(self.work, self._query(spec, cells), keyed.table, folder, of)
        (folder / "arrays").mkdir(parents=True, exist_ok=True)
        save(folder / "arrays" / "num_nodes.npy", np.array(keyed.num_rows))
        if ids.table is None:
            save(folder / "ids.npy", np.arange(keyed.num_rows))
        notes, times = [f"{spec.name}.{name} {why}: it is left out." for name, why in left_out.items()], None
        if keyed.time is not None:
            of_rows = np.load(folder / "arrays" / f"{TIME}.npy", mmap_mode="r")
            times = span_of(of_rows, keyed.are_dates)
            if num_missing := int((of_rows == NEVER).sum()):
                notes.append(f"{num_missing:,} rows of {spec.name} have no time, and no question sees them.")
        for name, target in spec.fkeys.items():
            found = np.load(folder / "keys" / f"{name}.npy", mmap_mode="r")
            self._refuse_unknown(spec, [name] if UNKNOWN in found else [])
            rows = np.flatnonzero(found >= 0)
            write_ends(folder / "edges" / name, rows, found[rows], dtype_of(keyed.num_rows, self.ids[target].count))
        of_features = [asdict(feature) for feature in features]
        return {"features": of_features, "notes": notes, "times": times}

    def _scan(self, spec: TableSpec) -> tuple[list[Encoding], dict[str, str]]:
        """How the columns of a table are encoded, and why others are left out."""
        keyed, table, kept = self.tables[spec.name], self.tables[spec.name].table, {spec.pkey, *spec.fkeys}
        names = [name for name in table.types if name not in kept | self.drop or name == spec.time_col]
        told = {name: spec.columns.get(name) for name in names if spec.columns.get(name) != "ignore"}
        if spec.time_col is not None and not keyed.are_dates:
            told.pop(spec.time_col)
        lists = {name: Cells(name, table.types[name]) for name in told}
        left_out = {
            name: "holds lists, or the like"
            for name, each in sorted(lists.items())
            if not (each.is_text or each.is_date or each.is_real or each.type in WHOLE)
        }
        asked = {name: kind for name, kind in told.items() if name not in left_out}
        seen = "true" if keyed.time is None else f"{keyed.time} < {NEVER if self.cut is None else self.cut}"
        encodings, others = Scan(self.work, table, asked, seen, spec.time_col, embedding(self.manifest.text))()
        return encodings, left_out | others

    def _query(self, spec: TableSpec, cells: Mapping[str, str]) -> str:
        """The query of some cells by name, and of the rows that foreign keys name: ``n0``, ``n1``, ..."""
        keys = [(name, self.ids[target]) for name, target in spec.fkeys.items()]
        return query_of(self.tables[spec.name].table, cells, keys, digits=True)

    def _refuse_unknown(self, spec: TableSpec, columns: Collection[str]) -> None:
        """Note the keys that name no row. RelBench leaves them out."""
        for name in spec.fkeys:
            if name in columns and not self.manifest.may_dangle:
                target = self.manifest.tables[spec.fkeys[name]]
                self.tables[spec.name].refuse_unknown(
                    self.work, name, self.ids[target.name], target.name, target.pkey or ""
                )

    def _write_links(self, spec: TableSpec) -> dict[str, Any]:
        """Write the edges that the rows of a table are, with their times."""
        keyed, folder = self.tables[spec.name], self.folder(spec.name)
        cells = {} if keyed.time is None else {TIME: keyed.time}
        write_rows(self.work, self._query(spec, cells), keyed.table, folder / "rows", _as_they_are)
        rows = {file.stem: np.load(file, mmap_mode="r") for file in (folder / "rows").glob("*.npy")}
        first, second = rows.pop("n0"), rows.pop("n1")
        self._refuse_unknown(spec, [n for n, ends in zip(spec.fkeys, (first, second), strict=True) if UNKNOWN in ends])
        known = np.flatnonzero((first >= 0) & (second >= 0))
        dtype = dtype_of(*(self.ids[target].count for target in spec.fkeys.values()))
        write_ends(folder, first[known], second[known], dtype, {name: times[known] for name, times in rows.items()})
        return {}

    def add_edges(self, edge_type: EdgeType, folder: Path, *, flip: bool = False) -> None:
        """Take in the edges in a folder, and what they carry."""
        if not self.work.problems:
            ends = NpyFile.of(folder / "edge_index.npy")
            carried = {file.stem: RowFiles.of(file) for file in sorted((folder / "carried").glob("*.npy"))}
            files = EdgeFiles(files=(ends,), num_edges=ends.shape[1], carried=Carried(carried), flip=flip)
            self.edges[edge_type] = files


def _as_they_are(piece: Mapping[str, Any]) -> dict[str, Column]:
    return {name: numpy_of(column) for name, column in piece.items() if name != "row"}


def _places(
    encodings: Collection[Encoding], hidden: Collection[str]
) -> tuple[dict[tuple[str, str], str], list[Feature]]:
    """The array of each column and kind of numbers, and where it begins there."""
    widths: dict[str, int] = {}
    places, features = {}, []
    for each in encodings:
        for kind, width in each.widths.items():
            array = places[each.name, kind] = f"{each.name}_{kind}" if each.name in hidden else kind
            if width:
                features.append(Feature(each.name, array, widths.get(array, 0), width, each.size))
                widths[array] = widths.get(array, 0) + width
    return places, features


def _encoded(
    encodings: Collection[Encoding], places: Mapping[tuple[str, str], str], piece: Mapping[str, Any]
) -> dict[str, Column]:
    """The arrays of some rows."""
    made: dict[str, list[Column]] = {}
    for at, each in enumerate(encodings):
        for kind, numbers in each(piece[f"v{at}"]).items():
            made.setdefault(f"arrays/{places[each.name, kind]}", []).append(numbers)
    return {array: np.concatenate(columns, axis=1) for array, columns in made.items()}


def _tables_of(
    manifest: Manifest, facts: Mapping[str, Mapping[str, Any]], cut: int | None, edge_types: Collection[EdgeType]
) -> Tables:
    """What became of the tables, by what writing each of them has told."""
    features = {
        name: tuple(Feature(**each) for each in told["features"]) for name, told in facts.items() if "features" in told
    }
    tasks = {name: TableTask(**told["task"]) for name, told in facts.items() if "task" in told}
    notes = manifest.notes + tuple(note for told in facts.values() for note in told["notes"])
    timed = tuple(name for name in features if facts[name]["times"] is not None)
    seen = tuple(kind for kind in edge_types if kind not in {task.answers for task in tasks.values()})
    return Tables(features, tasks, seen, _span_of(manifest, facts, cut), timed, notes)


def _span_of(manifest: Manifest, facts: Mapping[str, Mapping[str, Any]], cut: int | None) -> float:
    """The time from the earliest row to the cut, or to the latest row. Times of several units are refused."""
    found = {name: told["times"] for name, told in facts.items() if told.get("times")}
    if not found:
        return 1.0
    units = {name: "seconds" if is_dates else _unit(last) for name, (_, last, is_dates) in found.items()}
    told = {name: f"{name} ({as_told(first, d)} to {as_told(last, d)})" for name, (first, last, d) in found.items()}
    (one, unit), *others = units.items()
    for other, another in others:
        if another != unit:
            raise ValueError(
                f"{manifest.path}: times of {told[one]} are {unit}, and those of {told[other]} {another}: give all in "
                "one unit, or as dates."
            )
    earliest, latest = min(span[0] for span in found.values()), max(span[1] for span in found.values())
    if cut is not None and not earliest < cut <= latest:
        are_dates = any(span[2] for span in found.values())
        at, first, last = (as_told(time, are_dates) for time in (cut, earliest, latest))
        raise ValueError(
            f"{manifest.path}: val_timestamp ({at}) is not among the times of rows and questions, {first} to {last}: "
            "rows before it are trained on, and later ones judge."
        )
    return float(max((latest if cut is None else cut) - earliest, 1))


def _unit(time: int) -> str:
    return next((name for most, name in UNITS if abs(time) < most), "nanoseconds")


LAYOUTS = {RELBENCH: f"RelBench's layout ({RELBENCH}, db, tasks)", PLAIN: f"the tables that {PLAIN} describes"}


def inputs_of_database(folder: Path, drop: frozenset[str]) -> Inputs:
    """The files of a database. Columns that ``drop`` names are left out, wherever they are."""
    manifest = Manifest.of(folder)
    named = {name for table in manifest.tables.values() for name in columns_of(table.path)}
    kept = {name for table in manifest.tables.values() for name in (table.pkey, table.time_col, *table.fkeys)}
    check_drop(drop, named, folder)
    if wrong := sorted(drop & kept):
        raise ValueError(
            f"{folder}: {shown(wrong)} hold keys or times, which a graph is made of: they cannot be dropped."
        )
    nodes, edges = dict[str, NodeFiles](), dict[EdgeType, EdgeFiles]()
    for table in manifest.tables.values():
        files = EdgeFiles(files=(table.path,), num_edges=count_rows(table.path))
        if table.is_links:
            first, second = table.fkeys.values()
            edges[first, table.name, second] = edges[second, f"rev_{table.name}", first] = files
            continue
        nodes[table.name] = NodeFiles(table.path, table.path, {}, None)
        for column, target in table.fkeys.items():
            edges[table.name, column, target] = edges[target, f"rev_{column}", table.name] = files
    for task in manifest.tasks.values():
        path = next(iter(task.files.values()))
        files = EdgeFiles(files=(path,), num_edges=sum(map(count_rows, task.files.values())))
        nodes[task.name] = NodeFiles(path, path, {}, None, task.task_type == "regression")
        edges[task.entity_table, ASKED, task.name] = files
        if task.receiver is not None:
            edges[task.name, ANSWER, task.receiver] = files
    if not edges:
        raise ValueError(
            f"{manifest.path} names no foreign keys and there is no task, so no row has to do with another."
        )
    check_names(tuple(nodes), tuple(edges))
    return Inputs(
        nodes,
        edges,
        LAYOUTS[manifest.path.name],
        TIME if manifest.has_times else None,
        partial(unpack_database, manifest),
        manifest.lines,
    )
