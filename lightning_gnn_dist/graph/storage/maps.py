"""The memory maps under an array, as the system lists them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

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


def maps_under(array: Tensor, maps: list[Map] | None = None) -> list[Map]:
    """The maps that the array lies in, usually one; an empty list if it is not on the CPU or not contiguous."""
    if not array.is_contiguous() or array.device.type != "cpu" or array.numel() == 0:
        return []
    first, last = array.data_ptr(), array.data_ptr() + array.nbytes
    return [one for one in (all_maps() if maps is None else maps) if one.start < last and first < one.end]


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
