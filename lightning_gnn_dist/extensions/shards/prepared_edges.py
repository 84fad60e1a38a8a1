"""The edges of a shard: of all that are read those into own nodes are written as arrays, which are then sorted."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.rng import mix
from lightning_gnn_dist.extensions.shards.prepared_nodes import ShardPart
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.arrays import GrowingArrays, Progress
from lightning_gnn_dist.prepare.edges import EdgeSorting, OnProgress, edges_at_once, words_of
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.nodes import Part
from lightning_gnn_dist.prepare.plan import EdgeFiles, edges_in, turn_two_edges


@compiled
def add_edges(senders: Column, receivers: Column, sums: Column) -> None:
    """Add two hashes of every edge to ``sums``, two numbers of 64 bits, which do not depend on the edges' order."""
    for at in range(senders.size):
        mixed = mix(mix(np.uint64(senders[at])) ^ np.uint64(receivers[at]))
        sums[0] += mixed
        sums[1] += mix(mixed ^ np.uint64(0x9E3779B97F4A7C15))


@dataclass(frozen=True)
class ShardEdges(EdgeSorting):
    """Sorts the edges into the nodes of a shard."""

    adds_reverse: ClassVar[bool] = False  # what was gathered is both

    def sort(self, edge_type: EdgeType, as_read: EdgeType, parts: Mapping[str, Part], on_progress: OnProgress) -> None:
        super().sort(edge_type, as_read, parts, on_progress)
        shutil.rmtree(self._gathered(edge_type), ignore_errors=True)

    def files_of(
        self,
        edge_type: EdgeType,
        files: EdgeFiles,
        parts: Mapping[str, Part],
        journal: Journal,
        on_progress: OnProgress,
    ) -> EdgeFiles:
        """Those into the nodes of the shard, written into arrays."""
        receiver, folder = parts[edge_type[2]], self._gathered(edge_type)
        assert isinstance(receiver, ShardPart)
        if not journal.get("is_gathered"):
            shutil.rmtree(folder, ignore_errors=True)
            counts, digest = self._gather(
                files, receiver, folder, partial(on_progress, f"reading {words_of(edge_type)}")
            )
            told = {"is_gathered": True, "is_carried_checked": True, "counts": counts, "digest": digest}
            journal.record(sorted(folder.iterdir()), **told)
        return replace(edges_in(folder), num_senders=files.num_senders, num_receivers=receiver.size)

    def _gathered(self, edge_type: EdgeType) -> Path:
        return self.of_type(edge_type) / "gathered"

    def _gather(self, files: EdgeFiles, part: ShardPart, folder: Path, progress: Progress) -> tuple[list[int], str]:
        """Write the edges into own nodes; return how many lead into each part, as they are read, and a hash of all."""
        kind, rows_of = convert.index_dtype(max(files.num_senders or 0, files.num_receivers or 0)), files.carried.arrays
        dtype, arrays = torch.empty(0, dtype=kind).numpy().dtype, GrowingArrays(folder, folder)
        arrays.add({"edge_index": np.empty((0, 2), dtype)} | {name: rows.read(0, 0) for name, rows in rows_of.items()})
        counts, sums, seen = np.zeros(len(part.starts) - 1, np.int64), np.zeros(2, np.uint64), 0
        for sender, receiver, _ in files.pieces(edges_at_once(self.memory_bytes // 2, files.carried.bytes_per_edge)):
            carried = {name: rows.read(seen, sender.size) for name, rows in rows_of.items()}
            for name, array in carried.items():
                convert.check_finite(rows_of[name].as_tensor(array), seen, name=name, row="edge")
            counts += part.count(receiver)
            add_edges(sender, receiver, sums)
            for senders, receivers in [(sender, receiver), (receiver, sender)][: 1 + self.undirected]:
                at, places = part.rows(receivers)
                ends = np.stack([senders[at], places], 1).astype(dtype)
                arrays.add({"edge_index": ends} | {name: array[at] for name, array in carried.items()})
            seen += sender.size
            progress(seen / max(files.num_edges, 1))
        arrays.finish()
        turn_two_edges(folder / "edge_index.npy")
        return counts.tolist(), sums.tobytes().hex()
