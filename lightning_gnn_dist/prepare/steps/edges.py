"""The edges of each type, sorted on disk by receiver and sender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.prepare.files.arrays import RowFiles
from lightning_gnn_dist.prepare.files.inputs import EdgeFiles, Inputs
from lightning_gnn_dist.prepare.steps.external_sort import ExternalSort
from lightning_gnn_dist.prepare.steps.journal import Journal
from lightning_gnn_dist.prepare.steps.nodes import MAX_BYTES_AT_ONCE, Part

OnProgress: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True)
class EdgeSorting:
    """How the edges of a graph are sorted by receiver and sender.

    Args:
        inputs: The files.
        folder: The folder in which the work is done.
        draft: Gets the sorted edges of a graph without types.
        undirected: Add the reverse of every edge, and keep every edge once.
        memory_bytes: Bytes that reading and sorting may take.
    """

    inputs: Inputs
    folder: Path
    draft: Path
    undirected: bool
    memory_bytes: int

    def count(self, on_progress: OnProgress) -> int:
        """Count the nodes that the edges of a graph without types name."""
        ((edge_type, files),) = self.inputs.edges.items()
        sort = self._sort(edge_type, files, {}, self.journal(edge_type))
        return sort.count(None, partial(on_progress, "counting edges"))

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        """Sort the edges of one type, with what they carry. Those of ``as_read`` are read, turned round if another."""
        journal, words = self.journal(edge_type), words_of(edge_type)
        if journal.get("is_sorted"):
            return
        given = self.inputs.edges[as_read]
        of_ends, flip = [parts[kind].num_all for kind in edge_type[::2]], given.flip or edge_type != as_read
        turned = replace(given, num_senders=of_ends[0], num_receivers=of_ends[1], flip=flip)
        files = self.files_of(edge_type, turned, parts, journal, on_progress)
        self._check_carried(files, journal)
        sort = self._sort(edge_type, files, parts, journal)
        sort.count(parts[edge_type[2]].size, partial(on_progress, f"counting {words}"))
        bounds, sizes = sort.deal(partial(on_progress, f"dealing {words} into buckets"))
        sort.sort(bounds, sizes, partial(on_progress, f"sorting {words}"))
        journal.record(sorted(self.out(edge_type).rglob("*.npy")), is_sorted=True)

    def files_of(
        self,
        edge_type: EdgeType,
        files: EdgeFiles,
        parts: Mapping[str, Part],
        journal: Journal,
        on_progress: OnProgress,
    ) -> EdgeFiles:
        """The edges of a type that are sorted: all."""
        return files

    def journal(self, edge_type: EdgeType) -> Journal:
        """What is done of a type."""
        self.of_type(edge_type).mkdir(parents=True, exist_ok=True)
        return Journal(self.of_type(edge_type), {})

    def out(self, edge_type: EdgeType) -> Path:
        """The folder of the sorted edges. Those of a graph without types are its rows already."""
        return self.of_type(edge_type) / "sorted" if self.inputs.have_names else self.draft

    def of_type(self, edge_type: EdgeType) -> Path:
        """The folder in which the edges of a type are worked on."""
        return self.folder / "edges" / folder_of(edge_type)

    @property
    def both_ways(self) -> bool:
        """Whether the reverse of every edge is still to be added."""
        return self.undirected

    def _sort(self, edge_type: EdgeType, files: EdgeFiles, parts: Mapping[str, Part], journal: Journal) -> ExternalSort:
        out, num_ids = self.out(edge_type), max(files.num_senders or 0, files.num_receivers or 0)
        (out / "edges" if files.carried.arrays else out).mkdir(parents=True, exist_ok=True)
        return ExternalSort(
            files,
            journal,
            out,
            both_ways=self.both_ways,
            once=self.undirected,
            memory_bytes=self.memory_bytes,
            num_senders=num_ids or None,
            number=None if self.inputs.have_names or not parts else parts[edge_type[0]].number,
        )

    def _check_carried(self, files: EdgeFiles, journal: Journal) -> None:
        """Refuse what edges carry if it has a name, or values, that a graph cannot have: later only bytes are moved."""
        carried = files.carried.arrays
        convert.check_each_name(carried, allowed=())
        check_times(carried, self.inputs.time, "edge")
        if journal.get("is_carried_checked"):
            return
        for name, rows in carried.items():
            first = 0
            for piece in rows.pieces(0, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
                convert.check_finite(rows.as_tensor(piece), first, name=name, row="edge")
                first += len(piece)
        journal.record(is_carried_checked=True)


def check_times(arrays: Mapping[str, RowFiles], time: str | None, row: str) -> None:
    """Refuse times that are not one number for each ``row``, a node or an edge."""
    if time is not None and time in arrays:
        rows = arrays[time]
        convert.check_time({time: rows.as_tensor(rows.read(0, 1))}, time, row)


def words_of(edge_type: EdgeType) -> str:
    """A type in words."""
    return " ".join(edge_type).strip() or "edges"
