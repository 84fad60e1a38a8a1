"""A database as arrays: rows become nodes, foreign keys edges in both directions, and questions nodes with answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.databases.encodings import Encoding, encodings_of
from lightning_gnn_dist.extensions.databases.keyed import Keyed, span_of
from lightning_gnn_dist.extensions.databases.manifest import PLAIN, RELBENCH, Manifest, TableSpec
from lightning_gnn_dist.extensions.databases.questions import Questions
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.graph.typed.tables import NEVER, TIME, Feature, Tables, TableTask, as_told
from lightning_gnn_dist.prepare.files.arrays import Choice, check_drop, entries
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs, NodeFiles, Unpacked
from lightning_gnn_dist.prepare.tables.columns import arrays_of, cells_of
from lightning_gnn_dist.prepare.tables.engine import ROW, WHOLE, Work, numpy_of, told
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows
from lightning_gnn_dist.prepare.tables.rows import UNKNOWN, Ends, Ids, edges_in, ids_of, write_rows
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
    nodes = {}
    for kind, files in inputs.nodes.items():
        arrays = NodeFiles.of(place := folder / "nodes" / kind / "arrays", entries(place))
        nodes[kind] = replace(arrays, source=files.source, float_labels=files.float_labels)
    made = replace(inputs, nodes=nodes, edges=unpacking.edges())
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
    """

    manifest: Manifest
    work: Work
    drop: frozenset[str]
    on_progress: Callable[[str, float], None]

    def facts(self) -> dict[str, dict[str, Any]]:
        """Do all of it; return what is to be known of each type of nodes."""
        facts, specs = dict[str, dict[str, Any]](), self.manifest.tables.values()
        for spec in specs:
            self.on_progress(f"looking at {spec.name}", 0.0)
            assert self.tables[spec.name] is not None
        self.work.check()
        assert self.ids is not None
        self.work.check()
        for spec in specs:
            with told(spec.path):
                found = self._stage(spec.name, partial(self._write_links if spec.is_links else self._write, spec))
            facts |= {} if spec.is_links else {spec.name: found}
        self.work.check()
        for task in self.manifest.tasks.values():
            questions = Questions(task, self.manifest, self.work, self.folder(task.name), self.ids)
            facts[task.name] = self._stage(task.name, questions.write)
        self.work.check()
        return facts

    def edges(self) -> dict[EdgeType, EdgeFiles]:
        """The edges of each type: those of keys in both directions."""
        found = {}
        for spec in self.manifest.tables.values():
            for source, name, target in spec.edge_types:
                folder = self.folder(spec.name) / "edges" / name
                found[source, name, target] = edges_in(folder)
                found[target, f"rev_{name}", source] = edges_in(folder, flip=True)
        of_tasks = ((self.folder(task.name), each) for task in self.manifest.tasks.values() for each in task.edge_types)
        return found | {each: edges_in(folder / "edges" / each[1]) for folder, each in of_tasks}

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
            found[name] = Ids(spec.path, self.tables[name].num_rows, key=ROW)
            if spec.pkey is not None:
                with told(spec.path):
                    found[name] = ids_of(self.work, f"ids {name}", self.tables[name].table, spec.pkey)
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
        keyed, folder, ids = self.tables[spec.name], self.folder(spec.name), self.ids[spec.name]
        encodings, left_out = self._encodings(spec)
        if self.work.problems:
            return {}
        keys = {name: Ends((ids, self.ids[target])) for name, target in spec.fkeys.items()}

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            made = {f"arrays/{array}": rows for array, rows in arrays_of(encodings, piece).items()}
            for at, (name, ends) in enumerate(keys.items()):
                edges = ends.of(numpy_of(piece["row"]), numpy_of(piece[f"n{at}"]), {})
                made |= {f"edges/{name}/{array}": rows for array, rows in edges.items()}
            if keyed.time is not None:
                made[f"arrays/{TIME}"] = numpy_of(piece["t"])
            return made | {"ids": numpy_of(piece["id"]).astype(ids.dtype)}

        self._write_rows(spec, cells_of(encodings) | {"id": ids.key}, of)
        (folder / "arrays").mkdir(parents=True, exist_ok=True)
        save(folder / "arrays" / "num_nodes.npy", np.array(keyed.num_rows))
        notes, times = [f"{spec.name}.{name} {why}: it is left out." for name, why in left_out.items()], None
        if keyed.time is not None:
            of_rows = np.load(folder / "arrays" / f"{TIME}.npy", mmap_mode="r")
            times = span_of(of_rows, keyed.are_dates)
            if num_missing := int((of_rows == NEVER).sum()):
                notes.append(f"{num_missing:,} rows of {spec.name} have no time, and no question sees them.")
        self._refuse_unknown(spec, [name for name, ends in keys.items() if ends.lowest[1] == UNKNOWN])
        return {"features": [asdict(each) for each in _features(encodings)], "notes": notes, "times": times}

    def _write_links(self, spec: TableSpec) -> dict[str, Any]:
        """Write the edges that the rows of a table are, with their times."""
        first, second = (self.ids[target] for target in spec.fkeys.values())
        ends = Ends((first, second))

        def of(piece: Mapping[str, Any]) -> dict[str, Column]:
            carried = {TIME: numpy_of(piece["t"])} if "t" in piece else {}
            edges = ends.of(numpy_of(piece["n0"]), numpy_of(piece["n1"]), carried)
            return {f"edges/{spec.name}/{array}": rows for array, rows in edges.items()}

        self._write_rows(spec, {}, of)
        self._refuse_unknown(spec, [n for n, low in zip(spec.fkeys, ends.lowest, strict=True) if low == UNKNOWN])
        return {}

    def _write_rows(self, spec: TableSpec, cells: Mapping[str, str], of: Callable[..., dict[str, Column]]) -> None:
        """Write what becomes of the rows of a table, given some cells, their times, and the rows that keys name."""
        keyed, keys = self.tables[spec.name], [(name, self.ids[target]) for name, target in spec.fkeys.items()]
        times = {} if keyed.time is None else {"t": keyed.time}
        write_rows(self.work, keyed.table, {**cells, **times}, keys, self.folder(spec.name), of, digits=True)

    def _encodings(self, spec: TableSpec) -> tuple[list[Encoding], dict[str, str]]:
        """How the columns of a table are encoded, and why others are left out."""
        keyed, table, kept = self.tables[spec.name], self.tables[spec.name].table, {spec.pkey, *spec.fkeys}
        names = [name for name in table.types if name not in kept | self.drop or name == spec.time_col]
        asked = {name: spec.columns.get(name) for name in names if spec.columns.get(name) != "ignore"}
        if spec.time_col is not None and not keyed.are_dates:
            asked.pop(spec.time_col)
        left_out = {}
        for name in sorted(asked):
            cells = table.cells(name)
            if not (cells.is_text or cells.is_date or cells.is_real or cells.type in WHOLE):
                left_out[name] = "holds lists, or the like"
                asked.pop(name)
        seen = "true" if keyed.time is None else f"{keyed.time} < {NEVER if self.cut is None else self.cut}"
        embed, hidden = embedding(self.manifest.text), self.manifest.hidden(spec.name)
        encodings, others = encodings_of(self.work, table, asked, seen, spec.time_col, embed, hidden)
        return encodings, left_out | others

    def _refuse_unknown(self, spec: TableSpec, columns: Collection[str]) -> None:
        """Note the keys that name no row. RelBench leaves them out."""
        for name in columns if not self.manifest.may_dangle else ():
            target = self.manifest.tables[spec.fkeys[name]]
            of_target = self.ids[target.name], target.name, target.pkey or ""
            self.tables[spec.name].refuse_unknown(self.work, name, *of_target)


def _features(encodings: Collection[Encoding]) -> list[Feature]:
    """Where the numbers of each column are."""
    widths, features = dict[str, int](), []
    for each in encodings:
        for array, width in each.widths.items():
            features.append(Feature(each.name, array, widths.get(array, 0), width, each.size))
            widths[array] = widths.get(array, 0) + width
    return features


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
        nodes |= {} if table.is_links else {table.name: NodeFiles(table.path, table.path, {}, None)}
        for source, name, target in table.edge_types:
            edges[source, name, target] = edges[target, f"rev_{name}", source] = files
    for task in manifest.tasks.values():
        path = next(iter(task.files.values()))
        files = EdgeFiles(files=(path,), num_edges=sum(map(count_rows, task.files.values())))
        nodes[task.name] = NodeFiles(path, path, {}, None, task.task_type == "regression")
        edges |= dict.fromkeys(task.edge_types, files)
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
