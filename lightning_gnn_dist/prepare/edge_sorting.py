"""Sorts the edges of each type on disk, those into own nodes alone; a graph without types is one of one type."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.typed.build import check_time
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.prepare.edges import EdgesOfType, SomeEdges, edges_of_arrays, edges_of_table, gather
from lightning_gnn_dist.prepare.external_sort import ExternalSort
from lightning_gnn_dist.prepare.files.graph_files import GraphFiles
from lightning_gnn_dist.prepare.files.inputs import Inputs, edge_files
from lightning_gnn_dist.prepare.files.row_files import RowFiles
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.nodes import MAX_BYTES_AT_ONCE
from lightning_gnn_dist.prepare.numbering import Numbering, Part


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

    def count(self, on_progress: Callable[[str, float], None]) -> int:
        """Count the nodes that the edges of a graph without types name."""
        (edge_type,) = self.inputs.edges
        files, everything = self.inputs.edges_of(edge_type), Numbering.spread(0, 1)
        sort = self._sort(edge_type, self._edges(files, None, None, False), files, everything, self.journal(edge_type))
        return sort.count(None, partial(on_progress, "counting edges"))

    def sort(
        self,
        edge_type: EdgeType,
        as_read: EdgeType,
        flip: bool,
        parts: Mapping[str, Part],
        on_progress: Callable[[str, float], None],
    ) -> None:
        """Sort the edges of one type, with what they carry. Those of ``as_read`` are read, and flipped if so said."""
        journal, gathered = self.journal(edge_type), self._folder(edge_type) / "gathered"
        if journal.get("is_sorted"):
            return
        words = " ".join(edge_type).strip() or "edges"
        if self.is_shard or self.inputs.has_table_of_edges(as_read):
            self._gather(edge_type, as_read, flip, parts, journal, partial(on_progress, f"reading {words}"))
            files, flip = edge_files(gathered), False
        else:
            files = self.inputs.edges_of(as_read)
        self._check_carried(files, journal)
        sender, receiver = parts[edge_type[0]], parts[edge_type[2]]
        edges = self._edges(files, sender.num_all, receiver.size, flip)
        sort = self._sort(edge_type, edges, files, sender.numbering, journal)
        sort.count(receiver.size, partial(on_progress, f"counting {words}"))
        sort.deal(partial(on_progress, f"dealing {words} into buckets"))
        sort.sort(partial(on_progress, f"sorting {words}"))
        sort.finish()
        journal.record(is_sorted=True)
        shutil.rmtree(gathered, ignore_errors=True)

    def journal(self, edge_type: EdgeType) -> Journal:
        """What is done of a type: ``digest`` and ``counts`` tell of all edges, if only some were kept."""
        self._folder(edge_type).mkdir(parents=True, exist_ok=True)
        return Journal(self._folder(edge_type), {})

    def out(self, edge_type: EdgeType) -> Path:
        """The folder of the sorted edges. Those of a graph without types are its rows already."""
        return self._folder(edge_type) / "sorted" if self.inputs.have_names else self.draft

    def _folder(self, edge_type: EdgeType) -> Path:
        return self.folder / "edges" / folder_of(edge_type)

    def _edges(self, files: GraphFiles, num_senders: int | None, num_receivers: int | None, flip: bool) -> EdgesOfType:
        return EdgesOfType(
            files=files.edges.files,
            num_edges=files.edges.num_edges,
            num_senders=num_senders,
            num_receivers=num_receivers,
            flip=flip,
            has_name=self.inputs.have_names,
        )

    def _sort(
        self, edge_type: EdgeType, edges: EdgesOfType, files: GraphFiles, of_senders: Numbering, journal: Journal
    ) -> ExternalSort:
        out, num_ids = self.out(edge_type), max(edges.num_senders or 0, edges.num_receivers or 0)
        (out / "edges" if files.carried.arrays else out).mkdir(parents=True, exist_ok=True)
        return ExternalSort(
            edges,
            files.carried,
            journal,
            out,
            both_ways=self.undirected and not self.is_shard,
            memory_bytes=self.memory_bytes,
            once=self.undirected,
            num_senders=num_ids or None,
            number=None if self.inputs.have_names else of_senders.number,
        )

    def _gather(
        self,
        edge_type: EdgeType,
        as_read: EdgeType,
        flip: bool,
        parts: Mapping[str, Part],
        journal: Journal,
        progress: Progress,
    ) -> None:
        """Write the edges of a type into the nodes of the part as arrays."""
        folder = self._folder(edge_type) / "gathered"
        if journal.get("is_gathered"):
            return
        told = [blake2b(digest_size=16) for _ in range(1 if self.inputs.have_names else 2) if self.is_shard]
        shutil.rmtree(folder, ignore_errors=True)
        counts = gather(
            self._pieces(edge_type, as_read, flip, parts),
            parts[edge_type[2]],
            parts[edge_type[0]].num_all,
            self.undirected and self.is_shard,
            folder,
            self.inputs.edges[as_read],
            told,
            progress,
        )
        digests = [digest.hexdigest() for digest in told]
        journal.record(sorted(folder.iterdir()), is_gathered=True, counts=counts.tolist(), digest=digests)

    def _pieces(
        self, edge_type: EdgeType, as_read: EdgeType, flip: bool, parts: Mapping[str, Part]
    ) -> Iterable[SomeEdges]:
        """All edges of a type, in pieces."""
        inputs, at_once = self.inputs, self.memory_bytes // 2
        if not inputs.has_table_of_edges(as_read):
            files, sizes = inputs.edges_of(as_read), (parts[edge_type[0]].num_all, parts[edge_type[2]].num_all)
            return edges_of_arrays(self._edges(files, *sizes, flip), files.carried, at_once)
        nodes, path = {}, inputs.edges[as_read]
        for kind in as_read[::2]:
            has_ids = inputs.have_names and inputs.table_of_nodes(kind) is not None
            ids = self.folder / "nodes" / kind / "ids.npy" if has_ids else None
            nodes[kind] = inputs.nodes[kind] or path, ids, parts[kind].num_all
        return edges_of_table(path, as_read, flip, nodes, inputs.drop, self.time, at_once)

    def _check_carried(self, files: GraphFiles, journal: Journal) -> None:
        """Refuse what edges carry if it has a name, or values, that a graph cannot have: later only bytes are moved."""
        carried = files.carried.arrays
        convert.check_each_name(carried, allowed=())
        check_times(carried, self.time, "edge")
        if journal.get("is_carried_checked"):
            return
        for name, rows in carried.items():
            first = 0
            for piece in rows.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
                convert.check_finite(torch.from_numpy(piece), first, name=name, row="edge")
                first += len(piece)
        journal.record(is_carried_checked=True)


def check_times(arrays: Mapping[str, RowFiles], time: str | None, row: str) -> None:
    """Refuse times that are not one number for each ``row``, a node or an edge, and those of nodes that are NaN."""
    if time is None or time not in arrays:
        return
    check_time({time: torch.from_numpy(arrays[time].read(0, 1))}, time, row)
    if row == "node":
        check_time({time: torch.from_numpy(arrays[time].load())}, time, row)
