"""Rows in fewer bytes for the wire, rounded at random so that they are right in the mean.

    16 bits     bfloat16: the upper half of a float32, to which a random number below one step is added before
    8 bits      256 steps between the least and the greatest number of a row; these two travel along as float32

With :math:`u` uniform in [0, 1), a number :math:`x` of a row from :math:`a` to :math:`b` becomes
:math:`a + s \\lfloor (x - a) / s + u \\rfloor` with :math:`s = (b - a) / 255` (AdaQP, Wan et al., arXiv:2306.01381).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Bits = Literal[8, 16]
_STEPS = 255
_BYTES_OF_RANGE = 8  # two float32


class Codec:
    """Packs rows into bytes, and unpacks them.

    Args:
        bits: Bits of a number: 8 or 16.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def bytes_of_row(self, width: int) -> int:
        """The bytes that a row of ``width`` numbers takes."""
        return 2 * width if self.bits == 16 else width + _BYTES_OF_RANGE

    def pack(self, rows: Tensor, chance: torch.Generator) -> Tensor:
        """Return the bytes of rows on the CPU, uint8, shape ``(n, bytes of a row)``.

        Args:
            rows: Rows of floating point numbers, shape ``(n, ...)``.
            chance: Decides which numbers are rounded up.
        """
        flat = rows.reshape(len(rows), rows.shape[1:].numel()).to(torch.float32)
        return _as_bfloat16(flat, chance) if self.bits == 16 else _as_steps(flat, chance)

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return the rows, in the type and of the shape that the rows of ``like`` have."""
        if not packed.numel():
            return like.new_empty((len(packed), *like.shape[1:]))
        if self.bits == 16:
            flat = _copy(packed).view(torch.bfloat16)
        else:
            least, step = _copy(packed[:, -_BYTES_OF_RANGE:]).view(torch.float32).split(1, 1)
            flat = packed[:, :-_BYTES_OF_RANGE].to(torch.float32).mul_(step).add_(least)
        return flat.to(like.dtype).view(len(packed), *like.shape[1:])


def _copy(octets: Tensor) -> Tensor:
    """The same bytes in memory of their own, as wider numbers may not begin at any byte."""
    return octets.clone(memory_format=torch.contiguous_format)


def _as_bfloat16(flat: Tensor, chance: torch.Generator) -> Tensor:
    below = torch.randint(1 << 16, flat.shape, generator=chance, dtype=torch.int32)
    upper = (flat.contiguous().view(torch.int32) + below) >> 16
    rounded = upper.to(torch.int16).view(torch.bfloat16)
    # Infinities and NaN have no next number; the greatest finite ones may round up to infinity, as they do in torch.
    return torch.where(flat.isfinite(), rounded, flat.to(torch.bfloat16)).view(torch.uint8)


def _as_steps(flat: Tensor, chance: torch.Generator) -> Tensor:
    if not flat.numel():
        return torch.zeros((len(flat), flat.shape[1] + _BYTES_OF_RANGE), dtype=torch.uint8)
    least, greatest = flat.aminmax(dim=1, keepdim=True)
    step = (greatest - least) / _STEPS
    places = (flat - least).div_(step.clamp(min=torch.finfo(torch.float32).tiny))
    places.add_(torch.rand(flat.shape, generator=chance, dtype=torch.float32)).floor_().clamp_(0, _STEPS)
    ranges = torch.cat([least, step], 1).view(torch.uint8)
    return torch.cat([places.nan_to_num_(0.0).to(torch.uint8), ranges], 1)
