"""Makes a saved graph with types of arrays that do not fit into memory.

The edges of each type are sorted on disk, one type after the other, as those of a graph with one type are. Then the
rows of all types are put together, node after node.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
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
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.graph.typed.build import check_time
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, folder_of, within
from lightning_gnn_dist.prepare.external_sort import ExternalSort
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles, Piece
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES, purpose_of
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles, entries
from lightning_gnn_dist.prepare.files.raw import SPLITS, check_purposes
from lightning_gnn_dist.prepare.files.row_files import Carried, RowFiles
from lightning_gnn_dist.prepare.files.table_files import about_headings, is_table
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.files.typed_source import with_reverse
from lightning_gnn_dist.prepare.files.typed_tables import TypedTables, is_typed
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.prepare_graph import (
    DEFAULT_MEMORY,
    MAX_BYTES_AT_ONCE,
    SECONDS_PER_KEY,
    SECONDS_PER_LINE,
    Estimate,
    OnProgress,
    Preparation,
    Prepared,
)
from lightning_gnn_dist.prepare.typed_merge import SortedEdges, merge


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
    """Turn folders of arrays into a saved graph with types, in bounded memory. The same call goes on after a kill.

    Args:
        source: A folder with folders ``nodes`` and ``edges``. In ``nodes`` there is a folder for each type, with
            ``x.npy`` (or a folder ``x``), ``y.npy``, ``train_mask.npy``, ..., ``num_nodes.npy``; in ``edges`` one for
            each type, called ``<source type>__<name>__<destination type>``, with ``edge_index.npy`` and what edges
            carry, or a table of the two ends. Ids count from 0 in each type.
        out: The directory to write.
        time: The array in whose order the edges of one type into a node come, see :class:`GraphTypes`.
        reverse: Add an edge type ``rev_<name>`` for each, with the same arrays.
        split: Shares of the labelled nodes of each type to train on, validate and test.
        seed: Decides the split.
        drop: Names of arrays to leave out.
        float_labels: Accept a floating point ``y`` with one value per node, for regression.
        memory_bytes: Bytes that sorting and copying may take, beside arrays of one entry per node.
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


KEY_BYTES, EDGE_BYTES = 8, 5  # of an edge in a bucket, and in the graph


@dataclass(frozen=True, kw_only=True)
class EdgesOfType(EdgeFiles):
    """The edges of one type. Senders and receivers are numbered each in its type.

    Args:
        num_senders: The number of nodes of the source type.
        num_receivers: The number of nodes of the destination type.
        flip: Whether each edge is read the other way round. The numbers are those of the flipped edges.
    """

    num_senders: int
    num_receivers: int
    flip: bool = False

    def pieces(self, edges_at_once: int, *, skip: int = 0) -> Iterator[Piece]:
        for piece in super().pieces(edges_at_once, skip=skip):
            found = Piece(piece.receiver, piece.sender, piece.file) if self.flip else piece
            for end, ids, count in (
                ("sender", found.sender, self.num_senders),
                ("receiver", found.receiver, self.num_receivers),
            ):
                if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < count:
                    bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                    raise ValueError(
                        f"{piece.file} names the {end} {bad}, but there are {count} nodes of its type: the ids of each "
                        f"type count from 0, so they must lie in [0, {count})."
                    )
            yield found


