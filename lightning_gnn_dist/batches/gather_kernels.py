"""The compiled loops that gather rows of arrays, as they are or as float32.

Rows may be anywhere in memory, so each is prefetched ``ROWS_AHEAD`` rows before it is read. A row is widened while it
is in the cache: that reads half the bytes, and writes nothing twice.
"""

from __future__ import annotations

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import WIDENS_HALVES, copy_bytes, prefetch, widened_half
from lightning_gnn_dist.engine.kernels import LINE, Array

ROWS_AHEAD = 8  # rows of features in flight

_U = np.uint64
_W = np.uint32


@compiled
def gather(source: Array, rows: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of ``source`` to ``out``, both uint8; a row has ``width`` bytes."""
    if width == 8:  # labels; if the compiler knows the width, a copy is an instruction instead of a call
        _copy_rows(source, rows, out, 8)
    elif width == 4:
        _copy_rows(source, rows, out, 4)
    elif width == 1:  # masks
        _copy_rows(source, rows, out, 1)
    else:
        _copy_rows(source, rows, out, width)


@compiled
def gather_of_three(first: Array, second: Array, third: Array, rows: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of three arrays that stand below each other to ``out``, all uint8; a row has ``width`` bytes."""
    last, ahead = len(rows) - 1, min(width, 8 * LINE)
    split, end = len(first), len(first) + len(second)
    for i in range(len(rows)):
        coming, row = rows[_U(min(i + ROWS_AHEAD, last))] * width, rows[_U(i)] * width
        for offset in range(0, ahead, LINE):
            if coming < split:
                prefetch(first, coming + offset)
            elif coming < end:
                prefetch(second, coming - split + offset)
            else:
                prefetch(third, coming - end + offset)
        if row < split:
            copy_bytes(out, i * width, first, row, width)
        elif row < end:
            copy_bytes(out, i * width, second, row - split, width)
        else:
            copy_bytes(out, i * width, third, row - end, width)


@compiled
def move(source: Array, rows: Array, out: Array, places: Array, width: int) -> None:
    """Copy ``rows`` of ``source`` to ``places`` of ``out``, both uint8; a row has ``width`` bytes."""
    for i in range(len(rows)):
        copy_bytes(out, places[_U(i)] * width, source, rows[_U(i)] * width, width)


@inlined
def _copy_rows(source: Array, rows: Array, out: Array, width: int) -> None:
    last = len(rows) - 1
    ahead = min(width, 8 * LINE)  # the processor prefetches the rest of a longer row by itself
    for i in range(len(rows)):
        start = rows[_U(min(i + ROWS_AHEAD, last))] * width
        for offset in range(0, ahead, LINE):
            prefetch(source, start + offset)
        copy_bytes(out, i * width, source, rows[_U(i)] * width, width)


@compiled
def gather_bfloat16(source: Array, rows: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of ``source``, the bits of bfloat16, to ``out`` as the bits of float32."""
    for i in range(len(rows)):
        _prefetch_row(source, rows, i, width, 2)
        start, to = rows[_U(i)] * width, i * width
        for j in range(width):
            out[_U(to + j)] = _W(source[_U(start + j)]) << _W(16)


@inlined
def widened_by_integers(bits: np.uint16) -> np.float32:
    """The float32 of a float16 that is given by its ``bits``, on any processor.

    A float16 has 5 bits of exponent and 10 of fraction. Moved to their places in a float32, they give a number that is
    too small by 2**112, the difference of the two formats' exponents, also for subnormal numbers.
    """
    moved = _W((_W(bits) & _W(0x7FFF)) << _W(13)).view(np.float32)
    is_special = _W((_W(bits) & _W(0x7C00)) == _W(0x7C00))  # infinite, or not a number
    sign = (_W(bits) & _W(0x8000)) << _W(16)
    number = np.float32(moved * np.float32(2.0**112)).view(np.uint32)
    return _W(number | sign | (is_special * _W(0x7F800000))).view(np.float32)


_widened = widened_half if WIDENS_HALVES else widened_by_integers


@compiled
def gather_float16(source: Array, rows: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of ``source``, the bits of float16, to ``out`` as float32."""
    for i in range(len(rows)):
        _prefetch_row(source, rows, i, width, 2)
        start, to = rows[_U(i)] * width, i * width
        for j in range(width):
            out[_U(to + j)] = _widened(source[_U(start + j)])


@compiled
def gather_scaled(source: Array, rows: Array, scales: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of ``source``, int8, times their ``scales``, to ``out`` as float32."""
    for i in range(len(rows)):
        _prefetch_row(source, rows, i, width, 1)
        start, to, scale = rows[_U(i)] * width, i * width, scales[_U(rows[_U(i)])]
        for j in range(width):
            out[_U(to + j)] = np.float32(source[_U(start + j)]) * scale


@part
def _prefetch_row(source: Array, rows: Array, i: int, width: int, size: int) -> None:
    start = rows[_U(min(i + ROWS_AHEAD, len(rows) - 1))] * width
    for offset in range(0, min(width, 8 * LINE // size), LINE // size):
        prefetch(source, start + offset)
