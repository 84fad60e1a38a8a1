"""Rows of several arrays as if they stood below each other, copied once."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import ROWS_AHEAD, Pool, bits_of, check_rows, room_for
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.intrinsics import LINE, copy_bytes, prefetch
from lightning_gnn_dist.engine.kernels import Array

_U = np.uint64


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


def gather_joined(array: Tensor, held: Tensor, others: Tensor, rows: Tensor, pool: Pool | None = None) -> Tensor:
    """Rows of three arrays as if they stood below each other, copied as :func:`gather_rows` does."""
    shape = (rows.numel(), *array.shape[1:])
    num_bytes = prod(shape) * array.dtype.itemsize
    if not num_bytes:
        return array.new_empty(shape)
    check_rows(rows, len(array) + len(held) + len(others))
    first, second, third = (bits_of(source, torch.uint8) for source in (array, held, others))
    out = room_for(num_bytes, pool)
    gather_of_three(first, second, third, rows.numpy(), out.numpy(), num_bytes // rows.numel())
    return out.view(array.dtype).view(shape)
