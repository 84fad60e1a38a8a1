"""Makes a saved graph with types of arrays and tables that do not fit into memory.

Tables are turned into arrays. The edges of each type are sorted on disk, one type after the other, as those of a graph
with one type are. Then the rows of all types are put together, node after node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_gnn_dist.checks import (
    check_callable,
    check_folder,
    check_path,
    check_true_or_false,
    check_word,
    check_words,
)
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.digest import fingerprint_of
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.checksum import checksum_of
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import save
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.graph.typed.build import check_time
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, folder_of, within
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.raw import SPLITS
from lightning_gnn_dist.prepare.files.table_files import is_table
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_source import NO_LABELS, with_reverse
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables, is_typed
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.numbering import Numbering, Part
from lightning_gnn_dist.prepare.prepare_graph import (
    DEFAULT_MEMORY,
    MAX_BYTES_AT_ONCE,
    Estimate,
    OnProgress,
    Preparation,
    Prepared,
)
from lightning_gnn_dist.prepare.typed.edges import (
    EdgesOfType,
    SomeEdges,
    edge_files,
    edges_of_arrays,
    edges_of_table,
    gather,
    sort_edges,
)
from lightning_gnn_dist.prepare.typed.estimate import estimate_of
from lightning_gnn_dist.prepare.typed.merge import SortedEdges, merge
from lightning_gnn_dist.prepare.typed.nodes import NodesOfType, nodes_files, unpack_nodes


def prepare_typed_graph(
    source: str | Path,
    out: str | Path,
    *,
    time: str | None = None,
    reverse: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    float_labels: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, share: None,
) -> None:
    """Turn tables and arrays into a saved graph with types, in bounded memory. The same call goes on after a kill.

    Args:
        source: A folder with folders ``nodes`` and ``edges``. In ``nodes`` there is for each type a table, text or
            Parquet, with an id in each row, or a folder with ``x.npy`` (or a folder ``x``), ``y.npy``,
            ``train_mask.npy``, ..., ``num_nodes.npy``; in ``edges`` for each type, called
            ``<source type>__<name>__<destination type>``, a table, or a folder with ``edge_index.npy`` and what edges
            carry. Where nodes are in a folder, their ids count from 0.
        out: The directory to write.
        time: The array in whose order the edges of one type into a node come, see :class:`GraphTypes`.
        reverse: Add an edge type ``rev_<name>`` for each, with the same arrays.
        split: Shares of the labelled nodes of each type to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays to leave out.
        float_labels: Accept a floating point ``y`` with one value per node, for regression.
        memory_bytes: Bytes that reading, sorting and copying may take, beside arrays of one entry per node, ids among
            them.
        overwrite: Replace a saved graph.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    preparation = TypedPreparation(
        check_path("source", source),
        check_folder("out", out),
        split=split,
        seed=seed,
        drop=tuple(drop),
        float_labels=float_labels,
        memory_bytes=memory_bytes,
        overwrite=overwrite,
        time=time,
        reverse=reverse,
    )
    preparation.run(on_progress)


