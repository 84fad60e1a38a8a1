"""Reads many rows of an array from its file at once: rows that lie near each other in one request, several in flight.

    increasing rows -> runs with gaps of at most 16 kB -> requests of at most 1 MB -> a few threads -> the wanted rows

A map would fetch the pages one after the other, each with what the system believes to come next, and would hold them as
memory of the process. Where the file system allows it, the system does not cache what is read here, or it would throw
out pages of the edges for rows that nobody needs again: that is known better here.
"""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.mapped import Map, file_of, libc

Bytes = npt.NDArray[Any]

BLOCK_BYTES = 4096  # what is read past the system's cache begins and ends at multiples of this
GAP_BYTES = 1 << 14  # a disk reads over as much sooner than it begins another request
REQUEST_BYTES = 1 << 20
IN_FLIGHT = 16  # requests
THREAD_NAME = "lightning_gnn_dist.extensions.larger_than_memory.merged_reads"


class MergedReads:
    """Reads rows of an array from the file that it is mapped from. Close it at the end.

    Args:
        array: An array with a row per node or edge that lies in a mapped file.
        maps: The result of ``all_maps()``, for callers with several arrays. Default: asked for here.

    Attributes:
        bytes_read: What was read of the file so far: whole blocks, as a disk has them, with gaps between rows.
    """

    def __init__(self, array: Tensor, maps: list[Map] | None = None) -> None:
        place = file_of(array, maps)
        if place is None:
            raise ValueError("These rows do not lie in a file that this process has mapped: read them from RAM.")
        self._array, self._name = array, place.name
        self._offset = array.data_ptr() - place.start + place.offset
        self._file = _opened(place.name)
        self._end = weakref.finalize(self, os.close, self._file)
        self._width, self.bytes_read = array[:1].nbytes, 0

    def take(self, rows: Tensor) -> Tensor:
        """Return a copy of some increasing rows."""
        if not self._end.alive:
            raise RuntimeError(f"{self._name} was closed while rows of it were asked for.")
        found = self._array.new_empty((len(rows), *self._array.shape[1:]))
        if not found.nbytes:
            return found
        starts = _requests(rows, self._width)  # and where the last one ends
        begins, ends = (self._offset + row * self._width for row in (rows[starts[:-1]], rows[starts[1:] - 1] + 1))
        self.bytes_read += int((-(-ends // BLOCK_BYTES) - begins // BLOCK_BYTES).sum()) * BLOCK_BYTES
        num_threads = min(IN_FLIGHT, len(starts) - 1)
        bounds = np.linspace(0, len(starts) - 1, num_threads + 1).astype(np.int64)
        read = partial(self._read, rows.numpy(), found.view(-1).view(torch.uint8).numpy())
        pieces = [starts[first : last + 1].numpy() for first, last in pairwise(bounds)]
        if num_threads == 1:
            read(pieces[0])
        else:
            with ThreadPoolExecutor(num_threads, THREAD_NAME) as threads:
                list(threads.map(read, pieces))
        return found

    def _read(self, rows: Any, out: Any, starts: Any) -> None:
        """Read some requests."""
        scratch = np.empty(REQUEST_BYTES + self._width + 3 * BLOCK_BYTES, np.uint8)
        scratch = scratch[-scratch.ctypes.data % BLOCK_BYTES :]
        failed = _reader()(self._file, self._offset, self._width, rows, starts, out, scratch)
        if failed >= 0:
            raise OSError(f"Row {int(rows[failed])} of {self._name} cannot be read: was the file changed?")

    def close(self) -> None:
        """Close the file. Nothing can be read any more."""
        self._end()


def _opened(name: str) -> int:
    """Open a file for reads past the system's cache; where that cannot be, for reads of no more than is asked for."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or a system, without
        file = os.open(name, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file


def _requests(rows: Tensor, width: int) -> Tensor:
    """Return where among increasing rows each request begins, and where the last one ends."""
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = rows.diff() * width > GAP_BYTES + width
    from_first = rows - rows[is_first][is_first.cumsum(0) - 1]
    piece = from_first * width // REQUEST_BYTES  # a longer run is several requests
    is_first[1:] |= piece[1:] != piece[:-1]
    return torch.cat([is_first.nonzero().view(-1), torch.tensor([len(rows)])])


@cache
def _reader() -> Any:
    """Return a compiled function that reads requests by ``pread``: the place of a row that it cannot read, or -1."""
    pread = libc().pread

    @numba.njit(nogil=True)
    def read(file: int, offset: int, width: int, rows: Bytes, starts: Bytes, out: Bytes, scratch: Bytes) -> int:
        for request in range(len(starts) - 1):
            first, last = starts[request], starts[request + 1] - 1
            start, end = offset + rows[first] * width, offset + (rows[last] + 1) * width
            block, got = start // BLOCK_BYTES * BLOCK_BYTES, 0
            while block + got < end:
                got = got // BLOCK_BYTES * BLOCK_BYTES
                to = np.int64(scratch.ctypes.data) + got
                more = pread(file, to, -(-(end - block - got) // BLOCK_BYTES) * BLOCK_BYTES, block + got)
                if more < min(BLOCK_BYTES, end - block - got):
                    return int(first)
                got += more
            for i in range(first, last + 1):
                row = start - block + (rows[i] - rows[first]) * width
                out[i * width : (i + 1) * width] = scratch[row : row + width]
        return -1

    return read
