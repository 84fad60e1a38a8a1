"""Rows of mapped arrays, without the memory that a map takes.

A page that a process has looked at through a map counts as its memory until the system takes it back, and one look
maps sixteen. So many rows are looked at in the order of the file, a window at a time, whose pages are then let go; and
few are read by ``pread``, which maps nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.maps import Map, libc, maps_under

MOST_BYTES_AT_ONCE = 1 << 24
WINDOW_BYTES = 1 << 23
BYTES_OF_A_LOOK = 1 << 16  # that are mapped together
ROWS_A_LOOK = 4  # from so many rows on, one look at them takes less time than calls that read them
DO_NOT_NEED = 4  # MADV_DONTNEED: the pages are read again when they are looked at


class MappedRows:
    """An array whose rows are read from its file, if it is mapped from one and nothing in it was changed.

    Arrays in RAM, and systems that do not tell what is mapped, are read as they are.

    Args:
        array: With a row per node or edge.
        maps: Those of this process, for whoever asks for several arrays. Default: asked for here.
    """

    def __init__(self, array: Tensor, maps: list[Map] | None = None) -> None:
        self._array = array
        self._place = _file_of(array, maps)
        self._file: int | None = None
        if self._place is not None:
            self._file = os.open(self._place.name, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    @property
    def is_read_from_file(self) -> bool:
        return self._place is not None

    def take(self, rows: Tensor) -> Tensor:
        """A copy of these rows."""
        if self._file is None or self._place is None:
            return self._array[rows]
        found = torch.empty(len(rows), *self._array.shape[1:], dtype=self._array.dtype)
        width = self._array[:1].numel() * found.element_size()
        if len(rows) * BYTES_OF_A_LOOK >= ROWS_A_LOOK * width * len(self._array):
            return self._look_at(rows, found, max(1, WINDOW_BYTES // width))
        offset = self._array.data_ptr() - self._place.start + self._place.offset
        done = _reader()(self._file, offset, width, rows.numpy(), found.data_ptr())
        if done < len(rows):
            raise OSError(f"Row {int(rows[done])} of {self._place.name} cannot be read: was the file changed?")
        return found

    def release(self) -> None:
        """Let go of the pages that were looked at. They stay in the system's cache."""
        if self._place is not None:
            _let_go(self._place.start, self._place.end)

    def _look_at(self, rows: Tensor, found: Tensor, rows_at_once: int) -> Tensor:
        """Copy the rows to ``found``, window by window."""
        assert self._place is not None
        in_order, order = rows.sort()
        windows = torch.arange(0, len(self._array) + rows_at_once, rows_at_once)
        for start, end in pairwise(torch.searchsorted(in_order, windows).tolist()):
            if start < end:
                here = in_order[start:end]
                found[order[start:end]] = self._array[here]
                first, last = (self._array[int(row)].data_ptr() for row in (here[0], here[-1]))
                beyond = BYTES_OF_A_LOOK + found[:1].nbytes
                _let_go(max(first - beyond, self._place.start), min(last + beyond, self._place.end))
        return found


def _let_go(start: int, end: int) -> None:
    start -= start % mmap.PAGESIZE
    libc().madvise(start, end - start, DO_NOT_NEED)


def _file_of(array: Tensor, maps: list[Map] | None) -> Map | None:
    """The map of a file that the array lies in, unless some of it was changed since, which only memory knows."""
    found = maps_under(array, maps)
    if len(found) != 1 or found[0].sizes["Anonymous"] > 0:
        return None
    only, file = found[0], Path(found[0].name)
    return only if file.is_file() and file.stat().st_ino == only.inode else None


@cache
def _reader() -> Any:
    """Compiled, for one call a row from Python takes longer than the row; rows that follow each other are one call."""
    pread = libc().pread

    @numba.njit(nogil=True)
    def read(file: int, offset: int, width: int, rows: np.ndarray[Any, Any], to: int) -> int:
        first = 0
        while first < len(rows):
            last = first + 1
            while last < len(rows) and rows[last] == rows[last - 1] + 1 and (last - first) * width < MOST_BYTES_AT_ONCE:
                last += 1
            wanted, got = (last - first) * width, 0
            while got < wanted:
                more = pread(file, to + first * width + got, wanted - got, offset + rows[first] * width + got)
                if more <= 0:
                    return first
                got += more
            first = last
        return first

    return read
