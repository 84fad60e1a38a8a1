"""Layers that normalise by the rows that they are given, so that a row depends on others."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn import norm

from lightning_gnn_dist.layers.through_layers import has_layers

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


def against_running_layers(module: nn.Module) -> str | None:
    """Return why a boundary cannot run the layers of a module for it, and what to do; None where it can."""
    if not has_layers(module):
        return (
            f"{type(module).__name__} does not say what its layers are: define layers(), and let forward() return "
            "through_layers(self, batch). For one of PyG's models, layers() returns layers_of(self.gnn). "
            "Any module trains with boundary=Halo()."
        )
    if (norm := norm_of_batch(module)) is None:
        return None
    return (
        f"{norm} normalises by the rows of all nodes at once, and a rank has its own: use torch.nn.LayerNorm (in "
        'PyG\'s models norm="LayerNorm", norm_kwargs={"mode": "node"}), or boundary=Halo().'
    )
