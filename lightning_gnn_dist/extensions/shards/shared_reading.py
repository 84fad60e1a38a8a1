"""Which files a host reads: all, of which it keeps what is of its part, or its share, of which all are sent theirs.

            reads                    keeps
    rank 0  rows 0 to 4 of all 8     those of part 0, also out of rows 4 to 8, which rank 1 sends
    rank 1  rows 4 to 8              those of part 1

Ranks send each other one piece of their shares after the other, so that none holds more than a piece of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.wire.channel import Channel, all_gather_pieces
from lightning_gnn_dist.wire.collectives import gather_numbers, gather_objects, rank, sum_, world_size

Rows: TypeAlias = dict[str, Column]  # arrays with equally many rows
CPU = torch.device("cpu")


class Read(NamedTuple):
    """Rows that were read, and the node to which each belongs."""

    rows: Rows
    nodes: Column


class Parts(Protocol):
    """Who owns which node: :class:`~lightning_gnn_dist.extensions.shards.prepared_part.ShardPart`."""

    def rows(self, nodes: Column) -> tuple[Column, Column]:
        """The positions of the own nodes in ``nodes``, and their numbers within the own part."""

    def split(self, nodes: Column) -> list[tuple[Column, Column]]:
        """For each part the positions of its nodes in ``nodes``, and their numbers within it."""


class Received(NamedTuple):
    """Rows of the own part, and the numbers in it of the nodes to which they belong.

    Attributes:
        reader: Who has read them.
        rows: The rows, in the order in which they were read.
        places: The numbers of the nodes.
    """

    reader: int
    rows: Rows
    places: Column


class Reading(Protocol):
    """Who reads the rows of files. All readers must call these in the same order."""

    @property
    def index(self) -> int:
        """The number of this reader."""

    @property
    def num_readers(self) -> int:
        """How many there are."""

    def share(self, num_rows: int) -> range:
        """Which of so many rows this reader reads."""

    def whole(self, own: Column) -> Column:
        """All rows of an array, of which this reader has read its share."""

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over all readers, in 64 bits."""

    def each(self, number: int) -> list[int]:
        """The number of every reader."""

    def dealt(self, read: Iterable[Read], parts: Parts) -> Iterator[list[Received]]:
        """Yield what is of the own part, of a piece that each reader has read."""


class ReadsAll:
    """One host reads all files. Others, if there are any, do so, too, and none knows of another."""

    index, num_readers = 0, 1

    def share(self, num_rows: int) -> range:
        return range(num_rows)

    def whole(self, own: Column) -> Column:
        return own

    def sums(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def each(self, number: int) -> list[int]:
        return [number]

    def dealt(self, read: Iterable[Read], parts: Parts) -> Iterator[list[Received]]:
        for rows, nodes in read:
            at, places = parts.rows(nodes)
            yield [Received(0, {name: array[at] for name, array in rows.items()}, places)]


class ReadsShare:
    """Each rank of the process group reads a share, and prepares the part of its number. All of it is collective."""

    @property
    def index(self) -> int:
        return rank()

    @property
    def num_readers(self) -> int:
        return world_size()

    def share(self, num_rows: int) -> range:
        return range(num_rows * rank() // world_size(), num_rows * (rank() + 1) // world_size())

    def whole(self, own: Column) -> Column:
        octets = torch.from_numpy(np.ascontiguousarray(own).reshape(-1).view(np.uint8))
        found = torch.cat([theirs for (theirs,) in all_gather_pieces([octets])]).numpy()
        return found.view(own.dtype).reshape(-1, *own.shape[1:])

    def sums(self, numbers: Sequence[int]) -> list[int]:
        total = torch.tensor(numbers, dtype=torch.int64)
        sum_(total)
        return [int(number) for number in total]

    def each(self, number: int) -> list[int]:
        return [found for (found,) in gather_numbers([number], CPU)]

    def dealt(self, read: Iterable[Read], parts: Parts) -> Iterator[list[Received]]:
        pieces = iter(read)
        while (found := self._exchanged(*_apart(pieces, parts))) is not None:
            yield [Received(reader, rows, rows.pop(_PLACES)) for reader, rows in enumerate(found) if rows is not None]

    def _exchanged(self, to_ranks: Sequence[Rows] | None, refused: str | None) -> list[Rows | None] | None:
        """Send each rank its rows; return what each rank has sent, None of one that is done, or None if all are."""
        own = None if to_ranks is None else [_Head.of(rows).told for rows in to_ranks]
        heads = gather_objects({"heads": own, "refused": refused}, everywhere=True)
        assert heads is not None
        for head in heads:
            if head["refused"] is not None:
                raise ValueError(head["refused"])
        if all(head["heads"] is None for head in heads):
            return None
        here = [None if head["heads"] is None else _Head(*head["heads"][rank()]) for head in heads]
        sent = [_octets(rows) for rows in to_ranks or [{}] * self.num_readers]
        lengths = [0 if head is None else head.num_bytes for head in here]
        received = Channel(None, world_size(), rank()).exchange(sent, lengths)
        return [None if head is None else head.rows(octets) for head, octets in zip(here, received, strict=True)]


def _apart(pieces: Iterator[Read], parts: Parts) -> tuple[list[Rows] | None, str | None]:
    """What of the next piece is of each part, None if there is none, and why a file is refused."""
    try:
        if (piece := next(pieces, None)) is None:
            return None, None
    except (ValueError, TypeError) as error:  # of a file that no other rank reads
        return None, str(error)
    rows, nodes = piece
    return [
        {name: array[at] for name, array in rows.items()} | {_PLACES: places} for at, places in parts.split(nodes)
    ], None


_PLACES = " places"  # no array of a graph is called so


class _Head(NamedTuple):
    """What rows that travel as bytes are: how many, and of each array the name, the type and the shape of a row."""

    num_rows: int
    arrays: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, rows: Rows) -> _Head:
        arrays = [[name, array.dtype.str, list(array.shape[1:])] for name, array in rows.items()]
        return cls(len(next(iter(rows.values()))), arrays)

    @property
    def told(self) -> list[Any]:
        return [self.num_rows, self.arrays]

    @property
    def num_bytes(self) -> int:
        return sum(self._width(*kind) for _, *kind in self.arrays) * self.num_rows

    def rows(self, octets: torch.Tensor) -> Rows:
        """The rows that lie in some bytes, one array after the other."""
        found, start = {}, 0
        for name, dtype, shape in self.arrays:
            end = start + self._width(dtype, shape) * self.num_rows
            found[name] = octets[start:end].numpy().copy().view(dtype).reshape(self.num_rows, *shape)
            start = end
        return found

    @staticmethod
    def _width(dtype: str, shape: Sequence[int]) -> int:
        return np.dtype(dtype).itemsize * math.prod(shape)


def _octets(rows: Rows) -> torch.Tensor:
    arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in rows.values()]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *arrays]))
