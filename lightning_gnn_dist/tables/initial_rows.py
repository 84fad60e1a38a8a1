"""Rows of a table before it is trained: what they are depends on the table's seed and on their ids alone.

They are drawn a block of rows at a time, so that any range of them can be made without the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_OF_BLOCK = 1024
_MIX = 0x9E3779B97F4A7C15  # neighbouring seeds are sent far from each other
_SEEDS = 1 << 32  # what torch's generator tells apart


@torch.no_grad()
def initial_rows_(out: Tensor, first: int, seed: int, std: float) -> None:
    """Fill ``out`` with the rows from number ``first`` on: normal numbers of this standard deviation."""
    stop = first + len(out)
    for block in range(first // ROWS_OF_BLOCK, -(-stop // ROWS_OF_BLOCK)):
        begin = block * ROWS_OF_BLOCK
        generator = torch.Generator().manual_seed(((seed * _MIX >> 32) + block) % _SEEDS)
        rows = torch.randn(ROWS_OF_BLOCK, out.shape[1], generator=generator, dtype=torch.float32).mul_(std)
        low, high = max(first, begin), min(stop, begin + ROWS_OF_BLOCK)
        out[low - first : high - first] = rows[low - begin : high - begin]  # in its own type, on its device
