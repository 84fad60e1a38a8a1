"""Puts the sorted edges of several types together to the rows of one graph, reading and writing forwards."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.rows import row_slices
from lightning_gnn_dist.graph.storage.npy import Column, append, save, write_header
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.graph.typed.types import GraphTypes, edge_type_dtype, offsets_of
from lightning_gnn_dist.prepare.files.text_tables import Progress
from lightning_gnn_dist.prepare.one_shard import Part
from lightning_gnn_dist.prepare.steps.describe import map_arrays
from lightning_gnn_dist.prepare.steps.nodes import NodesOfType


@dataclass(frozen=True, eq=False)
class SortedEdges:
    """The edges of one type, sorted by receiver and sender, each counted in its type.

    Args:
        indptr: Where each receiver's row starts.
        senders: The senders, row after row.
        arrays: What the edges carry.
        times: The time of each edge, or None.
        times_of_senders: The time of each node of the source type, where edges have none.
    """

    indptr: Column
    senders: Column
    arrays: dict[str, Column]
    times: Column | None
    times_of_senders: Column | None

    @classmethod
    def of(cls, folder: Path, time: str | None, times_of_senders: Column | None) -> SortedEdges:
        """Map what was sorted into a folder."""
        arrays = {file.stem: map_npy(file) for file in sorted((folder / "edges").glob("*.npy"))}
        times = None if time is None else arrays.get(time)
        own = None if times is not None else times_of_senders
        return cls(np.load(folder / "indptr.npy"), map_npy(folder / "indices.npy"), arrays, times, own)

    def begin(self, target: Path) -> None:
        """Make the files of what the edges carry, without their rows."""
        target.mkdir(parents=True)
        for name, array in self.arrays.items():
            write_header(target / f"{name}.npy", array.dtype, array.shape)

    def rows(self, rows: slice, target: Path) -> tuple[Column, Column]:
        """Receiver and sender of each edge into some nodes, by time; what these edges carry is written."""
        edges = slice(int(self.indptr[rows.start]), int(self.indptr[rows.stop]))
        senders = self.senders[edges]
        row = np.repeat(np.arange(rows.start, rows.stop), np.diff(self.indptr[rows.start : rows.stop + 1]))
        times = None if self.times is None else self.times[edges]
        if self.times_of_senders is not None:
            times = self.times_of_senders[senders]
        order = None if times is None else np.lexsort((times, row))  # stable: equal times stay in order of senders
        for name, array in self.arrays.items():
            append(target / f"{name}.npy", array[edges] if order is None else array[edges][order])
        return row, senders if order is None else senders[order]


def merge_types(
    draft: Path,
    nodes: Mapping[str, NodesOfType],
    folders: Mapping[EdgeType, Path],
    time: str | None,
    is_shard: bool,
    tables: Tables | None,
    progress: Progress,
) -> GraphTypes:
    """Write the rows of all nodes, after a kill from the beginning; return the types, which look at all lengths.

    Args:
        draft: The directory of the graph.
        nodes: The nodes of each type.
        folders: Where the sorted edges of each type are.
        time: The array of times, if there is one.
        is_shard: Whether senders are called by the ids of a larger graph.
        tables: What became of the tables of a database.
        progress: Called with the share of the edges that is written.
    """
    found, parts = {}, {kind: of_kind.part for kind, of_kind in nodes.items()}
    for edge_type, folder in folders.items():
        found[edge_type] = SortedEdges.of(folder, time, nodes[edge_type[0]].times(time))
    merge(draft, found, parts, progress)
    about: dict[str, Any] = {"nodes": [[kind, part.size] for kind, part in parts.items()], "time": time}
    about["edges"] = [[*edge_type, edges.senders.size] for edge_type, edges in found.items()]
    if is_shard:
        about["senders"] = list(offsets_of([part.num_all for part in parts.values()]))
    if tables is not None:
        about["tables"] = tables.about
    return GraphTypes.saved(about, map_arrays(draft, sorted(draft.rglob("*.npy"))))


def merge(draft: Path, found: Mapping[EdgeType, SortedEdges], parts: Mapping[str, Part], progress: Progress) -> None:
    """Write ``indptr``, ``indices``, ``edge_type`` and what edges carry. What was there of it is removed.

    Args:
        draft: The directory of the graph.
        found: The edges of each type.
        parts: The nodes of each type that are written.
        progress: Called with the share of the edges that is written.
    """
    shutil.rmtree(draft / "edges", ignore_errors=True)
    offsets = offsets_of([part.num_all for part in parts.values()])
    total, numbers = (
        sum(edges.senders.size for edges in found.values()),
        dict(zip(found, range(len(found)), strict=True)),
    )
    first = dict(zip(parts, offsets, strict=False))
    dtypes = {"indices": index_dtype(offsets[-1]), "edge_type": edge_type_dtype(len(found))}
    kinds = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in dtypes.items()}
    for name, dtype in kinds.items():
        (draft / f"{name}.npy").unlink(missing_ok=True)
        write_header(draft / f"{name}.npy", dtype, (total,))
    for edge_type, edges in found.items():
        edges.begin(draft / "edges" / folder_of(edge_type))
    ends, done = [np.zeros(1, np.int64)], 0
    for kind, part in parts.items():
        into = [edge_type for edge_type in found if edge_type[2] == kind]
        indptr = sum((found[edge_type].indptr for edge_type in into), np.zeros(part.size + 1, np.int64))
        for rows in row_slices(torch.from_numpy(indptr)):
            pieces = [found[edge_type].rows(rows, draft / "edges" / folder_of(edge_type)) for edge_type in into]
            order = np.argsort(_joined([row for row, _ in pieces], np.dtype(np.int64)), kind="stable")
            senders = [
                parts[of[0]].renumbered(ids) + np.int64(first[of[0]]) for (_, ids), of in zip(pieces, into, strict=True)
            ]
            types = [np.full(ids.size, numbers[of]) for (_, ids), of in zip(pieces, into, strict=True)]
            for name, columns in (("indices", senders), ("edge_type", types)):
                append(draft / f"{name}.npy", _joined(columns, kinds[name])[order])
            done += order.size
            progress(done / max(total, 1))
        ends.append(indptr[1:] + ends[-1][-1])
    save(draft / "indptr.npy", np.concatenate(ends))
    if len(found) == 1:
        (draft / "edge_type.npy").unlink()


def _joined(columns: Sequence[Column], dtype: np.dtype[np.generic]) -> Column:
    return np.concatenate([np.empty(0, dtype), *(column.astype(dtype) for column in columns)])
