"""Nodes in increasing order, and rows of them: in memory, or in files where they would take too much of it."""

from __future__ import annotations

import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.graph.rows import degrees_of, starts_of
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from lightning_gnn_dist.graph.storage.row_file import RowFile, make
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.wire.channel import CPU, Channel

Ids = Tensor | range
_COPIES_SENT = 6  # of the rows that a round of the exchange sends: sent, as bytes, received, kept by an allocator


def ids_of(nodes: Ids) -> Tensor:
    """Return the ids as a tensor."""
    return torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes


def kept(ids: Tensor, most_bytes: int, folder: Path | None) -> Tensor:
    """Return the same ids, in a file if they take more bytes: then the system may take back their memory."""
    if ids.nbytes <= most_bytes:
        return ids
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        np.save(Path(draft) / "ids.npy", ids.numpy())
        return torch.from_numpy(map_npy(Path(draft) / "ids.npy"))


def edges_before(indptr: Tensor, rows: Ids) -> Tensor:
    """Return how many edges the rows before each of some have, and all of them at the end, but for a constant."""
    if isinstance(rows, range):
        return indptr[rows.start : rows.stop + 1]
    return starts_of(degrees_of(indptr, rows))


def by_type(ids: Ids, offsets: Sequence[int]) -> list[Ids]:
    """Divide increasing ids by the type of the node, which begin at these offsets."""
    if len(offsets) == 2:
        return [ids]
    cuts = [bisect_left(ids, offset) for offset in offsets] if isinstance(ids, range) else _cuts(ids, offsets)
    return [ids[start:stop] for start, stop in pairwise(cuts)]


def _cuts(ids: Tensor, offsets: Sequence[int]) -> list[int]:
    found: list[int] = torch.searchsorted(ids, torch.tensor(offsets)).tolist()
    return found


def by_types(of_ranks: Sequence[Tensor], offsets: Sequence[int]) -> list[list[Tensor]]:
    """Return for each type which of the nodes of each rank are of it."""
    pieces = [by_type(nodes, offsets) for nodes in of_ranks]
    return [[ids_of(piece) for piece in of_type] for of_type in zip(*pieces, strict=True)]


class RowTable:
    """A row for each of some nodes.

    Args:
        ids: The nodes, in increasing order.
        like: Rows of the type and shape that the table's rows have.
        most_bytes: Bytes that the table may take in memory; a larger one is a file.
        folder: Where the file is made. It has no name any more once it is open, so nothing stays of it.
        device: Whose memory holds the rows.
    """

    def __init__(
        self, ids: Ids, like: Tensor, most_bytes: int, folder: Path | None, device: torch.device = CPU
    ) -> None:
        self.ids, self.like = ids, like[:0].cpu().clone()
        self.bytes_of_row = like.element_size() * prod(like.shape[1:])
        self._is_range = len(ids) > 0 and int(ids[-1]) - int(ids[0]) + 1 == len(ids)
        self._rows: Tensor | None = None
        self.is_file = len(ids) * self.bytes_of_row > most_bytes
        if not self.is_file:
            self._rows = torch.empty((len(ids), *like.shape[1:]), dtype=like.dtype, device=device)
            return
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            path = Path(draft) / "rows.npy"
            make(path, len(ids), _bits(self.like).numpy())
            self._file = RowFile(path, "a layer")
            self._mapped = MappedRows(torch.from_numpy(map_npy(path)))
        weakref.finalize(self, self._file.abandon)

    @property
    def bytes_held(self) -> int:
        """The bytes that the rows take in memory."""
        return 0 if self.is_file else len(self.ids) * self.bytes_of_row

    def write(self, nodes: Tensor, rows: Tensor) -> None:
        """Set the rows of some nodes of the table."""
        at = self._positions(nodes)
        if self._rows is not None:
            self._rows[at.to(self._rows.device)] = rows.to(self._rows.device)
        else:
            self._file.write(at.numpy(), _bits(rows.cpu()).numpy())

    def take(self, nodes: Tensor) -> Tensor:
        """Return the rows of some nodes of the table, where it has them."""
        at = self._positions(nodes)
        if self._rows is not None:
            is_here = self._rows.device == CPU
            return gather_rows(self._rows, at) if is_here else self._rows[at.to(self._rows.device)]
        return self._mapped.take(at).view(self.like.dtype)

    def _positions(self, nodes: Tensor) -> Tensor:
        return nodes - self.ids[0] if self._is_range else torch.searchsorted(ids_of(self.ids), nodes)


