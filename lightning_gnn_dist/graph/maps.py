"""What the system knows of the memory under an array."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

MAPS = Path("/proc/self/smaps")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ (\d+) *(.*)")
_BYTES = re.compile(r"(\w+): +(\d+) kB")


@dataclass(frozen=True)
class Map:
    """A range of addresses that the system treats alike.

    Attributes:
        start: Its first address.
        end: The address behind its last.
        offset: Where in the file it starts.
        inode: Number of the file, as it was when it was mapped.
        name: Path of the file; of memory that is no file's, nothing or a word in brackets.
        sizes: Bytes that are in memory, shared, changed, by the system's names for them.
    """

    start: int
    end: int
    offset: int
    inode: int
    name: str
    sizes: dict[str, int]


def maps_under(array: Tensor) -> list[Map]:
    """The maps that the array lies in, usually one. None: it is not in RAM, has gaps, or the system does not tell."""
    if not MAPS.exists() or not array.is_contiguous() or array.device.type != "cpu" or array.numel() == 0:
        return []
    first, last = array.data_ptr(), array.data_ptr() + array.numel() * array.element_size()
    found: list[Map] = []
    is_under = False
    for line in MAPS.read_text().splitlines():
        if head := _RANGE.fullmatch(line):
            start, end, offset = (int(number, 16) for number in head.group(1, 2, 3))
            is_under = start < last and first < end
            if is_under:
                found.append(Map(start, end, offset, int(head.group(4)), head.group(5), {}))
        elif is_under and (size := _BYTES.fullmatch(line)):
            found[-1].sizes[size.group(1)] = 1024 * int(size.group(2))
    return found


@cache
def libc() -> Any:
    """The C library. A failed call of it says why in ``ctypes.get_errno()``."""
    library = ctypes.CDLL(None, use_errno=True)
    library.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
    library.pread.restype = ctypes.c_ssize_t
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
