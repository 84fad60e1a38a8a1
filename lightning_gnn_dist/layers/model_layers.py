"""The layers that an evaluation can compute one by one: those of a module, or of the one model of PyG in it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch_geometric.nn import norm
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.joint import RowsOfRanks
from lightning_gnn_dist.layers.through_layers import Layer, has_layers, layers_in, needs_whole_graph
from lightning_gnn_dist.names import offered
from lightning_gnn_dist.wire.collectives import octets

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


log = logging.getLogger(__name__)

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MOST_COMPARED = 1 << 16  # numbers of a weight; whoever sets other weights does not leave so many as they were


@dataclass(frozen=True)
class ModelLayers:
    """A model as a list of layers.

    Attributes:
        owner: The module whose rows they compute.
        layers: The layers, each a function of a batch of one hop.
        norm: The name of a layer that must see the rows of all nodes at once, or None.
        is_found: Whether this is a model of PyG's in a module, and the module may give it other rows than the graph's.
    """

    owner: nn.Module
    layers: list[Layer]
    norm: str | None
    is_found: ClassVar[bool] = False

    @property
    def are_better(self) -> bool:
        """Whether the layers are computed one by one whatever it costs to count.

        A model of PyG's computes each layer on all nodes of a batch, with a message for each edge. And on full
        neighbourhoods layers that normalise by the whole graph would give other rows.
        """
        return self.is_found or self.norm is not None or needs_whole_graph(self.layers)

    def let_answer(self) -> Callable[[], None]:
        """Let the model answer with ready rows; return what undoes it. A module that runs its layers asks for them."""
        return lambda: None


def layers_as_they_are(module: LightningModule, data: object, num_hops: int, *, is_typed: bool) -> ModelLayers | None:
    """Return the layers of a module, one for each hop, if no hook of it or of its data module changes what they see.

    In a graph with types a model of PyG's is none of them: what it sees of the types is unknown.
    """
    model = layers_of_model(module)
    if model is None or len(model.layers) != num_hops or (is_typed and model.is_found):
        return None
    changed = [name for name in _HOOKS if is_overridden(name, module) or is_overridden(name, data)]
    if changed and model.owner is module:
        log.info("The layers are not computed one by one, as %s() may change what they see.", changed[0])
        return None
    return model


def layers_of_model(module: nn.Module) -> ModelLayers | None:
    """Return the layers of a module: its own, or those of the one PyG model in it. None if there are none."""
    try:
        if has_layers(module):
            return ModelLayers(module, layers_in(module), norm_of_all_rows(module))
        found = offered("layers of PyG") if any(isinstance(child, BasicGNN) for child in module.modules()) else None
        model: ModelLayers | None = None if found is None else found.of(module)
        return model
    except (TypeError, ValueError) as error:  # it may never run its layers: then it works on full neighbourhoods
        log.info("Evaluation samples full neighbourhoods, since layers cannot be computed one by one: %s", error)
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled before it computes."""
    made = (getattr(module, name, None) for name in ("_orig_mod", "_compiler_ctx", "_compiled_call_impl"))
    return any(item is not None for item in made)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody watches or changes what a module computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class ModelState:
    """What a model's rows depend on: its weights, and whether its modules are in training.

    It holds a copy of the weights, of large ones of some numbers. Of rows that live with one rank each it knows how
    often they have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = _versions(model)
        self._tensors = _tensors(model, self._versions)
        self._values = [_compared(tensor).clone() for tensor in self._tensors]

    @property
    def digest(self) -> int:
        """A number that is equal for equal weights."""
        number = zlib.crc32(repr([*self._versions.values()]).encode())
        for values in self._values:
            number = zlib.crc32(octets(values.cpu()).numpy().tobytes(), number)
        return number

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model is in evaluation and still has these weights."""
        if is_in_training(model):
            return False
        if _versions(model) != self._versions:
            return False
        now = _tensors(model, self._versions)
        are_same = len(now) == len(self._tensors) and all(map(lambda a, b: a is b, now, self._tensors))
        return are_same and _are_equal([*map(_compared, now)], self._values)


def is_in_training(model: nn.Module) -> bool:
    """Whether any module of a model is in training: dropout and batch norms then compute other rows every time."""
    return any(child.training for child in model.modules())


def _versions(model: nn.Module) -> dict[nn.Module, int]:
    """Return the modules whose rows live with one rank each, and how often these have changed."""
    versions = {child: child.settled_version() for child in model.modules() if isinstance(child, RowsOfRanks)}
    return {child: version for child, version in versions.items() if version is not None}


def _tensors(model: nn.Module, divided: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors of a model that hold numbers, but for those of modules whose rows live with one rank each."""
    lazy = nn.UninitializedParameter | nn.UninitializedBuffer
    elsewhere = {id(each) for child in divided for each in child.parameters()}
    tensors = (*model.parameters(), *model.buffers())
    return [tensor for tensor in tensors if not isinstance(tensor, lazy) and id(tensor) not in elsewhere]


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are equal in pairs. For those on a device the host waits once."""
    pairs, there = list(zip(ours, theirs, strict=True)), list[Tensor]()
    for our, their in pairs:
        if (our.shape, our.device, our.dtype) != (their.shape, their.device, their.dtype):
            return False
        if our.device.type != "cpu":
            there.append(our.ne(their).any())
        elif not torch.equal(our, their):
            return False
    return not there or not bool(torch.stack(there).any())


def _compared(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _MOST_COMPARED)]
