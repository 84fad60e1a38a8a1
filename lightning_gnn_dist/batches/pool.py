"""Gathers rows of arrays into buffers that are used again.

The features of a batch may be 100 MB. New memory of that size takes several times as long as the copy itself, because
the system maps it page by page and clears every page. So buffers are used again. But a user or autograd may keep a
batch, or three rows of it: a buffer comes back only when no tensor shares its memory any more.
"""

from __future__ import annotations

from collections import deque
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import LINE, WIDENS_HALVES, copy_bytes, prefetch, widened_half
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.lending import Bytes, lent

ROWS_AHEAD = 16  # rows of features in flight

_U = np.uint64
_W = np.uint32


@compiled
def gather(source: Array, rows: Array, out: Array, width: int) -> Any:
    """Copy ``rows`` of ``source`` to ``out``, both uint8; return whether there are such rows.

    Args:
        source: The rows, each of ``width`` bytes.
        rows: Which ones.
        out: Receives them, one after the other.
        width: Bytes of a row.
    """
    if width == 8:  # labels; if the compiler knows the width, a copy is an instruction instead of a call
        return _copy_rows(source, rows, out, 8)
    if width == 4:
        return _copy_rows(source, rows, out, 4)
    if width == 1:  # masks
        return _copy_rows(source, rows, out, 1)
    return _copy_rows(source, rows, out, width)


@inlined
def _copy_rows(source: Array, rows: Array, out: Array, width: int) -> Any:
    count = len(source) // width
    for i in range(len(rows)):
        if _U(rows[_U(i)]) >= _U(count):
            return False
        _prefetch_row(source, rows, i, width, 1)
        copy_bytes(out, i * width, source, rows[_U(i)] * width, width)
    return True


@compiled
def gather_wide(source: Array, rows: Array, is_half: bool | None, out: Array, width: int) -> Any:
    """Copy as :func:`gather` does, and make float32 of each number.

    Args:
        source: The rows, each of ``width`` numbers: bits of bfloat16, or of float16.
        rows: Which ones.
        is_half: True for float16, else None, by which the compiler leaves one of them out.
        out: Receives them as float32, of bfloat16 as the bits of it.
        width: Numbers of a row.
    """
    count = len(source) // width
    for i in range(len(rows)):
        if _U(rows[_U(i)]) >= _U(count):
            return False
        _prefetch_row(source, rows, i, width, 2)
        start, to = rows[_U(i)] * width, i * width
        for j in range(width):
            number = source[_U(start + j)]
            if is_half is not None:
                out[_U(to + j)] = widened_half(number)
            else:
                out[_U(to + j)] = _W(number) << _W(16)
    return True


@part
def _prefetch_row(source: Array, rows: Array, i: int, width: int, size: int) -> None:
    """Ask for a row that comes some rows later; the processor itself asks for the rest of a long one."""
    start = rows[_U(min(i + ROWS_AHEAD, len(rows) - 1))] * width
    for offset in range(0, min(width, 8 * LINE // size), LINE // size):
        prefetch(source, start + offset)


SMALL_BYTES = 1 << 16  # less than this torch copies faster, in one thread, than a kernel is called
POOLED_BYTES = 1 << 20  # the allocator of the C library keeps smaller pieces by itself
HALVES = (torch.float16, torch.bfloat16)
Widen: TypeAlias = bool | torch.dtype  # what becomes float32: all narrower types, none, or all but one


class Pool(Protocol):
    """Lends memory. What it lends comes back by itself."""

    def take(self, num_bytes: int) -> Tensor:
        """``num_bytes`` bytes, uint8, not initialised."""
        ...


class BufferPool:
    """Lends byte buffers, and takes one back when the last tensor on it is gone.

    At most ``max_free`` buffers wait here. All others belong to batches that somebody still holds, so there are
    never more than ``max_free`` plus these batches, whose number the loader's look-ahead bounds.

    Args:
        max_free: Buffers that may wait for their next use; further ones are freed when they come back.
    """

    def __init__(self, max_free: int) -> None:
        self._free: deque[Bytes] = deque(maxlen=max_free)
        self._largest = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of exactly ``num_bytes`` bytes, uint8, not initialised."""
        self._largest = max(self._largest, num_bytes)
        buffer = self._pop(num_bytes)
        if buffer is None:
            buffer = np.empty(self._largest + self._largest // 8 + LINE, np.uint8)
        start = -buffer.ctypes.data % LINE
        return lent(buffer, buffer[start : start + num_bytes], self._free)

    def _pop(self, num_bytes: int) -> Bytes | None:
        """A waiting buffer that is large enough, or None. Smaller ones are dropped: batches have grown."""
        while self._free:
            try:
                buffer = self._free.pop()
            except IndexError:  # another thread was faster
                break
            if buffer.size >= num_bytes + LINE:
                return buffer
        return None


def gather_rows(array: Tensor, rows: Tensor | None, pool: Pool | None = None, *, widen: Widen = False) -> Tensor:
    """``array[rows]``, copied in one thread without the interpreter's lock.

    Args:
        array: The array to take rows from.
        rows: The rows, int64. None: all, which are copied only if they become wider.
        pool: Lends the memory for large results. Default: new memory.
        widen: Convert float16 and bfloat16 to float32, both or all but one.
    """
    is_wider = array.dtype in HALVES and widen not in (False, array.dtype)
    dtype = torch.float32 if is_wider else array.dtype
    if rows is None:
        return array.to(dtype)
    shape = (rows.numel(), *array.shape[1:])
    num_bytes = prod(shape) * dtype.itemsize
    has_kernel = WIDENS_HALVES or not is_wider or array.dtype != torch.float16
    if num_bytes < SMALL_BYTES or array.device.type != "cpu" or not array.is_contiguous() or not has_kernel:
        return array.index_select(0, rows).to(dtype)
    out, row_bytes = room_for(num_bytes, pool), num_bytes // rows.numel()
    if is_wider:
        are_rows = _widen(array, rows, out.numpy())
    else:
        are_rows = gather(bits_of(array, torch.uint8), rows.numpy(), out.numpy(), row_bytes)
    if not are_rows:
        check_rows(rows, len(array))
    return out.view(dtype).view(shape)


def check_rows(rows: Tensor, count: int) -> None:
    """Refuse rows of an array that has fewer."""
    low, high = (int(end) for end in rows.aminmax())
    if low < 0 or high >= count:
        raise IndexError(f"Rows {low} to {high} are asked for of an array that has {count}.")


def room_for(num_bytes: int, pool: Pool | None) -> Tensor:
    """Return memory, which is lent where it is large."""
    is_pooled = pool is not None and num_bytes >= POOLED_BYTES
    return pool.take(num_bytes) if pool is not None and is_pooled else torch.from_numpy(np.empty(num_bytes, np.uint8))


def _widen(array: Tensor, rows: Tensor, out: Bytes) -> Any:
    is_half = array.dtype == torch.float16
    to = out.view(np.float32 if is_half else np.uint32)
    return gather_wide(bits_of(array, torch.uint16), rows.numpy(), is_half or None, to, array[0].numel())


def bits_of(array: Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return what an array holds in memory, as numbers of another type."""
    flat = array.detach().contiguous().view(-1)
    if not flat.numel():  # whose stride may be 0, and torch then views it as no other type
        flat = flat.new_empty(0)
    bits: npt.NDArray[Any] = flat.view(dtype).numpy()
    return bits
