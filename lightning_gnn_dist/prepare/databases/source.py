"""A folder of tables with keys as files of a graph, of which only headers were read."""

from __future__ import annotations

from pathlib import Path

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.graph.typed.tables import ANSWER, ASKED, TIME
from lightning_gnn_dist.prepare.databases.manifest import PLAIN, RELBENCH, Manifest
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
