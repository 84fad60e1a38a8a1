"""Puts the sorted edges of several types together to the rows of one graph, reading and writing forwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.rows import row_slices
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, append, write_header
from lightning_gnn_dist.graph.storage.store import map_npy, types_from
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, edge_type_dtype, folder_of, offsets_of
from lightning_gnn_dist.prepare.arrays import Progress
from lightning_gnn_dist.prepare.edges import EdgeSorting
from lightning_gnn_dist.prepare.journal import map_arrays
from lightning_gnn_dist.prepare.nodes import NodesOfType


class SortedEdges:
    """The edges of one type, sorted by receiver and sender, each counted in its type, of which pieces are written.

    Args:
        folder: Where they were sorted into.
        target: Gets what they carry.
        time: The array of times, if there is one.
        senders: The nodes of the source type, which may have times where edges have none.
    """

    def __init__(self, folder: Path, target: Path, time: str | None, senders: NodesOfType) -> None:
        self.indptr: Column = np.load(folder / "indptr.npy")
        self._senders = map_npy(folder / "indices.npy")
        self._arrays = {target / file.name: map_npy(file) for file in sorted((folder / "edges").glob("*.npy"))}
        self._times = self._arrays.get(target / f"{time}.npy")
        self._times_of_senders = senders.times(time) if self._times is None else None
        target.mkdir(parents=True)
        for file, array in self._arrays.items():
            write_header(file, array.dtype, array.shape)

    def rows(self, rows: slice) -> tuple[Column, Column]:
        """Receiver and sender of each edge into some nodes, by time; what these edges carry is written."""
        edges = slice(int(self.indptr[rows.start]), int(self.indptr[rows.stop]))
        senders = self._senders[edges]
        row = np.repeat(np.arange(rows.start, rows.stop), np.diff(self.indptr[rows.start : rows.stop + 1]))
        times = None if self._times is None else self._times[edges]
        if self._times_of_senders is not None:
            times = self._times_of_senders[senders]
        order = None if times is None else np.lexsort((times, row))  # stable: equal times stay in order of senders
        for file, array in self._arrays.items():
            append(file, array[edges] if order is None else array[edges][order])
        return row, senders if order is None else senders[order]


def merge_types(
    draft: Path,
    nodes: Mapping[str, NodesOfType],
    edges: EdgeSorting,
    edge_types: Iterable[EdgeType],
    is_shard: bool,
    progress: Progress,
) -> GraphTypes:
    """Write the rows of all nodes, after a kill from the beginning; return the types, which look at all lengths.

    That is ``indptr``, ``indices``, ``edge_type`` and what edges carry. It takes the memory of one node type: where its
    rows start, and the times of those that send to it.

    Args:
        draft: The directory of the graph. What was there of rows is removed.
        nodes: The nodes of each type.
        edges: Has sorted the edges of each type.
        edge_types: These types.
        is_shard: Whether senders are called by the ids of a larger graph.
        progress: Called with the share of the edges that is written.
    """
    folders, time, tables = {each: edges.out(each) for each in edge_types}, edges.plan.time, edges.plan.of_tables
    parts = {kind: of_kind.part for kind, of_kind in nodes.items()}
    counts = {edge_type: NpyFile.of(folder / "indices.npy").shape[0] for edge_type, folder in folders.items()}
    shutil.rmtree(draft / "edges", ignore_errors=True)
    offsets, total = offsets_of([part.num_all for part in parts.values()]), sum(counts.values())
    numbers, first = dict(zip(counts, range(len(counts)), strict=True)), dict(zip(parts, offsets, strict=False))
    dtypes = {"indices": index_dtype(offsets[-1]), "edge_type": edge_type_dtype(len(counts))}
    kinds = {name: torch.empty(0, dtype=dtype).numpy().dtype for name, dtype in dtypes.items()}
    lengths = {"indices": total, "edge_type": total, "indptr": sum(part.size for part in parts.values()) + 1}
    for name, length in lengths.items():
        (draft / f"{name}.npy").unlink(missing_ok=True)
        write_header(draft / f"{name}.npy", kinds.get(name, np.dtype(np.int64)), (length,))
    append(draft / "indptr.npy", np.zeros(1, np.int64))
    done = 0
    for kind, part in parts.items():
        own = [each for each in folders if each[2] == kind]
        places = {each: (folders[each], draft / "edges" / folder_of(each)) for each in own}
        into = {each: SortedEdges(*place, time, nodes[each[0]]) for each, place in places.items()}
        indptr = sum((edges.indptr for edges in into.values()), np.zeros(part.size + 1, np.int64))
        append(draft / "indptr.npy", indptr[1:] + done)
        for rows in row_slices(torch.from_numpy(indptr)):
            pieces = [edges.rows(rows) for edges in into.values()]
            order = np.argsort(_joined([row for row, _ in pieces], np.dtype(np.int64)), kind="stable")
            senders = [
                parts[of[0]].renumbered(ids) + np.int64(first[of[0]]) for (_, ids), of in zip(pieces, into, strict=True)
            ]
            types = [np.full(ids.size, numbers[of]) for (_, ids), of in zip(pieces, into, strict=True)]
            for name, columns in (("indices", senders), ("edge_type", types)):
                append(draft / f"{name}.npy", _joined(columns, kinds[name])[order])
            done += order.size
            progress(done / max(total, 1))
    if len(counts) == 1:
        (draft / "edge_type.npy").unlink()
    of_nodes, of_edges = [[kind, part.size] for kind, part in parts.items()], [[*each, n] for each, n in counts.items()]
    about: dict[str, Any] = {"nodes": of_nodes, "time": time, "edges": of_edges}
    about |= {"senders": list(offsets)} if is_shard else {}
    about |= {} if tables is None else {"tables": tables.about}
    return types_from(about, map_arrays(draft, sorted(draft.rglob("*.npy"))))


def _joined(columns: Sequence[Column], dtype: np.dtype[np.generic]) -> Column:
    return np.concatenate([np.empty(0, dtype), *(column.astype(dtype) for column in columns)])
