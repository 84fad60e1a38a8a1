"""Arrays in ``.npy`` files, read and written a piece at a time.

Nothing is mapped, so however a process's memory is counted and limited, it holds only the piece it works on.
Their checksum is XXH64 with seed 0, as ``xxhsum -H64`` prints it: it is as fast as memory.
"""

from __future__ import annotations

import errno
import io
import math
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh64

from lightning_gnn_dist.checks import PLAIN
from lightning_gnn_dist.graph.storage.files import flush, open_file

Column: TypeAlias = NDArray[Any]


BYTES_AT_ONCE = 1 << 17  # stays in the processor's cache from being read to being hashed
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of the disk, of a user's share of it, of a file


@dataclass(frozen=True)
class NpyFile:
    """A ``.npy`` file of which only the header was read.

    Args:
        path: The file.
        shape: Shape of the array.
        dtype: Type of its numbers.
        offset: Byte of the file at which the numbers begin.
        by_column: Whether columns are contiguous instead of rows (Fortran order).
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    by_column: bool

    @classmethod
    def of(cls, path: Path) -> NpyFile:
        """Read the header, and refuse a file that is not as long as its header says."""
        try:
            with open_file(path) as stream:
                if np.lib.format.read_magic(stream) != (1, 0):
                    raise ValueError("its header is of another version than 1.0")
                shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
                offset = stream.tell()
            if min(shape, default=0) < 0:
                raise ValueError(f"its shape is {shape}")
        except (ValueError, RecursionError, SyntaxError, tokenize.TokenError) as error:
            raise ValueError(f"{path} is no .npy file, or is truncated ({error}). Write it again.") from error
        if dtype.hasobject:
            raise ValueError(f"{path} holds Python objects, and numbers are needed: array.astype(...) before np.save.")
        file = cls(path, shape, dtype, offset, by_column and len(shape) > 1)
        found, promised = path.stat().st_size, offset + file.num_bytes
        if found != promised:
            raise ValueError(
                f"{path} is {'truncated' if found < promised else 'longer than one array'}: it has {found:,} bytes, "
                f"and its header promises {promised:,}. Write it again."
            )
        return file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def type(self) -> torch.dtype:
        """The torch type of the numbers."""
        try:
            found = torch.from_numpy(np.empty(0, self.dtype)).dtype
        except (TypeError, ValueError):
            found = None
        if found not in PLAIN:
            raise ValueError(f"{self.path} holds {self.dtype}, which torch cannot compute with: array.astype(...).")
        return found

    def read(self, first: int, count: int) -> Column:
        """``count`` numbers from number ``first`` on, as a vector in the order of the file."""
        numbers = np.fromfile(self.path, self.dtype, count, offset=self.offset + first * self.dtype.itemsize)
        if numbers.size < count:
            raise ValueError(f"{self.path} became shorter while it was read: write it again.")
        return numbers


def header_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header that ``np.save`` writes. Its length is the same for any number of rows."""
    stream = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, description)
    return stream.getvalue()


def write_header(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Write the header of a file, or replace it, and return its length in bytes."""
    with path.open("r+b" if path.exists() else "wb") as stream:
        return stream.write(header_of(dtype, shape))


def append(path: Path, array: Column) -> None:
    """Add the bytes of an array to the end of a file."""
    with path.open("ab") as stream:
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_at(path: Path, offset: int, array: Column) -> None:
    """Write the bytes of an array into a file that is there, from a byte on."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def save(path: Path, array: Column) -> None:
    """Write a whole array, with the bytes that ``np.save`` writes."""
    path.unlink(missing_ok=True)
    write_header(path, array.dtype, array.shape)
    append(path, array)


def save_for_good(path: Path, array: Column) -> str:
    """Write a new file, wait until it is on the disk, and return its checksum.

    ``np.save`` would not notice that a limit or a full disk cut the file short.
    """
    header, checksum, wanted = np.frombuffer(header_of(array.dtype, array.shape), np.uint8), xxh64(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as stream:
            for piece in [header, *_pieces(np.ascontiguousarray(array).reshape(-1).view(np.uint8))]:
                stream.write(piece.data)
                checksum.update(piece.data)
                wanted += piece.size
        flush(path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            error.errno, f"the disk of {path} is full, or a file may not grow ({error.strerror}): make room"
        ) from error
    found = path.stat().st_size
    if found != wanted:
        raise OSError(f"{path} has {found:,} bytes after {wanted:,} were written: the disk is full, or fails.")
    return checksum.hexdigest()


def _pieces(content: Column) -> list[Column]:
    return [content[start : start + BYTES_AT_ONCE] for start in range(0, content.size, BYTES_AT_ONCE)]


def checksum_of(path: Path) -> str:
    """The checksum of a whole file."""
    checksum, buffer = xxh64(), np.empty(BYTES_AT_ONCE, np.uint8)
    with open_file(path) as stream:
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            checksum.update(buffer[:count].data)
    return checksum.hexdigest()
