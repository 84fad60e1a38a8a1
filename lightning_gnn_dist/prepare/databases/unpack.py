"""A database as arrays: rows become nodes, foreign keys edges in both directions, and questions nodes with answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, save
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.graph.typed.tables import ANSWER, ASKED, NEVER, TIME, Feature, Tables, TableTask, as_told
from lightning_gnn_dist.prepare.databases.columns import Encoding, Scan
from lightning_gnn_dist.prepare.databases.keyed import Keyed, Span
from lightning_gnn_dist.prepare.databases.manifest import PLAIN, RELBENCH, Manifest, TableSpec
from lightning_gnn_dist.prepare.databases.questions import Questions
from lightning_gnn_dist.prepare.files.arrays import Carried, RowFiles, entries
from lightning_gnn_dist.prepare.files.columns import check_drop
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles
from lightning_gnn_dist.prepare.tables.engine import ROW, WHOLE, Cells, Work, numpy_of, quoted, told
from lightning_gnn_dist.prepare.tables.ids import Ids, dtype_of, ids_of, write_ends, write_rows
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows
from lightning_gnn_dist.prepare.tables.text import embedding

UNKNOWN = -2  # the row that a key names that names none; -1 if there is no key
UNITS = (
    (10**8, "small numbers, such as days"),
    (10**11, "seconds"),
    (10**14, "milliseconds"),
    (10**17, "microseconds"),
)


def unpack_database(
    inputs: Inputs, folder: Path, drop: Collection[str], memory_bytes: int, on_progress: Callable[[str, float], None]
) -> tuple[Inputs, dict[str, Path], Tables]:
    """Turn all tables into arrays in a folder; what a kill has left done stays.

    Returns:
        The files without tables, the files of the ids of nodes, by their types, and what became of the tables.
    """
    assert inputs.database is not None
    with Work(folder, memory_bytes) as work:
        unpacking = Unpacking(inputs.database, work, frozenset(drop), on_progress)
        facts = unpacking.facts()
    made = replace(inputs, nodes=unpacking.nodes(inputs), edges=unpacking.edges)
    tables = _tables_of(inputs.database, facts, unpacking.cut, made.edges)
    return made, {kind: folder / "nodes" / kind / "ids.npy" for kind in inputs.nodes}, tables


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
        span, unknown = Span(), set[str]()

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made = _encoded(encodings, places, piece)
            made |= {f"keys/{name}": numpy_of(piece[f"n{at}"]) for at, name in enumerate(spec.fkeys)}
            unknown.update(name for name in spec.fkeys if (made[f"keys/{name}"] == UNKNOWN).any())
            if keyed.time is not None:
                made[f"arrays/{TIME}"] = span.add(numpy_of(piece["t"]))
            return made if ids.table is None else made | {"ids": numpy_of(piece["id"]).astype(ids.dtype)}

        write_rows(self.work, self._query(spec, cells), keyed.table, folder, of)
        (folder / "arrays").mkdir(parents=True, exist_ok=True)
        save(folder / "arrays" / "num_nodes.npy", np.array(keyed.num_rows))
        if ids.table is None:
            save(folder / "ids.npy", np.arange(keyed.num_rows))
        self._refuse_unknown(spec, unknown)
        notes = [f"{spec.name}.{name} {why}: it is left out." for name, why in left_out.items()]
        if span.num_missing:
            notes.append(f"{span.num_missing:,} rows of {spec.name} have no time, and no question sees them.")
        for name, target in spec.fkeys.items():
            found = np.load(folder / "keys" / f"{name}.npy", mmap_mode="r")
            rows = np.flatnonzero(found >= 0)
            write_ends(folder / "edges" / name, rows, found[rows], dtype_of(keyed.num_rows, self.ids[target].count))
        of_features = [asdict(feature) for feature in features]
        return {"features": of_features, "notes": notes, "times": span.fact(keyed.are_dates)}

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

    def _query(self, spec: TableSpec, cells: Mapping[str, str], where: str = "") -> str:
        """The query of some cells by name, and of the rows that foreign keys name: ``n0``, ``n1``, ..."""
        table, joins = self.tables[spec.name].table, ""
        inner = [f"{ROW} AS row", *(f"{sql} AS {name}" for name, sql in cells.items())]
        outer = ["e.row", *(f"e.{name}" for name in cells)]
        for at, (name, target) in enumerate(spec.fkeys.items()):
            inner.append(f"{quoted(name)} AS f{at}")
            found, join = self.ids[target].join(Cells(f"e.f{at}", table.types[name]), f"k{at}", digits=True)
            outer.append(f"coalesce({found}, CASE WHEN e.f{at} IS NULL THEN -1 ELSE {UNKNOWN} END) AS n{at}")
            joins += join
        return f"SELECT {', '.join(outer)} FROM (SELECT {', '.join(inner)} FROM {table.name}) AS e{joins} {where}"

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
        keyed, unknown = self.tables[spec.name], set[str]()
        dtype = dtype_of(*(self.ids[target].count for target in spec.fkeys.values()))

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            ends = np.stack([numpy_of(piece[f"n{at}"]) for at in (0, 1)], 1)
            unknown.update(name for at, name in enumerate(spec.fkeys) if (ends[:, at] == UNKNOWN).any())
            times = {} if keyed.time is None else {f"carried/{TIME}": numpy_of(piece["t"])}
            return {"edge_index": ends.astype(dtype), **times}

        where = "WHERE e.f0 IS NOT NULL AND e.f1 IS NOT NULL"
        if self.manifest.may_dangle:
            where += " AND k0.n IS NOT NULL AND k1.n IS NOT NULL"
        query = self._query(spec, {} if keyed.time is None else {"t": keyed.time}, where)
        folder = self.folder(spec.name)
        write_rows(self.work, query, keyed.table, folder, of)
        self._refuse_unknown(spec, unknown)
        if (file := folder / "edge_index.npy").exists():
            save(file, np.ascontiguousarray(np.load(file).T))
        else:
            write_ends(folder, np.empty(0), np.empty(0), dtype)
        return {}

    def add_edges(self, edge_type: EdgeType, folder: Path, *, flip: bool = False) -> None:
        """Take in the edges in a folder, and what they carry."""
        if not self.work.problems:
            ends = NpyFile.of(folder / "edge_index.npy")
            carried = {file.stem: RowFiles.of(file) for file in sorted((folder / "carried").glob("*.npy"))}
            files = EdgeFiles(files=(ends,), num_edges=ends.shape[1], carried=Carried(carried), flip=flip)
            self.edges[edge_type] = files


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
    notes = tuple(note for told in facts.values() for note in told["notes"])
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
    return Inputs(nodes, edges, LAYOUTS[manifest.path.name], TIME if manifest.has_times else None, manifest)
