"""Rows of nodes, on the device that computes, in RAM or in files, wherever is room, and their way there and back.

    gathered into page-locked memory -> copied beside the computing -> computed -> copied back beside the next batch

The host launches one batch after the other and waits for none of them, until what is under way takes too many bytes.
Where a CPU computes, nothing is under way: every step is done when it returns.
"""

from __future__ import annotations

import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import bytes_of, in_type
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.batches.source import stream_to
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from lightning_gnn_dist.graph.storage.row_file import RowFile, make
from lightning_gnn_dist.layers.layer_pass import Ids, LayerRows, Way, places_in
from lightning_gnn_dist.wire.channel import Channel

Arrived = tuple[Tensor, Tensor]  # nodes, or places, and their rows in RAM


class UnderWay:
    """What the host has launched on a device and has not waited for, the oldest first.

    Args:
        most_bytes: Bytes from which on the host waits for the oldest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._launched = deque[tuple[Any, int, torch.cuda.Event]]()

    def add(self, what: Any, num_bytes: int, event: torch.cuda.Event) -> None:
        """Note what has been launched before the event."""
        self._launched.append((what, num_bytes, event))
        self._bytes += num_bytes

    def done(self) -> Iterator[Any]:
        """Yield what is done; wait as long as the rest takes too many bytes."""
        while self._launched:
            what, num_bytes, event = self._launched[0]
            if not event.query():
                if self._bytes <= self._most_bytes:
                    return
                event.synchronize()
            self._launched.popleft()
            self._bytes -= num_bytes
            yield what

    def rest(self) -> Iterator[Any]:
        """Wait for all, once, and yield it."""
        if self._launched:
            self._launched[-1][2].synchronize()
        yield from self.done()


class WayAndBack(Way):
    """Brings batches and rows to the device that computes while it computes, and rows back.

    Args:
        device: The device.
        dtype: The type of the model's numbers, if batches are brought to it.
        most_bytes: Bytes that may be under way in each direction before the host waits.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None, most_bytes: int = 0) -> None:
        super().__init__(device, dtype)
        self._most_bytes, self._stream = most_bytes, stream_to(device)
        self._sent = UnderWay(most_bytes)
        self.pool = None if self._stream is None else self._stream.pool

    def batch(self, batch: Any) -> Any:
        return super().batch(batch) if self._stream is None else self._stream.bring(in_type(batch, self._dtype))

    def launched(self, batch: Any) -> None:
        """Note that all work on a batch is launched: its memory is free when that is done."""
        if self._stream is not None:
            self._sent.add(None, bytes_of(batch), torch.cuda.current_stream(self.device).record_event())
            deque(self._sent.done(), maxlen=0)

    def there(self, rows: Tensor) -> Tensor:
        return sent(rows, self.device)

    def back(self) -> WayBack:
        """Return what brings rows back to RAM."""
        return WayBack(self._most_bytes)


