"""Graphs with types from tables: a folder ``nodes`` with one for each node type, a folder ``edges`` likewise.

nodes/paper.csv  nodes/author.parquet  nodes/venue/num_nodes.npy
edges/author__writes__paper.csv  edges/paper__cites__paper/edge_index.npy
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.graph.typed.hetero import Content
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, node_tensors, num_nodes_of, purpose_of, told
from lightning_gnn_dist.prepare.files.from_tables import carried_of, id_of, node_columns, places_of, times_of
from lightning_gnn_dist.prepare.files.raw import check_drop, check_purposes
from lightning_gnn_dist.prepare.files.table_files import (
    about_headings,
    columns_of,
    count_rows,
    ends_first,
    is_table,
    read_columns,
)
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_source import Contents, TypedSource


def is_typed(path: Path) -> bool:
    """Whether it is a folder of tables of several types."""
    return all((path / name).is_dir() for name in ("nodes", "edges")) and not (path / "meta.json").exists()


@dataclass(frozen=True)
class TypedTables(TypedSource):
    """The tables of a graph with types, of which only headings were read.

    Args:
        nodes: The table, or the arrays, of each node type.
        edges: The table, or the arrays, of each edge type.
        drop: Columns and arrays to leave out, wherever they are.
        time: The column or array of times, by which the edges of one type into a node are ordered.
    """

    nodes: dict[str, Path]
    edges: dict[EdgeType, Path]
    drop: frozenset[str] = frozenset()
    time: str | None = None

    @classmethod
    def of(cls, folder: Path, drop: Collection[str] = (), time: str | None = None) -> TypedTables:
        """The tables in the folders ``nodes`` and ``edges``."""
        nodes, named = _files(folder / "nodes"), _files(folder / "edges")
        edges: dict[EdgeType, Path] = {}
        for name, path in named.items():
            if len(parts := name.split("__")) != 3:
                raise ValueError(
                    f"{path}: a file of edges is called <source type>__<name>__<destination type>, such as "
                    "author__writes__paper.csv. Rename it."
                )
            edges[parts[0], parts[1], parts[2]] = path
        _check_ends(nodes, edges, folder)
        check_names(tuple(nodes), tuple(edges))
        tables = cls(nodes, edges, frozenset(drop), time)
        names = {name: path for path in (*nodes.values(), *edges.values()) for name in _names(path)}
        check_drop(drop, names, folder)
        if time is not None and time not in names:
            raise ValueError(f"time names the column {shown(time)}, and {folder} has these: {shown(sorted(names))}.")
        return tables

    @property
    def num_edges(self) -> int:
        return sum(count_rows(path) if is_table(path) else _length(path) for path in self.edges.values())

    @property
    def num_types(self) -> tuple[int, int]:
        return len(self.nodes), len(self.edges)

    @property
    def headings(self) -> tuple[str, ...]:  # type: ignore[override]  # read when it is asked for
        return about_headings(*self.nodes.values(), *self.edges.values())

    def contents(self, on_progress: Progress) -> Contents:
        ids: dict[str, Column | None] = {}
        nodes: dict[str, Content] = {}
        edges: dict[EdgeType, Content] = {}
        total = len(self.nodes) + len(self.edges)
        for kind, path in self.nodes.items():
            ids[kind], nodes[kind] = self._read_nodes(path)
            on_progress(len(nodes) / total)
        for edge_type, path in self.edges.items():
            edges[edge_type] = self._read_edges(path, edge_type, ids)
            on_progress((len(nodes) + len(edges)) / total)
        return nodes, edges

    def _read_nodes(self, path: Path) -> tuple[Column | None, Content]:
        """The ids of the nodes, None for 0, 1, 2, ..., and what they carry."""
        if not is_table(path):
            found = _arrays(path, self.drop)
            count = num_nodes_of(found, path)
            return None, {"num_nodes": count, **node_tensors(found, count)}
        name = id_of(columns_of(path))
        table = read_columns(path, self.drop - {name}, lambda share: None)
        ids, times = table.pop(name), self._times(table, path)
        made = node_columns(table, path)
        return ids, {"num_nodes": len(ids), **_tensors(made | times)}

    def _read_edges(self, path: Path, edge_type: EdgeType, ids: Mapping[str, Column | None]) -> Content:
        if not is_table(path):
            found = _arrays(path, self.drop)
            if "edge_index" not in found:
                raise ValueError(f"{path} holds no edge_index, of shape (2, edges), but {sorted(found)}.")
            return _tensors(found)
        ends = ends_first(columns_of(path), path)[:2]
        table = read_columns(path, self.drop - set(ends), lambda share: None)
        places = [
            _places(table.pop(end), ids[kind], path, self.nodes[kind])
            for end, kind in zip(ends, edge_type[::2], strict=True)
        ]
        times = self._times(table, path)
        made = carried_of(table, path)
        return {"edge_index": torch.from_numpy(np.stack(places)), **_tensors(made | times)}

    def _times(self, table: dict[str, Column], path: Path) -> dict[str, Column]:
        """The column of times, taken out of a table."""
        if self.time is None or self.time not in table:
            return {}
        return {self.time: times_of(self.time, table.pop(self.time), path)}


def _check_ends(nodes: Mapping[str, Path], edges: Mapping[EdgeType, Path], folder: Path) -> None:
    """Refuse edges of types whose nodes are nowhere, and a folder without any."""
    for name, found in (("nodes", nodes), ("edges", edges)):
        if not found:
            raise ValueError(f"{folder / name} holds no table: a graph with types needs one of nodes and one of edges.")
    for edge_type, path in edges.items():
        for end in edge_type[::2]:
            if end not in nodes:
                raise ValueError(
                    f"{path} names the node type {end!r}, and {folder / 'nodes'} has {shown(list(nodes))}: add a table "
                    f"of it, {end}.csv, or a folder {end} with num_nodes.npy, or rename the edges."
                )


def _files(folder: Path) -> dict[str, Path]:
    """The table or arrays of each type, by its name: that of the file without its suffix, or of the folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if not is_table(path) and path.suffix != ".npz" and not (path.is_dir() and any(path.rglob("*.npy"))):
            raise ValueError(
                f"{path} is no table of one type: give a text (.csv, .tsv, .txt, also gzipped), .parquet or a folder "
                "of these, an .npz, or a folder of .npy."
            )
        name = path.name if path.is_dir() else Path(path.name.removesuffix(".gz")).stem
        if name in found:
            raise ValueError(f"{path} and {found[name]} are two tables of one type: remove one of them.")
        found[name] = path
    return found


