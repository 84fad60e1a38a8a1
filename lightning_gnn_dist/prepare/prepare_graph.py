"""Makes a saved graph of files that do not fit into memory: sorts edges on disk, copies arrays in pieces."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.checks import (
    check_at_least,
    check_between,
    check_callable,
    check_folder,
    check_path,
    check_seed,
    check_true_or_false,
    check_words,
    shown,
)
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.digest import fingerprint_of
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.checksum import checksum_of
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import FULL, NpyFile, append, cut_back, save, write_header
from lightning_gnn_dist.prepare.external_sort import ExternalSort
from lightning_gnn_dist.prepare.files.from_arrays import INDEX_LISTS, node_tensors
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.parquet import columns_of, count_columns, count_rows
from lightning_gnn_dist.prepare.files.raw import SPLITS, RawGraph
from lightning_gnn_dist.prepare.files.row_files import RowFiles
from lightning_gnn_dist.prepare.files.table_files import about_headings
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_tables import is_typed
from lightning_gnn_dist.prepare.files.unpack import check_nodes, unpack_edges, unpack_nodes
from lightning_gnn_dist.prepare.journal import Journal, journal_of

VERSION = 1  # of unfinished work: raise it when a new release cannot go on with it
OnProgress: TypeAlias = Callable[[str, float], None]
DEFAULT_MEMORY = 2_000_000_000
MAX_BYTES_AT_ONCE = 1 << 26
SECONDS_PER_KEY = 150e-9  # an edge has one key per direction; measured on one core: benchmarks/scale.md
SECONDS_PER_LINE = 600e-9  # in addition, for a table of text


def prepare_graph(
    source: str | Path,
    out: str | Path,
    *,
    nodes: str | Path | None = None,
    undirected: bool = False,
    split: Sequence[float] | None = None,
    seed: int = 0,
    drop: Collection[str] = (),
    float_labels: bool = False,
    memory_bytes: int = DEFAULT_MEMORY,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, share: None,
) -> None:
    """Turn files into a saved graph in bounded memory. The same call goes on after a kill.

    The graph is the one that ``Graph.from_pyg(...).save(out)`` writes, to the bit. It appears at ``out`` when it is
    complete; until then the work is in the folder ``.<out>.preparing`` beside it.

    Args:
        source: A ``.npy`` of edges, of shape (2, E) or (E, 2); a table (CSV, TSV, Parquet); a folder of these;
            or a folder with ``edge_index.npy`` (or a folder ``edge_index`` of files) and arrays per node: ``x.npy`` (or
            a folder ``x``), ``y.npy``, ``train_mask.npy`` or ``train_idx.npy``, ..., ``num_nodes.npy``.
        out: The directory to write.
        nodes: A table of nodes in Parquet, one file or a folder, in the order of their numbers 0, 1, 2, ...
        undirected: Add the reverse of every edge, and keep every edge once.
        split: Shares of labelled nodes to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays and columns to leave out.
        float_labels: Accept a floating point ``y`` with one value per node, for regression.
        memory_bytes: Bytes that sorting and copying may take, beside arrays of one entry per node (about 24 bytes per
            node, and ``y`` and the masks) and the interpreter itself.
        overwrite: Replace a saved graph.
        on_progress: Called with the name of the stage and the share of it that is done.
    """
    check_words("drop", drop, '["x", "y"]')
    check_callable("on_progress", on_progress, "a function of a stage's name and its share, such as print", "", 0.0)
    preparation = Preparation(
        check_path("source", source),
        check_folder("out", out),
        undirected,
        split,
        seed,
        tuple(drop),
        float_labels,
        memory_bytes,
        overwrite,
        None if nodes is None else check_path("nodes", nodes),
    )
    preparation.run(on_progress)


@dataclass(frozen=True)
class Estimate:
    """What preparing will take, about.

    Args:
        num_edges: Number of edges in the files.
        disk_bytes: Bytes of disk that the work takes.
        stored_bytes: Bytes of the saved graph, at most.
        seconds: Time in all, if the disk keeps up.
        headings: What is taken for the headings of tables, in words.
    """

    num_edges: int
    disk_bytes: int
    stored_bytes: int
    seconds: float
    headings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """What was prepared.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        num_bytes: Bytes of all arrays.
        arrays: Names of the arrays per node, then per edge.
        splits: Number of nodes that each mask marks, by its name without ``_mask``.
    """

    num_nodes: int
    num_edges: int
    num_bytes: int
    arrays: list[str]
    splits: dict[str, int]


@dataclass(frozen=True)
class Preparation:
    """The settings of :func:`prepare_graph`."""

    takes_types: ClassVar[bool] = False  # tables of several types
    source: Path
    out: Path
    undirected: bool = False
    split: Sequence[float] | None = None
    seed: int = 0
    drop: tuple[str, ...] = ()
    float_labels: bool = False
    memory_bytes: int = DEFAULT_MEMORY
    overwrite: bool = False
    nodes: Path | None = None

    def __post_init__(self) -> None:
        check_at_least(1, memory_bytes=self.memory_bytes)
        check_true_or_false(undirected=self.undirected, float_labels=self.float_labels, overwrite=self.overwrite)
        check_seed(self.seed)
        check_split(self.split)
        for file in (self.source, *([self.nodes] if self.nodes else [])):
            if not file.exists():
                raise FileNotFoundError(f"{file} does not exist.")
        if is_typed(self.source) and not self.takes_types:
            raise ValueError(
                f"source ({self.source}) holds tables of several types: prepare_typed_graph(source, out) takes them, "
                "and for one shard prepare_typed_shard(source, folder, index, num_shards)."
            )

    @property
    def folder(self) -> Path:
        """The folder in which the work is done."""
        return self.out.absolute().parent / f".{self.out.name}.preparing"

    def estimate(self) -> Estimate:
        """Estimate disk space and time, from the headers of the files."""
        files = self._files()
        keys, num_nodes = files.edges.num_edges * (1 + self.undirected), files.num_nodes or 0
        per_key = 4 if convert.index_dtype(num_nodes) == torch.int32 else 8
        columns, carried = self._column_bytes(num_nodes), files.carried.bytes_per_edge + 4 * len(files.edges.carried)
        arrays = files.num_bytes + columns + 8 * num_nodes
        seconds = SECONDS_PER_KEY * keys + SECONDS_PER_LINE * files.edges.has_text * files.edges.num_edges
        return Estimate(
            num_edges=files.edges.num_edges,
            disk_bytes=arrays + columns + 8 * num_nodes + (8 + carried) * keys,
            stored_bytes=arrays + (per_key + carried) * keys,
            seconds=seconds,
            headings=about_headings(*files.edges.files[:1]),
        )

    def _column_bytes(self, num_nodes: int) -> int:
        return 4 * num_nodes * count_columns(self.nodes) if self.nodes else 0

    def run(self, on_progress: OnProgress) -> Prepared:
        """Do the work that is left, and rename the result to ``out``."""
        store.check_target(self.out, overwrite=self.overwrite)
        self._check_room()
        try:
            with journal_of(self.folder, self._inputs()) as journal:
                prepared = self._write(journal, on_progress)
                store.replace(self._draft, self.out)
                flush(self.folder.parent)
                shutil.rmtree(self.folder)
        except MemoryError as error:
            raise MemoryError(
                f"{error} Sorting was given {self.memory_bytes:,} bytes, which this process cannot have: repeat the "
                f"command with less, and it goes on with what is done in {self.folder}."
            ) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"the disk of {self.folder} is full, or a file may not grow ({error.strerror}). What is done is kept "
                "there: make room and repeat the command to go on, or delete that folder",
            ) from error
        return prepared

    def _check_room(self) -> None:
        """Refuse to begin if the disk has too little room."""
        place = next(parent for parent in self.folder.parents if parent.exists())
        there = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        missing, free = self.estimate().disk_bytes - there, shutil.disk_usage(place).free
        if missing > free:
            raise OSError(f"{place} has {free:,} bytes free, and about {missing:,} are needed: choose another disk.")

    def _write(self, journal: Journal, on_progress: OnProgress) -> Prepared:
        """Write all files of the saved graph into the draft."""
        files = self._files()
        if not self._draft.exists():
            journal.clear()
        files = self._unpacked(files, journal, _stage("reading columns", on_progress))
        if not self._draft.exists():
            for kind in ("nodes", "edges") if files.carried.arrays else ("nodes",):
                (self._draft / kind).mkdir(parents=True)
        sort = ExternalSort(files.edges, files.carried, journal, self._draft, self.undirected, self.memory_bytes)
        self._check_carried(files, journal)
        num_nodes = sort.count(files.num_nodes, _stage("counting edges", on_progress))
        if num_nodes == 0:
            raise ValueError(f"{self.source} has no edges, and does not say how many nodes there are.")
        arrays = self._write_arrays(files, num_nodes, journal, _stage("copying arrays", on_progress))
        sort.deal(_stage("dealing edges into buckets", on_progress))
        sort.sort(_stage("sorting buckets", on_progress))
        sort.finish()
        carried = list(Data(**dict.fromkeys(files.carried.arrays, num_nodes)).to_dict())
        names = [*(f"nodes/{name}" for name in arrays), *(f"edges/{name}" for name in carried)]
        return self._describe(names, _stage("taking the fingerprint", on_progress))

    def _files(self) -> GraphFiles:
        """The files of the source, before columns are read."""
        if self.nodes is None:
            return GraphFiles.of(self.source, self.drop)
        check_nodes(self.nodes)
        columns = set(columns_of(self.nodes))
        files = GraphFiles.of(self.source, set(self.drop) - columns)
        carried = tuple(name for name in files.edges.carried if name not in self.drop)
        return replace(files, edges=replace(files.edges, carried=carried), num_nodes=count_rows(self.nodes))

    def _unpacked(self, files: GraphFiles, journal: Journal, progress: Progress) -> GraphFiles:
        """``files`` with the columns of Parquet tables as arrays, which are written first."""
        folder = self.folder / "columns"
        if self.nodes is None and not files.edges.carried:
            return files
        if not journal.get("are_columns_read"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            unpack_edges(files.edges.files, files.edges.carried, folder, self.memory_bytes)
            if self.nodes is not None:
                unpack_nodes(self.nodes, self.drop, folder, self.memory_bytes, progress)
            journal.record(folder.iterdir(), are_columns_read=True)
        return files.with_arrays(folder)

    def _check_carried(self, files: GraphFiles, journal: Journal) -> None:
        """Refuse NaN and infinity in what edges carry: from here on it is only moved as bytes."""
        if journal.get("is_carried_checked"):
            return
        for name, rows in files.carried.arrays.items():
            first = 0
            for piece in rows.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
                convert.check_finite(torch.from_numpy(piece), first, name=name, row="edge")
                first += len(piece)
        journal.record(is_carried_checked=True)

    def _write_arrays(self, files: GraphFiles, num_nodes: int, journal: Journal, progress: Progress) -> list[str]:
        """Copy every array; return their names, in order."""
        small = self._small_arrays(files, num_nodes)
        for name, tensor in small.items():
            save(self._draft / "nodes" / f"{name}.npy", tensor.numpy())
        large = {name: rows for name, rows in files.arrays.items() if not _is_small(name, rows)}
        for name, rows in large.items():
            if rows.shape[0] != num_nodes:
                raise ValueError(f"{name} has shape {rows.shape}, but the graph has {num_nodes} nodes.")
            self._copy(name, rows, journal, progress)
        order = [f"{INDEX_LISTS[name]}_mask" if name in INDEX_LISTS else name for name in files.arrays]
        return list(Data(**dict.fromkeys([*order, *small], num_nodes)).to_dict())  # x and y first, as from memory

    def _small_arrays(self, files: GraphFiles, num_nodes: int) -> dict[str, Tensor]:
        """All arrays with one number per node, such as labels and masks, checked."""
        found = {name: rows.load() for name, rows in files.arrays.items() if _is_small(name, rows)}
        none = torch.zeros(2, 0, dtype=torch.int64)
        nodes, _ = convert.arrays_of(Data(edge_index=none, num_nodes=num_nodes, **node_tensors(found, num_nodes)))
        raw = RawGraph(none, num_nodes, nodes, {})
        if self.split:
            raw = raw.with_split(self.split, self.seed)
        convert.check_arrays(raw.node_arrays, check_features=True, float_labels=self.float_labels)
        arrays = self._without_unlabelled(raw.node_arrays, files.arrays.get("y"))
        convert.warn_of_overlaps(arrays)
        return arrays

    def _without_unlabelled(self, arrays: dict[str, Tensor], y: RowFiles | None) -> dict[str, Tensor]:
        """The arrays with masks that leave out nodes whose label is NaN, also if ``y`` is not in memory."""
        if y is None or y.files[0].dtype.kind != "f":
            return arrays
        if "y" in arrays:
            return convert.without_unlabelled(arrays, str(self.source))
        pieces = y.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE))
        without = torch.cat([convert.is_unlabelled(torch.from_numpy(piece)) for piece in pieces])
        return convert.without_nodes(arrays, without, str(self.source))

    def _copy(self, name: str, rows: RowFiles, journal: Journal, progress: Progress) -> None:
        target, copied = self._draft / "nodes" / f"{name}.npy", journal.get("copied", {})
        done, total = copied.get(name, 0), rows.shape[0]
        cut_back(target, write_header(target, rows.files[0].dtype, rows.shape) + done * rows.bytes_per_row)
        for piece in rows.pieces(done, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
            if name == "x":
                convert.check_finite(torch.from_numpy(piece), done)
            append(target, piece)
            done += len(piece)
            progress(done / total)
            if journal.is_due() or done == total:
                journal.record([target], copied=copied | {name: done})

    def _describe(self, arrays: list[str], progress: Progress) -> Prepared:
        """Compute fingerprint and checksums, and write ``meta.json`` last of all."""
        files = {name: NpyFile.of(self._draft / f"{name}.npy") for name in ("indptr", "indices", *arrays)}
        masks = sorted(name for name in arrays if name.startswith("nodes/") and name.endswith("_mask"))
        fingerprint = fingerprint_of(
            (name.removeprefix("nodes/"), files[name].type, files[name].shape, self._tensors(files[name], progress))
            for name in ("indptr", "indices", *masks)
        )
        for file in files.values():
            flush(file.path)
        checksums = {name: checksum_of(file.path) for name, file in files.items()}
        about = {name: (file.type, file.shape) for name, file in files.items()}
        store.describe(self._draft, about, fingerprint, checksums)
        for path in (self._draft / "meta.json", *(file.path.parent for file in files.values())):
            flush(path)
        return Prepared(
            num_nodes=files["indptr"].shape[0] - 1,
            num_edges=files["indices"].shape[0],
            num_bytes=sum(file.num_bytes for file in files.values()),
            arrays=[name.partition("/")[2] for name in arrays],
            splits={mask[len("nodes/") : -len("_mask")]: int(np.load(files[mask].path).sum()) for mask in masks},
        )

    def _tensors(self, file: NpyFile, progress: Progress) -> Iterable[Tensor]:
        total, at_once = file.shape[0], max(1, min(self.memory_bytes // 16, MAX_BYTES_AT_ONCE // 8))
        for first in range(0, total, at_once):
            yield torch.from_numpy(file.read(first, min(at_once, total - first)))
            progress(min(first + at_once, total) / total)

    def _inputs(self) -> dict[str, Any]:
        """What the result depends on: the files, by size and time, and the settings."""
        paths = [self.source, *sorted(self.source.rglob("*"))] if self.source.is_dir() else [self.source]
        paths += [self.nodes, *sorted(self.nodes.rglob("*"))] if self.nodes else []
        files = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()}
        return {
            "version": VERSION,
            "files": files,
            "undirected": self.undirected,
            "split": self.split,
            "seed": int(self.seed),
            "drop": sorted(self.drop),
            "float_labels": self.float_labels,
        }

    @property
    def _draft(self) -> Path:
        return self.folder / "graph"


def check_split(split: Sequence[float] | None) -> None:
    """Refuse anything but None or three numbers in [0, 1]."""
    if split is None:
        return
    if isinstance(split, str | bytes) or not isinstance(split, Sequence) or len(split) != len(SPLITS):
        raise ValueError(f"split must be three shares, such as (0.6, 0.2, 0.2), got {shown(split)}.")
    for share in split:
        check_between(0, 1, **{"split: a share": share})


def _is_small(name: str, rows: RowFiles) -> bool:
    return name in INDEX_LISTS or rows.is_one_number_per_row


def _stage(name: str, on_progress: OnProgress) -> Progress:
    return lambda share: on_progress(name, share)