@dataclass(frozen=True, kw_only=True)
class NodesOfType(Preparation):
    """Copies the arrays of one node type into ``draft``."""

    draft: Path

    @property
    def _draft(self) -> Path:
        return self.draft

    def copy(self, files: GraphFiles, count: int, folder: Path, progress: Progress) -> None:
        """Copy all arrays, as far as ``folder`` does not say that they were."""
        (self.draft / "nodes").mkdir(parents=True, exist_ok=True)
        self._write_arrays(files, count, Journal(folder, {}), progress)


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
        tables = self._tables()
        nodes = sum(_nodes_files(path, self.drop).num_bytes for path in tables.nodes.values())
        files = [_edge_files(path, self.drop) for path in tables.edges.values()]
        keys = [found.edges.num_edges * (1 + self.reverse) for found in files]
        carried = [found.carried.bytes_per_edge for found in files]
        text = sum(found.edges.num_edges for found in files if found.edges.has_text)
        sizes = list(zip(keys, carried, strict=True))
        return Estimate(
            num_edges=sum(keys),
            disk_bytes=nodes + sum(count * (KEY_BYTES + 2 * EDGE_BYTES + 3 * more) for count, more in sizes),
            stored_bytes=nodes + sum(count * (EDGE_BYTES + more) for count, more in sizes),
            seconds=SECONDS_PER_KEY * sum(keys) + SECONDS_PER_LINE * text,
            headings=about_headings(*tables.edges.values()),
        )

    def _tables(self) -> TypedTables:
        return TypedTables.of(self.source, self.drop, self.time)

    def _inputs(self) -> dict[str, Any]:
        return super()._inputs() | {"time": self.time, "reverse": self.reverse}

    def _write(self, journal: Journal, on_progress: OnProgress) -> Prepared:
        tables = self._tables()
        if not self._draft.exists():
            journal.clear()
            self._draft.mkdir()
        labels = {kind: _has_fractions(path, self.drop) for kind, path in tables.nodes.items()}
        if self.float_labels and not any(labels.values()):
            raise ValueError("float_labels says that a y is a target of regression, but no type has a y of fractions.")
        counts = {
            kind: self._copy_nodes(kind, path, labels[kind], partial(on_progress, f"copying {kind}"))
            for kind, path in tables.nodes.items()
        }
        paths = {edge_type: (path, False) for edge_type, path in tables.edges.items()}
        if self.reverse:
            paths |= {edge_type: (path, True) for edge_type, path in with_reverse(tables.edges).items()}
        for edge_type, (path, flip) in paths.items():
            with within(edge_type):
                self._sort(edge_type, path, counts, flip, partial(on_progress, f"sorting {' '.join(edge_type)}"))
        about = self._merge(counts, list(paths), partial(on_progress, "putting rows together"))
        return self._describe_types(about, partial(on_progress, "taking the fingerprint"))

    def _copy_nodes(self, kind: str, path: Path, is_target: bool, progress: Progress) -> int:
        """Copy the arrays of one type; return how many nodes it has."""
        files, folder = _nodes_files(path, self.drop), self.folder / "nodes" / kind
        if not files.num_nodes:
            raise ValueError(f"{path} does not say how many nodes there are: add x, y or num_nodes.")
        if not (self._draft / "nodes" / kind).exists():
            if not (folder / "graph").exists():
                shutil.rmtree(folder, ignore_errors=True)
            (folder / "graph").mkdir(parents=True, exist_ok=True)
            nodes = NodesOfType(
                source=path,
                out=self.out,
                split=self.split if "y" in files.arrays else None,
                seed=self.seed,
                float_labels=self.float_labels and is_target,
                memory_bytes=self.memory_bytes,
                draft=folder / "graph",
            )
            with within(kind):
                nodes.copy(files, files.num_nodes, folder, progress)
                if self.time in files.arrays:
                    times = torch.from_numpy(np.load(folder / "graph" / "nodes" / f"{self.time}.npy", mmap_mode="c"))
                    check_time({str(self.time): times}, self.time, "node")
            (self._draft / "nodes").mkdir(exist_ok=True)
            os.rename(folder / "graph" / "nodes", self._draft / "nodes" / kind)
        return files.num_nodes

    def _sort(self, edge_type: EdgeType, path: Path, counts: dict[str, int], flip: bool, progress: Progress) -> None:
        """Sort the edges of one type by receiver and sender, with what they carry."""
        files, folder = _edge_files(path, self.drop), self._sorted(edge_type).parent
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(folder, {})
        if journal.get("is_sorted"):
            return
        if not self._sorted(edge_type).exists():
            (self._sorted(edge_type) / "edges").mkdir(parents=True)
        convert.check_each_name(files.carried.arrays, allowed=())
        if self.time in files.carried.arrays:
            some = torch.from_numpy(files.carried.arrays[str(self.time)].read(0, 1))
            check_time({str(self.time): some}, self.time, "edge")
        self._check_carried(files, journal)
        senders, receivers = counts[edge_type[0]], counts[edge_type[2]]
        edges = EdgesOfType(
            files=files.edges.files,
            num_edges=files.edges.num_edges,
            num_senders=senders,
            num_receivers=receivers,
            flip=flip,
        )
        out, ids = self._sorted(edge_type), max(senders, receivers)
        sort = ExternalSort(edges, files.carried, journal, out, False, self.memory_bytes, num_senders=ids)
        sort.count(receivers, lambda share: progress(share / 4))
        sort.deal(lambda share: progress((1 + share) / 4))
        sort.sort(lambda share: progress((1 + share) / 2))
        sort.finish()
        journal.record(is_sorted=True)

    def _sorted(self, edge_type: EdgeType) -> Path:
        return self.folder / "edges" / folder_of(edge_type) / "sorted"

    def _merge(self, counts: dict[str, int], edge_types: list[EdgeType], progress: Progress) -> dict[str, Any]:
        """Write the rows of all nodes, after a kill from the beginning; return what ``meta.json`` says of the types."""
        found = {}
        for edge_type in edge_types:
            file = self._draft / "nodes" / edge_type[0] / f"{self.time}.npy"
            times = map_npy(file) if self.time is not None and file.exists() else None
            found[edge_type] = SortedEdges.of(self._sorted(edge_type), self.time, times)
        merge(self._draft, found, counts, progress)
        edges = [[*edge_type, edges.senders.size] for edge_type, edges in found.items()]
        return {"nodes": [list(count) for count in counts.items()], "edges": edges, "time": self.time}

    def _describe_types(self, about: dict[str, Any], progress: Progress) -> Prepared:
        """Compute fingerprint and checksums, and write ``meta.json`` last of all."""
        files = sorted(self._draft.rglob("*.npy"))
        arrays = {str(file.relative_to(self._draft))[: -len(".npy")]: map_npy(file) for file in files}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        types = GraphTypes.saved(about, tensors)  # which looks at all lengths
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