def _names(path: Path) -> list[str]:
    if is_table(path):
        return columns_of(path)
    if path.is_dir():
        return [file.stem for file in path.iterdir() if file.is_dir() or file.suffix == ".npy"]
    with told(path), np.load(path, allow_pickle=False) as archive:
        return list(archive.files)


def _length(path: Path) -> int:
    if path.is_dir():
        return NpyFile.of(path / "edge_index.npy").shape[-1] if (path / "edge_index.npy").exists() else 0
    with told(path), np.load(path, allow_pickle=False) as archive:
        return int(archive["edge_index"].shape[-1]) if "edge_index" in archive.files else 0


def _arrays(path: Path, drop: Collection[str]) -> dict[str, Column]:
    """The arrays of one type by their names in a graph; those of a folder are mapped."""
    if path.is_dir():
        for folder in (folder for folder in path.iterdir() if folder.is_dir() and any(folder.glob("*.npy"))):
            raise ValueError(
                f"{folder} is a folder, and an array in several files is read out of core alone: --out-of-core."
            )
        files = [file for file in sorted(path.glob("*.npy")) if file.stem not in drop]
        for file in files:
            NpyFile.of(file).type  # noqa: B018  refused here if torch has no such type
        found = {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files}
    else:
        with told(path), np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files if name not in drop}
    check_purposes(((name, purpose_of(name)) for name in found), path)
    return {ALIASES.get(name, name): array for name, array in found.items()}


def _tensors(arrays: Mapping[str, Column]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _places(ends: Column, ids: Column | None, path: Path, nodes: Path) -> Column:
    check_numbered(ends, ids is None, path, nodes)
    return places_of(ends, ids, path, nodes)


def check_numbered(ends: Column, are_numbered: bool, path: Path, nodes: Path) -> None:
    """Refuse words as ends of edges if the nodes are numbered."""
    if are_numbered and ends.dtype.kind == "U":
        raise ValueError(
            f"{path} names nodes by words, such as {str(ends[0])!r}, and {nodes} numbers them 0, 1, 2, ...: give these "
            "numbers, or a table of nodes with their ids."
        )
