"""Reads rows of memory-mapped arrays without filling the process's memory.

A page that a process has read through a map counts as its memory until the system takes it back, and one access maps
sixteen pages. So many rows are read in the order of the file, a window at a time, and the window's pages are released;
few rows are read by ``pread``, which maps nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import weakref
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

MOST_BYTES_AT_ONCE = 1 << 24  # that one ``pread`` reads
WINDOW_BYTES = 1 << 23
BYTES_OF_A_LOOK = 1 << 16  # that one access to a map maps
ROWS_A_LOOK = 4  # with so many wanted rows per access or more, a map is faster than ``pread``
DO_NOT_NEED = 4  # MADV_DONTNEED: a page is read again at the next access
MAPS = Path("/proc/self/smaps")
_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) *(.*)$", re.MULTILINE)
_BYTES = re.compile(r"^(\w+): +(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Map:
    """A range of addresses that the system treats alike.

    Attributes:
        start: Its first address.
        end: The address behind its last.
        offset: Byte of the file at which it starts.
        inode: Number of the file, as it was when it was mapped.
        name: Path of the file; for memory without a file, nothing or a word in brackets.
        details: The lines on it in ``/proc/self/smaps``.
    """

    start: int
    end: int
    offset: int
    inode: int
    name: str
    details: str

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes by the system's names, such as ``Rss``, ``Shared_Clean`` and ``Anonymous``."""
        return {size.group(1): 1024 * int(size.group(2)) for size in _BYTES.finditer(self.details)}


def all_maps() -> list[Map]:
    """The maps of this process, about a thousand in 20 ms; an empty list where the system does not list them."""
    text = MAPS.read_text() if MAPS.exists() else ""
    heads = list(_RANGE.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [_map_of(head, text[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _map_of(head: re.Match[str], details: str) -> Map:
    start, end, offset = (int(number, 16) for number in head.group(1, 2, 3))
    return Map(start, end, offset, int(head.group(4)), head.group(5), details)


@cache
def libc() -> Any:
    """The C library. After a failed call, ``ctypes.get_errno()`` says why it failed."""
    library = ctypes.CDLL(None, use_errno=True)
    library.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    library.pread.restype = ctypes.c_ssize_t
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


class MappedRows:
    """Reads rows of an array from the file that it is mapped from.

    An array in RAM, a map that was changed, and any array where the system does not list maps, is indexed as usual.

    Args:
        array: An array with a row per node or edge.
        maps: The result of ``all_maps()``, for callers with several arrays. Default: asked for here.
    """

    def __init__(self, array: Tensor, maps: list[Map] | None = None) -> None:
        self._array = array
        self._place = file_of(array, maps)
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
        return self._read(rows, found)

    def release(self) -> None:
        """Release the pages of the map that were read. They stay in the system's cache."""
        if self._place is not None:
            _let_go(self._place.start, self._place.end)

    def _read(self, rows: Tensor, found: Tensor) -> Tensor:
        """Copy the rows to ``found`` by ``pread``."""
        assert self._file is not None and self._place is not None
        offset = self._array.data_ptr() - self._place.start + self._place.offset
        width = self._array[:1].numel() * found.element_size()
        done = _reader()(self._file, offset, width, rows.numpy(), found.data_ptr())
        if done < len(rows):
            raise OSError(f"Row {int(rows[done])} of {self._place.name} cannot be read: was the file changed?")
        return found

    def _look_at(self, rows: Tensor, found: Tensor, rows_at_once: int) -> Tensor:
        """Copy the rows to ``found`` through the map, window by window."""
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


def file_of(array: Tensor, maps: list[Map] | None) -> Map | None:
    """Return the map of a file under the array; None if there is none, or if some of it was changed in memory."""
    if not array.is_contiguous() or array.device.type != "cpu" or array.numel() == 0:
        return None
    first, last = array.data_ptr(), array.data_ptr() + array.nbytes
    found = [one for one in (all_maps() if maps is None else maps) if one.start < last and first < one.end]
    if len(found) != 1 or found[0].sizes["Anonymous"] > 0:
        return None
    only, file = found[0], Path(found[0].name)
    return only if file.is_file() and file.stat().st_ino == only.inode else None


@cache
def _reader() -> Any:
    """A compiled function that reads rows by ``pread``, consecutive ones at once; returns how many it could read."""
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
