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

from lightning_gnn_dist.wire.rounding_kernels import BYTES_OF_RANGE, from_steps, to_halves, to_steps

Bits = Literal[8, 16]


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
            return _as_steps(flat, chance, lost)
        packed = _as_bfloat16(flat, chance)
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
            from_steps(packed.contiguous().numpy(), flat.numpy())
        return flat.to(like.dtype).view(len(packed), *like.shape[1:])


def _as_bfloat16(flat: Tensor, chance: torch.Generator) -> Tensor:
    below = torch.randint(1 << 16, flat.shape, generator=chance, dtype=torch.int32)
    halves = torch.empty(flat.shape, dtype=torch.int16)
    to_halves(flat.view(torch.int32).view(-1).numpy(), below.view(-1).numpy(), halves.view(-1).numpy())
    return halves.view(torch.uint8)


def _as_steps(flat: Tensor, chance: torch.Generator, lost: Tensor | None) -> Tensor:
    packed = torch.empty(len(flat), flat.shape[1] + BYTES_OF_RANGE, dtype=torch.uint8)
    if not flat.numel():
        return packed.zero_()
    drawn = torch.rand(flat.shape, generator=chance, dtype=torch.float32)
    to_steps(flat.numpy(), drawn.numpy(), packed.numpy(), (flat.new_empty(0, 0) if lost is None else lost).numpy())
    return packed
