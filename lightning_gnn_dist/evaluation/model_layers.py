"""The layers that an evaluation can compute one by one: those of a module, or of the one model of PyG in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch_geometric.nn import norm
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.seed_batch import Neighbourhood, Promise
from lightning_gnn_dist.layerwise.layers import HasLayers, Layer, has_layers, layers_in
from lightning_gnn_dist.layerwise.ready_made import layers_of, needs_whole_graph

log = logging.getLogger(__name__)

_OF_ALL_ROWS = (norm.GraphNorm, norm.PairNorm, norm.MeanSubtractionNorm, norm.GraphSizeNorm)

RowsOf = Callable[[Neighbourhood], Tensor | None]


@dataclass(frozen=True)
class ModelLayers:
    """A model as a list of layers.

    Attributes:
        owner: The module whose rows they compute.
        layers: The layers, each a function of a batch of one hop.
        norm: The name of a layer that must see the rows of all nodes at once, or None.
    """

    owner: nn.Module
    layers: list[Layer]
    norm: str | None

    @property
    def are_better(self) -> bool:
        """Whether the layers are computed one by one whatever it costs to count.

        A model of PyG's computes each layer on all nodes of a batch, with a message for each edge. And on full
        neighbourhoods layers that normalise by the whole graph would give other rows.
        """
        return isinstance(self.owner, BasicGNN) or self.norm is not None or needs_whole_graph(self.layers)


def layers_of_model(module: nn.Module) -> ModelLayers | None:
    """Return the layers of a module: its own, or those of the one PyG model in it. None if there are none."""
    try:
        if has_layers(module):
            return ModelLayers(module, layers_in(cast(HasLayers, module)), norm_of_all_rows(module))
        gnn = _only_model_of_pyg(module)
        return None if gnn is None else ModelLayers(gnn, layers_of(gnn), None)
    except (TypeError, ValueError) as error:  # it may never run its layers: then it works on full neighbourhoods
        log.info("Evaluation samples full neighbourhoods, since layers cannot be computed one by one: %s", error)
        return None


def _only_model_of_pyg(module: nn.Module) -> BasicGNN | None:
    """Return the one model of PyG's in a module; None if there are several, or none, or the module is compiled."""
    found = [child for child in module.modules() if isinstance(child, BasicGNN)]
    is_compiled = getattr(module, "_compiler_ctx", None) is not None
    is_compiled |= any(hasattr(child, "_orig_mod") for child in module.modules())
    return found[0] if len(found) == 1 and not is_compiled else None


def norm_of_all_rows(module: nn.Module) -> str | None:
    """Return the name and type of a layer that must see the rows of all nodes at once; None if there is none."""
    for name, child in module.named_modules():
        is_one = isinstance(child, _OF_ALL_ROWS)
        is_one |= isinstance(child, norm.LayerNorm) and child.mode == "graph"
        is_one |= isinstance(child, norm.InstanceNorm) and not child.track_running_stats
        if is_one:
            return f"{name} ({type(child).__name__})"
    return None


@contextmanager
def answered(owner: nn.Module, rows_of: RowsOf) -> Iterator[None]:
    """In the block, let a model of PyG answer with rows that are ready where it is asked for a promised batch."""
    if not isinstance(owner, BasicGNN):
        yield
        return
    forward = owner.forward

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        given = [*args, *kwargs.values()]
        promised = len(given) == 2 and all(isinstance(item, Promise) for item in given)
        origins = [item.origin for item in given] if promised else []
        if [name for _, name in origins] != ["x", "edge_index"] or origins[0][0] is not origins[1][0]:
            result: Tensor = forward(*args, **kwargs)
            return result
        neighbourhood = origins[0][0]
        return Promise(lambda: forward(*args, **kwargs), lambda: rows_of(neighbourhood), neighbourhood.num_seeds)

    owner.forward = answer
    try:
        yield
    finally:
        del owner.forward