def _nodes_files(path: Path, drop: Collection[str]) -> GraphFiles:
    """The arrays of one node type."""
    if not path.is_dir() or is_table(path):
        raise ValueError(
            f"{path} is read in memory alone: to work with less, give a folder of .npy, with nodes numbered 0, 1, 2, "
            "..., or leave --out-of-core out."
        )
    return GraphFiles.of_nodes(path, drop)


def _edge_files(path: Path, drop: Collection[str]) -> GraphFiles:
    """The edges of one type, and what they carry."""
    found = {name: file for name, file in entries(path).items() if name not in drop} if path.is_dir() else {}
    if "edge_index" not in found:
        edges = EdgeFiles.of(path, drop)
        if edges.carried:
            raise ValueError(
                f"{path}: what edges carry ({edges.carried[0]!r}) is read from .npy alone when the edges of several "
                f"types are sorted on disk: leave it out (--drop {edges.carried[0]}), or give a folder with "
                "edge_index.npy."
            )
        return GraphFiles(edges, {}, Carried({}), None)
    edges = EdgeFiles.of(found.pop("edge_index"))
    check_purposes(((name, purpose_of(name)) for name in found), path)
    rows = {ALIASES.get(name, name): RowFiles.of(file) for name, file in found.items()}
    for name, array in rows.items():
        if array.shape[:1] != (edges.num_edges,):
            raise ValueError(f"{path}: {name} has shape {array.shape}, and there are {edges.num_edges} edges.")
    return GraphFiles(edges, {}, Carried(rows), None)


def _has_fractions(path: Path, drop: Collection[str]) -> bool:
    y = _nodes_files(path, drop).arrays.get("y")
    return y is not None and y.files[0].dtype.kind == "f"
