"""Whose nodes a shard has: every node belongs to a part, and has a new number, part after part, in each in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.arrays import Progress, RowFiles
from lightning_gnn_dist.prepare.nodes import NodesOfType

NODES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class ShardPart:
    """The nodes of one of several parts. Parts number nodes one part after the other.

    Attributes:
        starts: The first number of each part, then the number of nodes.
        index: Which part is prepared.
        assignment: The part of each node, or None if parts are ranges of nodes.
        number: The new number of each node, or None if it is the old one.
    """

    starts: Column
    index: int
    assignment: Column | None = None
    number: Column | None = None

    @classmethod
    def ranges(cls, num_nodes: int, num_parts: int, index: int) -> ShardPart:
        """One of parts of consecutive nodes, with equally many or one more in each."""
        sizes = np.full(num_parts, num_nodes // num_parts)
        sizes[: num_nodes % num_parts] += 1
        return cls(np.concatenate([[0], sizes.cumsum()]), index)

    @classmethod
    def read(cls, file: Path, num_nodes: int, num_parts: int, index: int) -> ShardPart:
        """Read a ``.npy`` with the part of each node. Takes 8 to 12 bytes for every node of the graph."""
        found = NpyFile.of(file)
        if found.shape != (num_nodes,) or found.dtype.kind not in "iu":
            raise ValueError(
                f"{file} holds {found.dtype} of shape {found.shape}, and the part of each of {num_nodes:,} nodes is "
                "needed: whole numbers, one for every node."
            )
        assignment, counts = np.empty(num_nodes, np.int32), np.zeros(num_parts, np.int64)
        for first in range(0, num_nodes, NODES_AT_ONCE):
            piece = found.read(first, min(NODES_AT_ONCE, num_nodes - first))
            if not 0 <= int(piece.min()) <= int(piece.max()) < num_parts:
                raise ValueError(
                    f"{file} names parts beyond the {num_parts} shards that there are: parts must lie in "
                    f"[0, {num_parts})."
                )
            assignment[first : first + len(piece)] = piece
            counts += np.bincount(assignment[first : first + len(piece)], minlength=num_parts)
        starts = np.concatenate([[0], counts.cumsum()])
        return cls(starts, index, assignment, _number(assignment, starts))

    @property
    def num_all(self) -> int:
        """How many nodes all parts have."""
        return int(self.starts[-1])

    @property
    def size(self) -> int:
        """How many nodes the part has."""
        return int(self.starts[self.index + 1] - self.starts[self.index])

    @property
    def nodes(self) -> Column:
        """The nodes of the part, by their old numbers."""
        if self.assignment is None:
            return np.arange(self.starts[self.index], self.starts[self.index + 1])
        return np.flatnonzero(self.assignment == self.index)

    def rows(self, nodes: Column) -> tuple[Column, Column]:
        """The positions of the part's nodes in ``nodes``, and their numbers within the part, from 0."""
        first, end = self.starts[self.index : self.index + 2]
        is_own = (nodes >= first) & (nodes < end) if self.assignment is None else self.assignment[nodes] == self.index
        places = np.flatnonzero(is_own)
        return places, self.renumbered(nodes[places]) - first

    def count(self, nodes: Column) -> Column:
        """How many of ``nodes`` are of each part."""
        if self.assignment is None:
            parts = np.searchsorted(self.starts, nodes, side="right") - 1
        else:
            parts = self.assignment[nodes]
        return np.bincount(parts, minlength=len(self.starts) - 1)

    def renumbered(self, nodes: Column) -> Column:
        """The new numbers of some nodes."""
        return nodes if self.number is None else self.number[nodes]

    @property
    def digest(self) -> str:
        """A hash of the parts' sizes and of the assignment."""
        told = hashlib.blake2b(self.starts.astype(np.int64).tobytes(), digest_size=16)
        if self.assignment is not None:
            told.update(self.assignment.data)
        return told.hexdigest()


def _number(assignment: Column, starts: Column) -> Column:
    """The new number of each node, computed in pieces."""
    dtype = np.int32 if assignment.size <= np.iinfo(np.int32).max else np.int64
    number = np.empty(assignment.size, dtype)
    free, num_parts = starts[:-1].copy(), len(starts) - 1
    for first in range(0, assignment.size, NODES_AT_ONCE):
        piece = assignment[first : first + NODES_AT_ONCE]
        order, counts = np.argsort(piece, kind="stable"), np.bincount(piece, minlength=num_parts)
        number[first + order] = np.arange(piece.size) + (free - (counts.cumsum() - counts)).repeat(counts)
        free += counts
    return number


@dataclass(frozen=True, kw_only=True)
class NodesOfShard(NodesOfType):
    """The nodes of one type in a shard. They carry their ids in ``n_id``."""

    part: ShardPart

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys([*super().names, "n_id"])]

    def own(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        own = torch.from_numpy(self.part.nodes)
        return {"n_id": own} | {name: array[own] for name, array in arrays.items()}

    def own_rows(self, name: str, rows: RowFiles, progress: Progress) -> Iterator[tuple[int, Column]]:
        for first, piece in self.pieces(name, rows):
            at, places = self.part.rows(np.arange(first, first + len(piece)))
            if places.size:
                yield int(places[0]), piece[at]
            progress((first + len(piece)) / max(rows.shape[0], 1))
