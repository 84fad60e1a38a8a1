"""Compares what edges carry, row by row."""

from __future__ import annotations

import torch
from torch import Tensor


def numbered_rows(array: Tensor) -> Tensor:
    """A number for each row, the same for equal ones. NaN equals NaN."""
    rows = array.flatten(1) if array.dim() > 1 else array[:, None]
    if rows.is_floating_point():
        rows = torch.cat([rows.nan_to_num(0.0), rows.isnan().to(rows.dtype)], 1)
    numbers: Tensor = rows.unique(dim=0, return_inverse=True)[1]
    return numbers
