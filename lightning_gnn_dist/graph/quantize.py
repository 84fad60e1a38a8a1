"""Features in a quarter of the memory: int8, with one scale for each row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_plain, check_tensor, shown
from lightning_gnn_dist.graph.convert import SUFFIX, check_finite

LARGEST = 127  # -128 is not used, so both signs have the same range
ROWS_AT_ONCE = 1 << 16


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as int8 and one float32 scale per row: ``data.x, data.x_scale = quantize_rows(data.x)``.

    Batches hold ``x`` as float32 again. An entry is off by at most 1/254 of the largest in its row.
    """
    check_tensor("x", x, "features, one row for each node")
    if x.dim() < 2 or not x.is_floating_point() or (len(x) and not x.numel()):
        raise ValueError(f"x must be rows of floating point numbers, got {shown(x)}: others have nothing to quantise.")
    check_plain("x", x.detach())
    small, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x))
    for start in range(0, len(x), ROWS_AT_ONCE):
        rows = x[start : start + ROWS_AT_ONCE].detach().float()
        check_finite(rows, start)  # as float32, whose largest number is 3.4e38
        scale = rows.flatten(1).abs().amax(1) / LARGEST
        scales[start : start + ROWS_AT_ONCE] = scale
        per_row = torch.where(scale > 0, scale, 1.0).view(-1, *[1] * (x.dim() - 1))
        small[start : start + ROWS_AT_ONCE] = (rows / per_row).round().to(torch.int8)
    return small, scales


def scale_of(name: str, arrays: Mapping[str, Tensor]) -> Tensor | None:
    """The array ``<name>_scale`` if it scales the int8 array ``name``, one float per row; otherwise None."""
    array, scale = arrays[name], arrays.get(name + SUFFIX)
    if array.dtype != torch.int8 or scale is None or not scale.is_floating_point() or scale.numel() != len(array):
        return None
    return scale
