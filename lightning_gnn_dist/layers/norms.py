"""Layers that normalise by the rows that they are given, so that a row depends on others."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import norm

_OF_ALL_ROWS = (norm.GraphNorm, norm.PairNorm, norm.MeanSubtractionNorm, norm.GraphSizeNorm)


def norm_of_all_rows(module: nn.Module) -> str | None:
    """Return the name and type of a layer that must see the rows of all nodes at once; None if there is none."""
    for name, child in module.named_modules():
        is_one = isinstance(child, _OF_ALL_ROWS)
        is_one |= isinstance(child, norm.LayerNorm) and child.mode == "graph"
        is_one |= isinstance(child, norm.InstanceNorm) and not child.track_running_stats
        if is_one:
            return f"{name} ({type(child).__name__})"
    return None


def norm_of_batch(module: nn.Module) -> str | None:
    """Return the name and type of a layer that normalises by all rows that it is given, or None."""
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            return f"{name} ({type(child).__name__})"
    return norm_of_all_rows(module)
