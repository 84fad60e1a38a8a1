"""Sorts the edges of each type on disk, those into own nodes alone; a graph without types is one of one type."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.prepare.files.arrays import entries
from lightning_gnn_dist.prepare.files.edge_files import EdgeFiles
from lightning_gnn_dist.prepare.files.inputs import Inputs, edge_files
from lightning_gnn_dist.prepare.files.row_files import RowFiles
from lightning_gnn_dist.prepare.steps.edges import EdgeReader, gather
from lightning_gnn_dist.prepare.steps.external_sort import ExternalSort
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import MAX_BYTES_AT_ONCE
from lightning_gnn_dist.prepare.steps.numbering import Part

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class EdgeSorting:
    """How the edges of a graph are sorted by receiver and sender.

    Args:
        inputs: The files.
        folder: The folder in which the work is done.
        draft: Gets the sorted edges of a graph without types.
        is_shard: Whether the edges into some nodes alone are kept.
        undirected: Add the reverse of every edge, and keep every edge once.
        time: The array of times, if there is one.
        memory_bytes: Bytes that reading and sorting may take.
    """

    inputs: Inputs
    folder: Path
    draft: Path
    is_shard: bool
    undirected: bool
    time: str | None
    memory_bytes: int

    def count(self, on_progress: OnProgress) -> int:
        """Count the nodes that the edges of a graph without types name."""
        (edge_type,) = self.inputs.edges
        journal = self.journal(edge_type)
        files = self._in_arrays(edge_type, edge_type, {}, journal, on_progress)
        return self._sort(edge_type, files, {}, journal).count(None, partial(on_progress, "counting edges"))

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        """Sort the edges of one type, with what they carry. Those of ``as_read`` are read, turned round if another."""
        journal = self.journal(edge_type)
        if journal.get("is_sorted"):
            return
        files = self._in_arrays(edge_type, as_read, parts, journal, on_progress)
        self._check_carried(files, journal)
        words, sort = _words(edge_type), self._sort(edge_type, files, parts, journal)
        sort.count(parts[edge_type[2]].size, partial(on_progress, f"counting {words}"))
        sort.deal(partial(on_progress, f"dealing {words} into buckets"))
        sort.sort(partial(on_progress, f"sorting {words}"))
        sort.finish()
        journal.record(is_sorted=True)
        shutil.rmtree(self._gathered(edge_type), ignore_errors=True)

    def journal(self, edge_type: EdgeType) -> Journal:
        """What is done of a type: ``digest`` and ``counts`` tell of all edges, if only some were kept."""
        self._folder(edge_type).mkdir(parents=True, exist_ok=True)
        return Journal(self._folder(edge_type), {})

    def out(self, edge_type: EdgeType) -> Path:
        """The folder of the sorted edges. Those of a graph without types are its rows already."""
        return self._folder(edge_type) / "sorted" if self.inputs.have_names else self.draft

    def _folder(self, edge_type: EdgeType) -> Path:
        return self.folder / "edges" / folder_of(edge_type)

    def _gathered(self, edge_type: EdgeType) -> Path:
        return self._folder(edge_type) / "gathered"

    def _sort(self, edge_type: EdgeType, files: EdgeFiles, parts: Mapping[str, Part], journal: Journal) -> ExternalSort:
        out, num_ids = self.out(edge_type), max(files.num_senders or 0, files.num_receivers or 0)
        (out / "edges" if files.carried.arrays else out).mkdir(parents=True, exist_ok=True)
        return ExternalSort(
            files,
            journal,
            out,
            both_ways=self.undirected and not self.is_shard,
            once=self.undirected,
            memory_bytes=self.memory_bytes,
            num_senders=num_ids or None,
            number=None if self.inputs.have_names or not parts else parts[edge_type[0]].numbering.number,
        )

    def _in_arrays(
        self,
        edge_type: EdgeType,
        as_read: EdgeType,
        parts: Mapping[str, Part],
        journal: Journal,
        on_progress: OnProgress,
    ) -> EdgeFiles:
        """The edges of a type in arrays: those of tables, and those of a shard, are written into some."""
        sender, receiver = parts.get(edge_type[0]), parts.get(edge_type[2])
        files = replace(
            self.inputs.edges[as_read],
            num_senders=None if sender is None else sender.num_all,
            num_receivers=None if receiver is None else receiver.num_all,
            flip=edge_type != as_read,
        )
        if not self.is_shard and not files.tables:
            return files
        if not journal.get("is_gathered"):
            progress = partial(on_progress, f"reading {_words(edge_type)}")
            self._gather(files, edge_type, as_read, receiver, journal, progress)
        found, size = (
            edge_files(folder := self._gathered(edge_type), entries(folder)),
            None if receiver is None else receiver.size,
        )
        return replace(found, num_senders=files.num_senders, num_receivers=size)

    def _gather(
        self,
        files: EdgeFiles,
        edge_type: EdgeType,
        as_read: EdgeType,
        receiver: Part | None,
        journal: Journal,
        progress: Callable[[float], None],
    ) -> None:
        """Write the edges of a type, or those into the nodes of the shard, as arrays."""
        folder = self._gathered(edge_type)
        told = [blake2b(digest_size=16) for _ in range(1 if self.inputs.have_names else 2) if self.is_shard]
        nodes = {kind: self._ids_of(kind) for kind in as_read[::2]}
        edges = EdgeReader(files, as_read, nodes, self.time, self.memory_bytes // 2)
        most = None if files.num_senders is None else max(files.num_senders, files.num_receivers or 0)
        dtype = torch.empty(0, dtype=torch.int64 if most is None else convert.index_dtype(most)).numpy().dtype
        shutil.rmtree(folder, ignore_errors=True)
        part = receiver if self.is_shard else None
        source = files.tables[0] if files.tables else folder
        counts = gather(edges, part, dtype, self.undirected and self.is_shard, folder, source, told, progress)
        digests = [digest.hexdigest() for digest in told]
        journal.record(sorted(folder.iterdir()), is_gathered=True, counts=counts, digest=digests)

    def _ids_of(self, kind: str) -> tuple[Path, Path | None]:
        """Where the nodes of a type are, and the file of their ids if that is a table."""
        files = self.inputs.nodes[kind]
        return files.source, None if files.table is None else self.folder / "nodes" / kind / "ids.npy"

    def _check_carried(self, files: EdgeFiles, journal: Journal) -> None:
        """Refuse what edges carry if it has a name, or values, that a graph cannot have: later only bytes are moved."""
        carried = files.carried.arrays
        convert.check_each_name(carried, allowed=())
        check_times(carried, self.time, "edge")
        if journal.get("is_carried_checked"):
            return
        for name, rows in carried.items():
            first = 0
            for piece in rows.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
                convert.check_finite(rows.as_tensor(piece), first, name=name, row="edge")
                first += len(piece)
        journal.record(is_carried_checked=True)


def check_times(arrays: Mapping[str, RowFiles], time: str | None, row: str) -> None:
    """Refuse times that are not one number for each ``row``, a node or an edge, and those of nodes that are NaN."""
    if time is None or time not in arrays:
        return
    rows = arrays[time]
    convert.check_time({time: rows.as_tensor(rows.read(0, 1))}, time, row)
    if row == "node":
        convert.check_time({time: rows.as_tensor(rows.load())}, time, row)


def _words(edge_type: EdgeType) -> str:
    return " ".join(edge_type).strip() or "edges"