class RowTables:
    """Rows of nodes of all types: a table for each type that has some, made when the first of them come.

    Args:
        ids: The nodes of each type, in increasing order.
        most_bytes: Bytes that the tables may take in memory.
        folder: Where files are made.
        says: What makes the rows, for error messages.
        device: Whose memory holds the rows.
    """

    def __init__(
        self, ids: Sequence[Ids], most_bytes: int, folder: Path | None, says: str, device: torch.device = CPU
    ) -> None:
        self._ids, self._most_bytes, self._folder, self._says, self._device = ids, most_bytes, folder, says, device
        self.of_types: list[RowTable | None] = [None] * len(ids)
        self._without = [0] * len(ids)  # nodes of each type that were written without rows

    def make(self, likes: RowsOfTypes) -> None:
        """Make the tables of those types that have rows of some type and shape, and no table yet."""
        for number, like in enumerate(likes):
            if self.of_types[number] is None and like is not None:
                room = self._most_bytes - self.bytes_held
                self.of_types[number] = RowTable(self._ids[number], like, room, self._folder, self._device)
            if self.of_types[number] is not None and self._without[number]:
                raise TypeError(
                    f"{self._says} returned rows of a type on some ranks or for some batches, and none for "
                    f"{self._without[number]} other nodes of it: return a row for each of the first "
                    "batch[kind].batch_size nodes of a type, or never a row of it."
                )

    @property
    def likes(self) -> RowsOfTypes:
        """No rows, of the type and shape that each table's rows have."""
        return [None if table is None else table.like for table in self.of_types]

    @property
    def bytes_of_row(self) -> int:
        """The bytes of the largest row."""
        return max((table.bytes_of_row for table in self.of_types if table is not None), default=0)

    @property
    def bytes_held(self) -> int:
        """The bytes that the rows take in memory."""
        return sum(table.bytes_held for table in self.of_types if table is not None)

    @property
    def bytes_in_ram(self) -> int:
        """The bytes of these that are no device's."""
        return self.bytes_held if self._device == CPU else 0

    def write(self, nodes: Sequence[Tensor], rows: RowsOfTypes) -> None:
        """Set the rows of some nodes of each type; rows of a type are there for all of its nodes or for none."""
        for number, (ids, some) in enumerate(zip(nodes, rows, strict=True)):
            self._without[number] += len(ids) if some is None else 0
        self.make(rows)
        for table, ids, some in zip(self.of_types, nodes, rows, strict=True):
            if table is not None and some is not None:
                table.write(ids, some)

    def take(self, nodes: Sequence[Tensor]) -> RowsOfTypes:
        """Return the rows of some nodes of each type."""
        return [None if table is None else table.take(ids) for table, ids in zip(self.of_types, nodes, strict=True)]


def fetch_rows(
    channel: Channel,
    asked: Sequence[Tensor],
    told: Sequence[Tensor],
    take: Callable[[Tensor], Tensor],
    table: RowTable,
    budget_bytes: int,
) -> None:
    """Send rows that other ranks need, and write those that this one needs into a table. Collective.

    Args:
        channel: The ranks.
        asked: The nodes whose rows each rank sends here.
        told: The nodes whose rows this rank sends to each.
        take: Returns own rows of some nodes.
        table: Receives the rows.
        budget_bytes: Bytes that a round of the exchange may take, equal on all ranks.
    """
    size = max(1, budget_bytes // (_COPIES_SENT * (table.bytes_of_row + 8) * channel.size))
    most = torch.tensor([max(map(len, asked))])
    rounds = int(torch.cat(channel.exchange([most] * channel.size)).max())
    for start in range(0, rounds, size):
        part = slice(start, start + size)
        own = [take(ids[part]).to(channel.device) for ids in told]
        rows = channel.exchange(own, [len(ids[part]) for ids in asked])
        for ids, piece in zip(asked, rows, strict=True):
            if len(piece):
                table.write(ids[part], piece)


def _bits(rows: Tensor) -> Tensor:
    """The rows in a type that numpy has."""
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
