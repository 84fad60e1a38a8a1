"""Which part owns each node, and the node's new number: part after part, within each in increasing order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, NpyFile

NODES_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Numbering:
    """A part and a new number for every node.

    Attributes:
        bounds: The first number of each part, then the number of nodes.
        assignment: The part of each node, or None if parts are ranges of nodes.
        number: The new number of each node, or None if it is the old one.
    """

    bounds: Column
    assignment: Column | None = None
    number: Column | None = None

    @classmethod
    def ranges(cls, num_nodes: int, num_parts: int) -> Numbering:
        """Parts of consecutive nodes, with equally many or one more in each."""
        sizes = np.full(num_parts, num_nodes // num_parts)
        sizes[: num_nodes % num_parts] += 1
        return cls(np.concatenate([[0], sizes.cumsum()]))

    @classmethod
    def read(cls, file: Path, num_nodes: int, num_parts: int) -> Numbering:
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
            if int(piece.min()) < 0 or int(piece.max()) >= num_parts:
                raise ValueError(
                    f"{file} names parts {int(piece.min())} to {int(piece.max())}, but there are {num_parts} shards: "
                    f"parts must lie in [0, {num_parts})."
                )
            assignment[first : first + len(piece)] = piece
            counts += np.bincount(piece, minlength=num_parts)
        bounds = np.concatenate([[0], counts.cumsum()])
        return cls(bounds, assignment, _number(assignment, bounds))

    def owned(self, part: int) -> Column:
        """The nodes of a part, by their old numbers."""
        if self.assignment is None:
            return np.arange(self.bounds[part], self.bounds[part + 1])
        return np.flatnonzero(self.assignment == part)

    def rows(self, part: int, nodes: Column) -> tuple[Column, Column]:
        """The positions of a part's nodes in ``nodes``, and their numbers within the part, from 0."""
        if self.assignment is None or self.number is None:
            places = np.flatnonzero((nodes >= self.bounds[part]) & (nodes < self.bounds[part + 1]))
            return places, nodes[places] - self.bounds[part]
        places = np.flatnonzero(self.assignment[nodes] == part)
        return places, self.number[nodes[places]] - self.bounds[part]

    def count(self, nodes: Column) -> Column:
        """How many of ``nodes`` are of each part."""
        parts = (
            np.searchsorted(self.bounds, nodes, side="right") - 1 if self.assignment is None else self.assignment[nodes]
        )
        return np.bincount(parts, minlength=len(self.bounds) - 1)

    def renumbered(self, nodes: Column) -> Column:
        """The new numbers of some nodes."""
        return nodes if self.number is None else self.number[nodes]

    @property
    def digest(self) -> str:
        """A hash of the parts' sizes and of the assignment."""
        told = hashlib.blake2b(self.bounds.astype(np.int64).tobytes(), digest_size=16)
        if self.assignment is not None:
            told.update(self.assignment.data)
        return told.hexdigest()


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a numbering: those of some nodes that are kept.

    Args:
        numbering: Which part owns each node.
        index: The number of the part.
    """

    numbering: Numbering
    index: int = 0

    @property
    def num_all(self) -> int:
        """How many nodes all parts have."""
        return int(self.numbering.bounds[-1])

    @property
    def size(self) -> int:
        """How many nodes the part has."""
        return int(self.numbering.bounds[self.index + 1] - self.numbering.bounds[self.index])

    @property
    def nodes(self) -> Column:
        """The nodes of the part, by their old numbers."""
        return self.numbering.owned(self.index)

    def rows(self, nodes: Column) -> tuple[Column, Column]:
        """The positions of the part's nodes in ``nodes``, and their numbers within the part, from 0."""
        return self.numbering.rows(self.index, nodes)


def _number(assignment: Column, bounds: Column) -> Column:
    """The new number of each node, computed in pieces."""
    number = np.empty(assignment.size, np.int32 if assignment.size <= np.iinfo(np.int32).max else np.int64)
    free, num_parts = bounds[:-1].copy(), len(bounds) - 1
    for first in range(0, assignment.size, NODES_AT_ONCE):
        piece = assignment[first : first + NODES_AT_ONCE]
        order, counts = np.argsort(piece, kind="stable"), np.bincount(piece, minlength=num_parts)
        number[first + order] = np.arange(piece.size) + (free - (counts.cumsum() - counts)).repeat(counts)
        free += counts
    return number
