"""Maps an array in a file with room for more rows behind it, of which the rows in the file are not copied.

The file's pages are mapped over the first of a range of addresses without a file. A page that is written to becomes the
process's own; the others stay those of the file. So 5 more rows, or 5 that change, take some pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.graph.storage.mapped import NO_RESERVE, libc
from lightning_gnn_dist.graph.storage.npy import NpyFile

FIXED = 0x10  # MAP_FIXED, which Python's mmap module does not name
_PRIVATE = mmap.MAP_PRIVATE | NO_RESERVE


def map_with_room(file: Path, array: Tensor, count: int) -> Tensor:
    """The array that is mapped from a file, with so many rows behind it that may be written to, as may all others.

    Args:
        file: Where it is.
        array: The array, whose type and shape are those of the result.
        count: How many rows are to come.
    """
    if not array.numel():
        return array.new_empty((count, *array.shape[1:]))
    found, more = NpyFile.of(file), count * array[:1].nbytes
    used = found.offset + found.num_bytes
    whole = mmap.mmap(-1, used + more, flags=_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    with open_file(file) as stream:
        _put_over(address, used, stream.fileno())
    numbers = np.frombuffer(whole, found.dtype, (found.num_bytes + more) // found.dtype.itemsize, found.offset)
    return torch.from_numpy(numbers).view(array.dtype).view(len(array) + count, *array.shape[1:])


def _put_over(address: int, length: int, descriptor: int) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | FIXED
    if libc().mmap(address, length, protection, flags, descriptor, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"a file cannot be mapped ({os.strerror(error)}): does this process map too much?")