@cache
def _stream_back(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class WayBack(UnderWay):
    """Brings rows back to RAM, in the order in which they were computed."""

    def send(self, nodes: Tensor, rows: Tensor) -> Iterator[Arrived]:
        """Begin to bring rows back; yield nodes and rows that are in RAM by now."""
        if not rows.is_cuda:
            yield nodes, rows.cpu()
            return
        current, beside = torch.cuda.current_stream(rows.device), _stream_back(rows.device)
        beside.wait_event(current.record_event())
        rows.record_stream(beside)  # otherwise its memory could be reused before it is copied
        with torch.cuda.stream(beside):
            found = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            found.copy_(rows, non_blocking=True)
            self.add((nodes, found), rows.nbytes, beside.record_event())
        yield from self.done()


IN_RAM = WayAndBack(torch.device("cpu"))
_COPIES_SENT = 6  # of the rows that a round of the exchange sends: sent, as bytes, received, kept by an allocator


def kept(ids: Tensor, most_bytes: int, folder: Path | None) -> Tensor:
    """Return the same ids, in a file if they take more bytes: then the system may take back their memory."""
    if ids.nbytes <= most_bytes:
        return ids
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        np.save(Path(draft) / "ids.npy", ids.numpy())
        return torch.from_numpy(np.load(Path(draft) / "ids.npy", mmap_mode="r+"))


class Room(NamedTuple):
    """Where rows may lie: on the device as long as there is room, then in RAM, then in a file.

    Attributes:
        in_ram: Bytes that they may take in RAM.
        folder: Where a file is made. It has no name any more once it is open, so nothing stays of it.
        way: Brings rows to the device that computes, and back.
        there: Bytes that they may take on that device, if it is no CPU.
    """

    in_ram: int
    folder: Path | None
    way: WayAndBack = IN_RAM
    there: int = 0


class RowTable:
    """A row for each of some nodes.

    Args:
        ids: The nodes, in increasing order.
        like: Rows of the type and shape that the table's rows have.
        room: Where they may lie.
    """

    def __init__(self, ids: Ids, like: Tensor, room: Room) -> None:
        self.ids, self.like = ids, torch.empty((0, *like.shape[1:]), dtype=like.dtype)
        self.bytes_of_row = like.element_size() * prod(like.shape[1:])
        self._positions = places_in(ids)
        self._rows: Tensor | None = None
        self._way, self._back = room.way, room.way.back()
        self.is_there = 0 < len(ids) * self.bytes_of_row <= room.there
        self.is_file = not self.is_there and len(ids) * self.bytes_of_row > room.in_ram
        if not self.is_file:
            where = room.way.device if self.is_there else None
            self._rows = torch.empty((len(ids), *like.shape[1:]), dtype=like.dtype, device=where)
            return
        with tempfile.TemporaryDirectory(dir=room.folder) as draft:
            path = Path(draft) / "rows.npy"
            make(path, len(ids), _bits(self.like).numpy())
            self._file = RowFile(path, "a layer")
            self._mapped = MappedRows(torch.from_numpy(np.load(path, mmap_mode="r+")))
        weakref.finalize(self, self._file.abandon)

    @property
    def bytes_in_ram(self) -> int:
        """The bytes that the rows take in RAM."""
        return 0 if self.is_file or self.is_there else len(self.ids) * self.bytes_of_row

    @property
    def bytes_there(self) -> int:
        """The bytes that the rows take on the device."""
        return len(self.ids) * self.bytes_of_row if self.is_there else 0

    def write(self, nodes: Tensor, rows: Tensor) -> None:
        """Set the rows of some nodes of the table. Those that come from a device are there when rows are taken."""
        at = self._positions(nodes)
        if self._rows is not None and self.is_there:
            self._rows.index_copy_(0, self._way.there(at), self._way.there(rows))
            return
        for arrived in self._back.send(at, rows):
            self._put(*arrived)

    def take(self, nodes: Tensor) -> Tensor:
        """Return the rows of some nodes of the table, on the device if they lie there."""
        at = self._positions(nodes)
        if self._rows is not None and self.is_there:
            return self._rows.index_select(0, self._way.there(at))
        for arrived in self._back.rest():
            self._put(*arrived)
        if self._rows is not None:
            return gather_rows(self._rows, at, self._way.pool)
        return self._mapped.take(at).view(self.like.dtype)

    def _put(self, at: Tensor, rows: Tensor) -> None:
        if self._rows is not None:
            self._rows[at] = rows
        else:
            self._file.write(at.numpy(), _bits(rows).numpy())


class RowTables(LayerRows):
    """Rows of nodes of all types, wherever is room.

    Args:
        ids: The nodes of each type, in increasing order.
        room: Where they may lie, together.
        says: What makes the rows, for error messages.
    """

    def __init__(self, ids: Sequence[Ids], room: Room, says: str) -> None:
        super().__init__(ids, says)
        self._room = room

    def _made(self, ids: Ids, like: Tensor) -> RowTable:
        room = self._room
        left = room._replace(in_ram=room.in_ram - self.bytes_in_ram, there=room.there - self.bytes_there)
        return RowTable(ids, like, left)

    @property
    def bytes_in_ram(self) -> int:
        """The bytes that the rows take in RAM."""
        return sum(table.bytes_in_ram for table in self.of_types if table is not None)

    @property
    def bytes_there(self) -> int:
        """The bytes that the rows take on the device."""
        return sum(table.bytes_there for table in self.of_types if table is not None)


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
