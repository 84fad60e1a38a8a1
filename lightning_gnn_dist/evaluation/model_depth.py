"""A check that a model looks no further than the batches that it is evaluated on.

A batch of all neighbours within H hops gives its seeds the outputs that the whole graph does, if the model has at
most H layers that pass messages. With more, the outermost nodes lack neighbours, and metrics are no longer exact. How a
module uses its layers cannot be read off it, with two exceptions: PyG's own models say how many layers they chain, and
a list of layers that fit one behind the other is most likely a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch_geometric.nn import MessagePassing, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN


class DepthCheck:
    """Checks each model once, however many loaders evaluate it."""

    def __init__(self) -> None:
        self._seen: object = None

    def check(self, trainer: Any, sampler: Any) -> None:
        """Refuse a model deeper than ``sampler``, which draws training batches: evaluation takes as many hops."""
        module = getattr(trainer, "lightning_module", None)
        if module is not None and module is not self._seen:
            self._seen = module
            check_depth(module, sampler.num_hops, sampler)


def check_depth(module: nn.Module, num_hops: int, sampler: object) -> None:
    """Refuse a model that certainly passes messages over more than ``num_hops`` hops; warn of one that likely does."""
    for name, child in module.named_modules():
        if isinstance(child, BasicGNN) and child.num_layers > num_hops:
            raise ValueError(
                f"{name or 'the model'} ({type(child).__name__}) has num_layers={child.num_layers}, and {sampler} "
                f"draws {num_hops} hops: metrics would not be those of the whole graph. Give the sampler as many hops "
                "as the model has layers."
            )
    for name, layers in _chains(module):
        if len(layers) > num_hops:
            rank_zero_warn(
                f"{name} has {len(layers)} message-passing layers, and {sampler} draws {num_hops} hops. If they follow "
                "one another, metrics are not those of the whole graph: give the sampler as many hops as the model has "
                "layers, and write zip(layers, batch.blocks, strict=True) where batches are read layer by layer."
            )


def _chains(module: nn.Module) -> Iterator[tuple[str, list[MessagePassing]]]:
    """Yield the name and layers of each list in which every layer may take what the one before returns."""
    for name, child in module.named_modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential | Sequential):
            continue
        layers = [layer for layer in child if isinstance(layer, MessagePassing)]
        if layers and all(_fits(first, second) for first, second in pairwise(layers)):
            yield name or type(child).__name__, layers


def _fits(first: Any, second: Any) -> bool:
    """Return whether the second layer may take what the first returns; parallel layers mostly may not."""
    given, taken = getattr(first, "out_channels", None), getattr(second, "in_channels", None)
    taken = taken[0] if isinstance(taken, tuple) else taken  # a layer between two kinds of nodes has two widths
    if not isinstance(given, int) or not isinstance(taken, int):
        return False
    return taken in (given, given * getattr(first, "heads", 1))
