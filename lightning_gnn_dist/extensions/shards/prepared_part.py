"""Whose nodes a shard has: every node belongs to a part, and has a new number, part after part, in each in order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.extensions.shards.shared_reading import Reading
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile

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
    index: int = 0
    assignment: Column | None = None
    number: Column | None = None

    @classmethod
    def ranges(cls, num_nodes: int, num_parts: int = 1, index: int = 0) -> ShardPart:
        """One of parts of consecutive nodes, with equally many or one more in each."""
        sizes = np.full(num_parts, num_nodes // num_parts)
        sizes[: num_nodes % num_parts] += 1
        return cls(np.concatenate([[0], sizes.cumsum()]), index)

    @classmethod
    def read(cls, file: Path, num_nodes: int, num_parts: int, index: int, reading: Reading) -> ShardPart:
        """Read a ``.npy`` with the part of each node. Takes 8 to 12 bytes for every node of the graph."""
        found = NpyFile.of(file)
        if found.shape != (num_nodes,) or found.dtype.kind not in "iu":
            raise ValueError(
                f"{file} holds {found.dtype} of shape {found.shape}, and the part of each of {num_nodes:,} nodes is "
                "needed: whole numbers, one for every node."
            )
        share = reading.share(num_nodes)
        own = np.empty(len(share), np.int32)
        for first in range(0, own.size, NODES_AT_ONCE):
            piece = found.read(share.start + first, min(NODES_AT_ONCE, own.size - first))
            own[first : first + len(piece)] = piece.clip(-1, num_parts)  # all ranks then refuse what is beyond
        assignment = reading.whole(own)
        if num_nodes and not 0 <= int(assignment.min()) <= int(assignment.max()) < num_parts:
            raise ValueError(
                f"{file} names parts beyond the {num_parts} shards that there are: parts must lie in [0, {num_parts})."
            )
        return cls.of(assignment, num_parts, index)

    @classmethod
    def of(cls, assignment: Column, num_parts: int, index: int) -> ShardPart:
        """A part of a division that says the part of each node, as int32."""
        counts = np.zeros(num_parts, np.int64)
        for first in range(0, assignment.size, NODES_AT_ONCE):
            counts += np.bincount(assignment[first : first + NODES_AT_ONCE], minlength=num_parts)
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

    def split(self, nodes: Column) -> list[tuple[Column, Column]]:
        """For each part the positions of its nodes in ``nodes``, and their numbers within it, from 0."""
        parts = self._parts_of(nodes)
        order = np.argsort(parts.astype(np.min_scalar_type(len(self.starts))), kind="stable")
        ends = np.bincount(parts, minlength=len(self.starts) - 1).cumsum()
        numbers = self.renumbered(nodes).astype(_dtype(self.num_all))  # they travel
        places = zip(np.split(order, ends[:-1]), self.starts[:-1].astype(numbers.dtype), strict=True)
        return [(at, numbers[at] - first) for at, first in places]

    def count(self, nodes: Column) -> Column:
        """How many of ``nodes`` are of each part."""
        return np.bincount(self._parts_of(nodes), minlength=len(self.starts) - 1)

    def _parts_of(self, nodes: Column) -> Column:
        if self.assignment is None:
            return np.searchsorted(self.starts, nodes, side="right") - 1
        return self.assignment[nodes]

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


def _dtype(num_nodes: int) -> type[np.signedinteger[Any]]:
    return np.int32 if num_nodes <= np.iinfo(np.int32).max else np.int64


def _number(assignment: Column, starts: Column) -> Column:
    """The new number of each node, computed in pieces."""
    number = np.empty(assignment.size, _dtype(assignment.size))
    free, num_parts = starts[:-1].copy(), len(starts) - 1
    for first in range(0, assignment.size, NODES_AT_ONCE):
        piece = assignment[first : first + NODES_AT_ONCE]
        order, counts = np.argsort(piece, kind="stable"), np.bincount(piece, minlength=num_parts)
        number[first + order] = np.arange(piece.size) + (free - (counts.cumsum() - counts)).repeat(counts)
        free += counts
    return number
