"""The loops of :mod:`~lightning_gnn_dist.wire.codec`, which read each number once and know at once what is lost of it.

All arrays are in one piece. Numbers are computed in float32, one operation after the other, as torch would.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

STEPS = 255
BYTES_OF_RANGE = 8  # two float32
_TINY = np.finfo(np.float32).tiny
_INFINITE = 0x7F800000  # the exponent of infinities and NaN
_NAN = np.int32(0x7FC0)  # of a bfloat16


@numba.njit(cache=True, nogil=True)
def to_steps(rows: Any, chance: Any, packed: Any, lost: Any) -> None:
    """Write rows as bytes, a byte for each number and the least and the step of each row behind.

    Args:
        rows: float32, shape ``(n, width)``.
        chance: Numbers from 0 to 1, of the same shape.
        packed: uint8, shape ``(n, width + 8)``.
        lost: Where to write what is rounded away, float32 like ``rows``, or without rows.
    """
    ends = np.empty(2, np.float32)
    octets = ends.view(np.uint8)
    width = rows.shape[1]
    for i in range(rows.shape[0]):
        least = greatest = rows[i, 0]
        for j in range(width):
            number = rows[i, j]
            if number < least or number != number:
                least = number
            if number > greatest or number != number:
                greatest = number
            if number != number:
                break
        step = (greatest - least) / np.float32(STEPS)
        divisor = max(step, _TINY)
        for j in range(width):
            place = np.floor((rows[i, j] - least) / divisor + chance[i, j])
            if not place >= np.float32(0):  # NaN, too
                place = np.float32(0)
            elif place > np.float32(STEPS):
                place = np.float32(STEPS)
            packed[i, j] = np.uint8(place)
            if lost.shape[0]:
                away = rows[i, j] - (place * step + least)
                lost[i, j] = away if np.isfinite(away) else np.float32(0)
        ends[0], ends[1] = least, step
        packed[i, width:] = octets


@numba.njit(cache=True, nogil=True)
def from_steps(packed: Any, rows: Any) -> None:
    """Write the rows of such bytes into ``rows``, float32 of shape ``(n, width)``."""
    ends = np.empty(2, np.float32)
    octets = ends.view(np.uint8)
    width = rows.shape[1]
    for i in range(rows.shape[0]):
        octets[:] = packed[i, width:]
        least, step = ends[0], ends[1]
        for j in range(width):
            rows[i, j] = np.float32(packed[i, j]) * step + least


@numba.njit(cache=True, nogil=True)
def to_halves(bits: Any, below: Any, halves: Any) -> None:
    """Write the upper halves of numbers to which a random number below one step is added.

    Infinities and NaN have no next number, and stay. The greatest finite numbers may become infinite, as in torch.

    Args:
        bits: The bits of float32 numbers, int32, shape ``(n,)``.
        below: Numbers from 0 to 65,535, int32.
        halves: int16.
    """
    for i in range(bits.shape[0]):
        if (bits[i] & _INFINITE) != _INFINITE:
            halves[i] = np.int16((bits[i] + below[i]) >> 16)
        elif bits[i] & 0x7FFFFF:
            halves[i] = _NAN
        else:
            halves[i] = np.int16(bits[i] >> 16)