@dataclass(frozen=True, kw_only=True)
class TypedPreparation(Preparation):
    """The settings of :func:`prepare_graph` for tables of several types."""

    takes_types: ClassVar[bool] = True
    time: str | None = None
    reverse: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_true_or_false(reverse=self.reverse)
        if self.time is not None:
            check_word("time", self.time, "time")
        if not is_typed(self.source):
            raise ValueError(f"source ({self.source}) must be a folder with the folders nodes and edges.")

    def estimate(self) -> Estimate:
        return estimate_of(self._tables(), self.reverse)

    def _tables(self) -> TypedTables:
        return TypedTables.of(self.source, self.drop, self.time)

    def _inputs(self) -> dict[str, Any]:
        return super()._inputs() | {"time": self.time, "reverse": self.reverse}

    def _write(self, journal: Journal, on_progress: OnProgress) -> Prepared:
        tables = self._tables()
        if not self._draft.exists():
            journal.clear()
            for name in ("nodes", "edges"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self._draft.mkdir()
        parts = self._read_tables(tables, on_progress)
        if self.split and not any("y" in self._files_of(*table).arrays for table in tables.nodes.items()):
            raise ValueError(NO_LABELS)
        are_targets = {kind: _has_fractions(self._files_of(kind, path)) for kind, path in tables.nodes.items()}
        if self.float_labels and not any(are_targets.values()):
            raise ValueError("float_labels says that a y is a target of regression, but no type has a y of fractions.")
        for kind, path in tables.nodes.items():
            with within(kind):
                self._copy_nodes(kind, path, parts[kind], are_targets[kind], partial(on_progress, f"copying {kind}"))
        paths = self._paths(tables)
        for edge_type, (path, flip) in paths.items():
            with within(edge_type):
                self._write_edges(edge_type, path, flip, tables, parts, on_progress)
        about = self._merge(parts, list(paths), partial(on_progress, "putting rows together"))
        return self._describe_types(about, parts, partial(on_progress, "taking the fingerprint"))

    def _read_tables(self, tables: TypedTables, on_progress: OnProgress) -> dict[str, Part]:
        """Turn tables of nodes into arrays, and return which nodes of each type are prepared."""
        parts = {}
        for kind, path in tables.nodes.items():
            with within(kind):
                parts[kind] = self._read_nodes(kind, path, partial(on_progress, f"reading {kind}"))
        return parts

    def _paths(self, tables: TypedTables) -> dict[EdgeType, tuple[Path, bool]]:
        """For each edge type its table or arrays, and whether their edges are read the other way round."""
        paths = {edge_type: (path, False) for edge_type, path in tables.edges.items()}
        if self.reverse:
            paths |= {edge_type: (path, True) for edge_type, path in with_reverse(tables.edges).items()}
        return paths

    def _part(self, kind: str, num_nodes: int) -> Part:
        """Which nodes of a type are prepared: all."""
        return Part(Numbering.spread(num_nodes, 1))

    def _of_nodes(self, kind: str) -> Path:
        """The folder in which the nodes of a type are worked on."""
        return self.folder / "nodes" / kind

    def _of_edges(self, edge_type: EdgeType) -> Path:
        return self.folder / "edges" / folder_of(edge_type)

    def _files_of(self, kind: str, path: Path) -> GraphFiles:
        """The arrays of a node type; of a table those that it was turned into, but for the features."""
        return nodes_files(self._of_nodes(kind) / "arrays", ()) if is_table(path) else nodes_files(path, self.drop)

    def _read_nodes(self, kind: str, path: Path, progress: Progress) -> Part:
        """Turn a table of nodes into arrays, and return which nodes of the type are prepared."""
        folder = self._of_nodes(kind)
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(folder, {})
        if is_table(path) and not journal.get("is_read"):
            for name in ("own", "arrays", "graph"):
                shutil.rmtree(folder / name, ignore_errors=True)
            drop, part_of = set(self.drop), partial(self._part, kind)
            unpack_nodes(path, folder, part_of, drop, self.time, self.memory_bytes // 2, progress)
            journal.record(sorted(folder.rglob("*.npy")), is_read=True)
        files = self._files_of(kind, path)
        if not files.num_nodes:
            raise ValueError(f"{path} does not say how many nodes there are: add x, y or num_nodes.")
        return self._part(kind, files.num_nodes)

    def _copy_nodes(self, kind: str, path: Path, part: Part, is_target: bool, progress: Progress) -> None:
        """Copy the arrays of one type, and keep the times of all its nodes."""
        folder, journal = self._of_nodes(kind), Journal(self._of_nodes(kind), {})
        if (self._draft / "nodes" / kind).exists():
            return
        files, draft = self._files_of(kind, path), folder / "graph"
        if self.time in files.arrays:
            rows = files.arrays[str(self.time)]
            check_time({str(self.time): torch.from_numpy(rows.read(0, 1))}, self.time, "node")
            check_time({str(self.time): torch.from_numpy(times := rows.load())}, self.time, "node")
            save(folder / "times.npy", times)
        draft.mkdir(exist_ok=True)
        self._nodes_of(part, draft, self._settings_of(path, files, is_target)).copy(
            files, part.num_all, journal, progress
        )
        if (folder / "own" / "x.npy").exists():
            os.rename(folder / "own" / "x.npy", draft / "nodes" / "x.npy")
        (self._draft / "nodes").mkdir(exist_ok=True)
        os.rename(draft / "nodes", self._draft / "nodes" / kind)

    def _nodes_of(self, part: Part, draft: Path, settings: dict[str, Any]) -> NodesOfType:
        """What copies the arrays of one type."""
        return NodesOfType(draft=draft, **settings)

    def _settings_of(self, path: Path, files: GraphFiles, is_target: bool) -> dict[str, Any]:
        return {
            "source": path,
            "out": self.out,
            "split": self.split if "y" in files.arrays else None,
            "seed": self.seed,
            "float_labels": self.float_labels and is_target,
            "memory_bytes": self.memory_bytes,
        }

    def _write_edges(
        self,
        edge_type: EdgeType,
        path: Path,
        flip: bool,
        tables: TypedTables,
        parts: dict[str, Part],
        on_progress: OnProgress,
    ) -> None:
        """Sort the edges of one type by receiver and sender, with what they carry."""
        folder = self._of_edges(edge_type)
        folder.mkdir(parents=True, exist_ok=True)
        journal, sender, receiver = Journal(folder, {}), parts[edge_type[0]], parts[edge_type[2]]
        if journal.get("is_sorted"):
            return
        sizes, drop, out = (sender.num_all, receiver.size), self.drop, folder / "sorted"
        if self._must_gather(path):
            edges_in = self._edges_in(edge_type, path, flip, tables, parts)
            reading = partial(on_progress, f"reading {' '.join(edge_type)}")
            self._gather(edge_type, path, edges_in, parts, journal, reading)
            path, flip, drop = folder / "gathered", False, ()
        if not out.exists():
            (out / "edges").mkdir(parents=True)
        files = edge_files(path, drop)
        self._check_edge_arrays(files, journal)
        edges = EdgesOfType.in_files(files, *sizes, flip)
        progress = partial(on_progress, f"sorting {' '.join(edge_type)}")
        sort_edges(edges, files.carried, out, self.memory_bytes, journal, progress)
        journal.record(is_sorted=True)
        shutil.rmtree(folder / "gathered", ignore_errors=True)

    def _must_gather(self, path: Path) -> bool:
        """Whether edges are written as arrays before they are sorted."""
        return is_table(path)

    def _edges_in(
        self, edge_type: EdgeType, path: Path, flip: bool, tables: TypedTables, parts: dict[str, Part]
    ) -> Iterable[SomeEdges]:
        """All edges of a type, in pieces."""
        if is_table(path):
            kinds = edge_type[::-2] if flip else edge_type[::2]
            nodes = {
                kind: (tables.nodes[kind], self._ids_of(kind, tables.nodes[kind]), parts[kind].num_all)
                for kind in kinds
            }
            as_read = kinds[0], edge_type[1], kinds[1]
            return edges_of_table(path, as_read, flip, nodes, self.drop, self.time, self.memory_bytes // 2)
        files = edge_files(path, self.drop)
        edges = EdgesOfType.in_files(files, parts[edge_type[0]].num_all, parts[edge_type[2]].num_all, flip)
        return edges_of_arrays(edges, files.carried, self.memory_bytes // 2)

    def _ids_of(self, kind: str, nodes: Path) -> Path | None:
        return self._of_nodes(kind) / "ids.npy" if is_table(nodes) else None

    def _gather(
        self,
        edge_type: EdgeType,
        path: Path,
        edges: Iterable[SomeEdges],
        parts: dict[str, Part],
        journal: Journal,
        progress: Progress,
    ) -> None:
        """Write the edges of a type into the nodes of the part as arrays."""
        folder, num_senders = self._of_edges(edge_type), parts[edge_type[0]].num_all
        if journal.get("is_gathered"):
            return
        told = blake2b(digest_size=16)
        shutil.rmtree(folder / "gathered", ignore_errors=True)
        counts = gather(edges, parts[edge_type[2]], num_senders, folder / "gathered", path, told, progress)
        files = sorted((folder / "gathered").iterdir())
        journal.record(files, is_gathered=True, counts=counts.tolist(), digest=told.hexdigest())

    def _check_edge_arrays(self, files: GraphFiles, journal: Journal) -> None:
        """Refuse what edges carry if it has a name, or values, that a graph cannot have."""
        convert.check_each_name(files.carried.arrays, allowed=())
        if self.time in files.carried.arrays:
            some = torch.from_numpy(files.carried.arrays[str(self.time)].read(0, 1))
            check_time({str(self.time): some}, self.time, "edge")
        self._check_carried(files, journal)

    def _merge(self, parts: dict[str, Part], edge_types: list[EdgeType], progress: Progress) -> dict[str, Any]:
        """Write the rows of all nodes, after a kill from the beginning; return what ``meta.json`` says of the types."""
        found = {}
        for edge_type in edge_types:
            file = self._of_nodes(edge_type[0]) / "times.npy"
            times = map_npy(file) if self.time is not None and file.exists() else None
            found[edge_type] = SortedEdges.of(self._of_edges(edge_type) / "sorted", self.time, times)
        merge(self._draft, found, parts, progress)
        edges = [[*edge_type, edges.senders.size] for edge_type, edges in found.items()]
        return {"nodes": [[kind, part.size] for kind, part in parts.items()], "edges": edges, "time": self.time}

    def _tell(self, types: GraphTypes, parts: dict[str, Part]) -> None:
        """Called when all arrays are written."""

    def _describe_types(self, about: dict[str, Any], parts: dict[str, Part], progress: Progress) -> Prepared:
        """Compute fingerprint and checksums, and write ``meta.json`` last of all."""
        files = sorted(self._draft.rglob("*.npy"))
        arrays = {str(file.relative_to(self._draft))[: -len(".npy")]: map_npy(file) for file in files}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        types = GraphTypes.saved(about, tensors)  # which looks at all lengths
        self._tell(types, parts)
        told = {"indptr": tensors["indptr"], "indices": tensors["indices"], **types.masks}
        at_once = max(1, min(self.memory_bytes // 16, MAX_BYTES_AT_ONCE // 8))
        fingerprint = fingerprint_of((name, a.dtype, a.shape, a.split(at_once)) for name, a in told.items())
        checksums = {}
        for number, (name, file) in enumerate(zip(arrays, files, strict=True)):
            flush(file)
            checksums[name] = checksum_of(file)
            progress((number + 1) / len(files))
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        store.describe(self._draft, described, fingerprint, checksums, types.about)
        for path in {self._draft / "meta.json", *(file.parent for file in files)}:
            flush(path)
        splits = {f"{kind} {name}": ids.numel() for name in SPLITS for kind, ids in types.splits(name).items()}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return Prepared(types.offsets[-1], sum(types.num_edges), num_bytes, list(types.arrays), splits)


def _has_fractions(files: GraphFiles) -> bool:
    y = files.arrays.get("y")
    return y is not None and y.files[0].dtype.kind == "f"
