"""Rows in fewer bytes for the wire, rounded at random so that they are right in the mean.

    16 bits     bfloat16: the upper half of a float32, to which a random number below one step is added before
    8 bits      256 steps between the least and the greatest number of a row; these two travel along as float32

With :math:`u` uniform in [0, 1), a number :math:`x` of a row from :math:`a` to :math:`b` becomes
:math:`a + s \\lfloor (x - a) / s + u \\rfloor` with :math:`s = (b - a) / 255` (AdaQP, Wan et al., arXiv:2306.01381).
"""

from __future__ import annotations

from typing import Any, Literal

import numba
import numpy as np
import torch
from torch import Tensor

Bits = Literal[8, 16]
_STEPS = 255
BYTES_OF_RANGE = 8  # two float32
_TINY = np.finfo(np.float32).tiny
_INFINITE = 0x7F800000  # the exponent of infinities and NaN
_NAN = np.int32(0x7FC0)  # of a bfloat16


class Codec:
    """Packs rows into bytes, and unpacks them.

    Args:
        bits: Bits of a number: 8 or 16.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def bytes_of_row(self, width: int) -> int:
        """The bytes that a row of ``width`` numbers takes."""
        return 2 * width if self.bits == 16 else width + BYTES_OF_RANGE

    @torch.no_grad()
    def pack(self, rows: Tensor, chance: torch.Generator, lost: Tensor | None = None) -> Tensor:
        """Return the bytes of rows on the CPU, uint8, shape ``(n, bytes of a row)``.

        Args:
            rows: Rows of floating point numbers, shape ``(n, ...)``.
            chance: Decides which numbers are rounded up.
            lost: Takes what is rounded away, float32, shape ``(n, width)`` in one piece; 0 of what is not finite.
        """
        flat = rows.reshape(len(rows), rows.shape[1:].numel()).to(torch.float32).contiguous()
        if self.bits == 8:
            packed = torch.zeros(len(flat), flat.shape[1] + BYTES_OF_RANGE, dtype=torch.uint8)
            if flat.numel():
                drawn = torch.rand(flat.shape, generator=chance, dtype=torch.float32)
                away = flat.new_empty(0, 0) if lost is None else lost
                _to_steps(flat.numpy(), drawn.numpy(), packed.numpy(), away.numpy())
            return packed
        below = torch.randint(1 << 16, flat.shape, generator=chance, dtype=torch.int32)
        halves = torch.empty(flat.shape, dtype=torch.int16)
        _to_halves(flat.view(torch.int32).view(-1).numpy(), below.view(-1).numpy(), halves.view(-1).numpy())
        packed = halves.view(torch.uint8)
        if lost is not None:
            lost.copy_((flat - self.unpack(packed, flat)).nan_to_num_(0.0, 0.0, 0.0))
        return packed

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return the rows, in the type and of the shape that the rows of ``like`` have."""
        if not packed.numel():
            return like.new_empty((len(packed), *like.shape[1:]))
        if self.bits == 16:
            # In memory of their own, as wider numbers may not begin at any byte.
            flat = packed.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        else:
            flat = torch.empty(len(packed), packed.shape[1] - BYTES_OF_RANGE)
            _from_steps(packed.contiguous().numpy(), flat.numpy())
        return flat.to(like.dtype).view(len(packed), *like.shape[1:])


# Loops that read each number once and know at once what is lost of it. All arrays are in one piece. Numbers are
# computed in float32, one operation after the other, as torch would.


@numba.njit(cache=True, nogil=True)
def _to_steps(rows: Any, chance: Any, packed: Any, lost: Any) -> None:
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
        step = (greatest - least) / np.float32(_STEPS)
        divisor = max(step, _TINY)
        for j in range(width):
            place = np.floor((rows[i, j] - least) / divisor + chance[i, j])
            if not place >= np.float32(0):  # NaN, too
                place = np.float32(0)
            elif place > np.float32(_STEPS):
                place = np.float32(_STEPS)
            packed[i, j] = np.uint8(place)
            if lost.shape[0]:
                away = rows[i, j] - (place * step + least)
                lost[i, j] = away if np.isfinite(away) else np.float32(0)
        ends[0], ends[1] = least, step
        packed[i, width:] = octets


@numba.njit(cache=True, nogil=True)
def _from_steps(packed: Any, rows: Any) -> None:
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
def _to_halves(bits: Any, below: Any, halves: Any) -> None:
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
