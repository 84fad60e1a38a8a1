"""The factor of adaptive momentum, by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def agreement(ways: list[Tensor], old: list[Tensor]) -> float:
    """How much of the last round this one repeats, in 1024ths."""
    if not old:
        return 0.0
    now, then = (torch.cat([way.flatten() for way in each]) for each in (ways, old))
    return round(1024 * min(1.0, max(0.0, float(now @ then / (then @ then))))) / 1024
