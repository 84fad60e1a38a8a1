"""Rows in a temporary file that are written and read in order, chunk by chunk, beside what is computed meanwhile.

The chunks go past the system's cache of pages, which otherwise would take memory, and processor time for each page.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from math import prod

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 1 << 23


class _File(FileIO):
    def __del__(self) -> None:
        self.close()


class RowsInFile(Tensor):
    """Rows that are mapped from a file. Whoever reads them as a tensor reads pages of the map."""

    # What is made of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    file: _File

    @staticmethod
    def like(rows: Tensor, num_rows: int) -> RowsInFile:
        """Return so many rows of zeros, of the type and shape of some, in a file of their own without a name."""
        shape = num_rows, *rows.shape[1:]
        num_bytes = prod(shape) * rows.element_size()
        with tempfile.TemporaryFile() as named:
            file = _File(os.dup(named.fileno()), "r+")
        file.truncate(_in_pages(num_bytes))
        octets = torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(num_bytes,)))
        with suppress(OSError):  # a file system without such a way
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
        found: RowsInFile = Tensor._make_subclass(RowsInFile, octets.view(rows.dtype).view(shape))
        found.file = file
        return found


def in_ram(rows: Tensor) -> Tensor:
    """Return rows themselves, or a copy if they are in a file."""
    if not isinstance(rows, RowsInFile):
        return rows
    octets = _memory(rows.nbytes)
    for start in range(0, len(octets), CHUNK_BYTES):
        _move(os.preadv, rows.file, octets[start : start + CHUNK_BYTES], start)
    found = octets[: rows.nbytes].view(rows.dtype).view(rows.shape)
    return found.requires_grad_(rows.requires_grad)


def in_file(rows: Tensor) -> RowsInFile:
    """Return a copy in a file."""
    found = RowsInFile.like(rows, len(rows))
    writing = WriteInOrder(found)
    writing.put(0, rows)
    writing.end()
    return found


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _memory(num_bytes: int) -> Tensor:
    """Whole pages, of the large ones that the system has."""
    pages = mmap.mmap(-1, _in_pages(num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _move(how: Callable[..., int], file: _File, octets: Tensor, at: int) -> None:
    """Read or write octets from a place in the file on, as far as the file goes."""
    done = 0
    while done < len(octets) and (moved := how(file.fileno(), [octets[done:].numpy()], at + done)):
        done += moved


class ReadInOrder:
    """Reads a table's rows from the first to the last."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._chunks = _Chunks(table, os.preadv) if isinstance(table, RowsInFile) else None

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows of which none was returned before."""
        if self._chunks is None:
            return self._table[start:stop]
        pieces = [piece.clone() for piece in self._chunks.pieces(start * self._chunks.width, stop * self._chunks.width)]
        found = pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, dtype=torch.uint8)])
        return found.view(self._table.dtype).view(stop - start, *self._table.shape[1:])


class WriteInOrder:
    """Writes a table's rows from the first to the last. Those that are left out are zeros."""

    def __init__(self, table: Tensor) -> None:
        self._table, self._stop = table, 0
        self._chunks = _Chunks(table, os.pwritev) if isinstance(table, RowsInFile) else None

    def put(self, start: int, rows: Tensor) -> None:
        """Write rows behind those that were written before."""
        if self._chunks is None:
            here = self._table[start : start + len(rows)]
            if here.data_ptr() != rows.data_ptr():
                here.copy_(rows)
            return
        octets, at = rows.detach().contiguous().view(-1).view(torch.uint8), start * self._chunks.width
        for piece in self._chunks.pieces(self._stop, at):
            piece.zero_()
        self._stop = at + len(octets)
        for piece in self._chunks.pieces(at, self._stop):
            here, octets = octets[: len(piece)], octets[len(piece) :]
            piece.copy_(here)

    def end(self) -> None:
        """Wait until all is written."""
        if self._chunks is not None:
            self._chunks.end()


class _Chunks:
    """Chunks of a file in turn: one is used while a thread reads the next, or writes the one before."""

    def __init__(self, table: RowsInFile, move: Callable[..., int]) -> None:
        self._file, self._num_bytes, self._move = table.file, table.nbytes, move
        self.width = table.element_size() * prod(table.shape[1:])
        self._buffers, self._number = [_memory(min(CHUNK_BYTES, table.nbytes)) for _ in range(2)], -1
        self._thread = ThreadPoolExecutor(1)
        self._moving: Future[None] | None = None
        if move is os.preadv:
            self._begin(0)

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the octets from a place to another, which is not before those that were yielded."""
        while start < stop:
            number, at = divmod(start, CHUNK_BYTES)
            while self._number < number:
                self._go_on()
            piece = self._buffers[number % 2][at : at + stop - start]
            yield piece
            start += len(piece)

    def end(self) -> None:
        self._wait()
        self._begin(self._number)
        self._wait()

    def _go_on(self) -> None:
        self._number += 1
        self._wait()
        self._begin(self._number + (1 if self._move is os.preadv else -1))

    def _begin(self, number: int) -> None:
        start = number * CHUNK_BYTES
        if 0 <= start < self._num_bytes:
            octets = self._buffers[number % 2][: _in_pages(self._num_bytes - start)]
            self._moving = self._thread.submit(_move, self._move, self._file, octets, start)

    def _wait(self) -> None:
        if self._moving is not None:
            self._moving.result()
            self._moving = None
