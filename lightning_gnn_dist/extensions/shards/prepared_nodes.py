"""The nodes of a shard, and their arrays: read by one host, or by all ranks, a share each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.shards.prepared_part import ShardPart
from lightning_gnn_dist.extensions.shards.shared_reading import Read, Reading
from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files.arrays import Progress, RowFiles
from lightning_gnn_dist.prepare.steps.nodes import NodesOfType


@dataclass(frozen=True, kw_only=True)
class NodesOfShard(NodesOfType):
    """The nodes of one type in a shard. They carry their ids in ``n_id``.

    Args:
        part: Which they are.
        reading: Who reads the files.
    """

    part: ShardPart
    reading: Reading

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys([*super().names, "n_id"])]

    def copy(self, folder: Path, target: Path, progress: Progress) -> None:
        if target.exists():  # another rank, which was stopped, has not copied all of its own
            os.rename(target, folder / "graph")
        super().copy(folder, target, progress)

    def write(self, draft: Path, progress: Progress) -> None:
        super().write(draft, progress)
        self.reading.each(0)  # all have copied theirs, for which they asked the others

    def own(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        own = torch.from_numpy(self.part.nodes)
        return {"n_id": own} | {name: array[own] for name, array in arrays.items()}

    def share(self, rows: RowFiles) -> range:
        return self.reading.share(rows.shape[0])

    def whole(self, own: Column) -> Column:
        return self.reading.whole(own)

    def own_rows(self, name: str, rows: RowFiles, progress: Progress) -> Iterator[tuple[int, Column]]:
        read = Span(self, name, rows)
        for received in self.reading.dealt(read, self.part):
            yield from ((int(places[0]), found[name]) for _, found, places in received if places.size)
            progress(read.done / max(len(self.share(rows)), 1))

    @property
    def bytes_at_once(self) -> int:
        return super().bytes_at_once // self.reading.num_readers


@dataclass
class Span:
    """Rows of consecutive nodes, read in pieces, and how many were read.

    Args:
        nodes: Whose they are.
        name: The name of the array.
        rows: The array.
    """

    nodes: NodesOfShard
    name: str
    rows: RowFiles
    done: int = 0

    def __iter__(self) -> Iterator[Read]:
        for first, piece in self.nodes.pieces(self.name, self.rows):
            self.done += len(piece)
            yield Read({self.name: piece}, np.arange(first, first + len(piece)))
