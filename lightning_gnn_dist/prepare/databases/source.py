"""A folder of tables with keys as files of a graph: rows are nodes, foreign keys edges in both directions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.graph.typed.tables import ANSWER, ASKED, TIME, Feature, Tables, TableTask
from lightning_gnn_dist.prepare.databases.keys import KeyColumn, LinkTable
from lightning_gnn_dist.prepare.databases.manifest import PLAIN, RELBENCH, Manifest, TableSpec, TaskSpec
from lightning_gnn_dist.prepare.databases.questions import Questions
from lightning_gnn_dist.prepare.databases.recommendations import Recommendations
from lightning_gnn_dist.prepare.databases.table import DatabaseTable
from lightning_gnn_dist.prepare.databases.times import span_of
from lightning_gnn_dist.prepare.files.columns import check_drop
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.inputs import Inputs, NodeFiles
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows

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
    nodes = {
        table.name: NodeFiles(table.path, DatabaseTable(table, manifest, drop), {}, None)
        for table in manifest.tables.values()
        if not table.is_links
    }
    edges = dict(chain.from_iterable(_edges(nodes, table, manifest) for table in manifest.tables.values()))
    for task in manifest.tasks.values():
        path, is_real = next(iter(task.files.values())), task.task_type == "regression"
        questions = Questions(task, manifest) if task.receiver is None else Recommendations(task, manifest)
        nodes[task.name] = NodeFiles(path, questions, {}, None, is_real)
        keys = _keys_of(task, manifest, task.entity_col, task.entity_table, "about")
        edges[task.entity_table, ASKED, task.name] = EdgeFiles(files=(keys,), num_edges=questions.num_rows)
        if task.receiver is not None:
            keys = _keys_of(task, manifest, task.targets[0], task.receiver, "answer")
            edges[task.name, ANSWER, task.receiver] = EdgeFiles(files=(keys,), num_edges=questions.num_rows)
    if not edges:
        raise ValueError(
            f"{manifest.path} names no foreign keys and there is no task, so no row has to do with another."
        )
    check_names(tuple(nodes), tuple(edges))
    return Inputs(nodes, edges, LAYOUTS[manifest.path.name], TIME if manifest.has_times else None)


def tables_of(folder: Path, facts: Mapping[str, Mapping[str, Any]], edge_types: Collection[EdgeType]) -> Tables:
    """What became of the tables, by what reading each of them has told."""
    manifest = Manifest.of(folder)
    features = {
        name: tuple(Feature(**each) for each in told["features"]) for name, told in facts.items() if "features" in told
    }
    tasks = {name: TableTask(**told["task"]) for name, told in facts.items() if "task" in told}
    notes = tuple(note for told in facts.values() for note in told["notes"])
    timed = tuple(name for name in features if facts[name]["times"] is not None)
    seen = tuple(kind for kind in edge_types if kind not in {task.answers for task in tasks.values()})
    return Tables(features, tasks, seen, span_of(manifest, facts), timed, notes)


def _edges(
    nodes: Mapping[str, NodeFiles], table: TableSpec, manifest: Manifest
) -> Collection[tuple[EdgeType, EdgeFiles]]:
    """The edges of the foreign keys of a table, or those that its rows are, in both directions."""
    found, may_dangle = [], manifest.path.name == RELBENCH
    if table.is_links:
        (one, first), (two, second) = table.fkeys.items()
        targets = (first, manifest.tables[first].pkey or ""), (second, manifest.tables[second].pkey or "")
        for edge_type, to_second in (
            ((first, table.name, second), True),
            ((second, f"rev_{table.name}", first), False),
        ):
            links = LinkTable(table.path, (one, two), targets, to_second, table.time_col, may_dangle)
            found.append((edge_type, EdgeFiles(files=(links,), num_edges=count_rows(table.path))))
        return found
    for column, target in table.fkeys.items():
        key = manifest.tables[target].pkey
        assert key is not None
        for edge_type, to_target in (
            ((table.name, column, target), True),
            ((target, f"rev_{column}", table.name), False),
        ):
            keys = KeyColumn(table.path, table.name, column, (target, key), to_target, may_dangle)
            found.append((edge_type, EdgeFiles(files=(keys,), num_edges=_count(nodes[table.name]))))
    return found


def _keys_of(
    task: TaskSpec, manifest: Manifest, column: str, target: str, role: Literal["about", "answer"]
) -> KeyColumn:
    """The keys of questions, as edges to these, or of answers from them. None lead back: questions are in no table."""
    path, key = next(iter(task.files.values())), manifest.tables[target].pkey or "row"
    may_dangle = manifest.path.name == RELBENCH
    return KeyColumn(path, task.name, column, (target, key), role == "answer", may_dangle, role)


def _count(files: NodeFiles) -> int:
    assert files.table is not None and not isinstance(files.table, Path)
    return files.table.num_rows
