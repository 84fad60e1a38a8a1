"""Whether an evaluation sees as far as a model does, as far as layers say it.

    hops = max(hops of the sampler, hops of all layers, if one takes several) + hops more in which degrees are counted

A batch of all neighbours within H hops gives its seeds the outputs that the whole graph does, if the model has at most
H layers that pass messages. How a module uses its layers cannot be read off it, with two exceptions: PyG's own models
say how many layers they chain, and a list of layers that fit one behind the other is most likely a chain.

A layer that divides by the degrees of senders counts them in the edges that it is given. The outermost nodes of a batch
have none, so an evaluation draws theirs, too. What a module does by functions of its own cannot be seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import UnionType
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch_geometric.nn import HeteroConv, MessagePassing, Sequential
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.layers.choice import Judged
from lightning_gnn_dist.layers.probe import Probe
from lightning_gnn_dist.layers.through_layers import has_layers
from lightning_gnn_dist.sampling.base import Sampler

# The functions by which layers count degrees, and within how many hops more all edges of a node are there: those into
# it one hop further, those out of it another one, if both directions of every edge are in the graph.
_COUNTS_DEGREES = {"gcn_norm": 1, "get_laplacian": 2}
_OF_OTHERS = {"degree": 1}  # with it PyG's own layers count those of receivers alone


class _Takes(NamedTuple):
    """An attribute by which layers that call a function say over how many hops they look."""

    name: str
    kind: type | UnionType
    function: str
    count: Callable[[Any], int]


_SEVERAL = (
    _Takes("K", int, "gcn_norm", int),  # SGConv, SSGConv, TAGConv, APPNP
    _Takes("lins", nn.ModuleList, "get_laplacian", lambda lins: len(lins) - 1),  # ChebConv
    _Takes("powers", list | tuple, "propagate", max),  # MixHopConv
    _Takes("num_layers", int, "propagate", int),  # ARMAConv, GatedGraphConv, LabelPropagation
)


def hops_of_evaluation(module: nn.Module, num_hops: int) -> int:
    """Return how many hops an evaluation of a module draws, whose training draws ``num_hops``.

    The layers of a module with ``layers`` are computed on batches of one hop each, so it takes no more.
    """
    if has_layers(module):
        return num_hops
    takes_several, taken = _hops(module)
    return max(num_hops, taken if takes_several else 0) + max(map(_hops_of_degrees, module.modules()), default=0)


def _hops(module: nn.Module) -> tuple[bool, int]:
    """Return whether a layer takes several hops, and the hops of all layers, as if one followed the other."""
    own = _hops_of_layer(module) if isinstance(module, MessagePassing) else 0
    inner = [_hops(child) for child in module.children()]
    if isinstance(module, HeteroConv):
        inner = [_hops(child) for child in module.convs.values()]
        return any(several for several, _ in inner), max((hops for _, hops in inner), default=0)
    return own > 1 or any(several for several, _ in inner), own + sum(hops for _, hops in inner)


def _hops_of_layer(layer: nn.Module) -> int:
    called = set(_names_read(type(layer)))
    for takes in _SEVERAL:
        value = getattr(layer, takes.name, None)
        if isinstance(value, takes.kind) and takes.function in called:
            return takes.count(value)
    return 1


def _hops_of_degrees(module: nn.Module) -> int:
    """Return within how many hops more a module counts the degrees of senders; 0 if it counts none."""
    if getattr(module, "normalize", True) is False:
        return 0
    kind = type(module)
    known = _COUNTS_DEGREES if kind.__module__.startswith("torch_geometric.") else _COUNTS_DEGREES | _OF_OTHERS
    return max((known.get(name, 0) for name in _names_read(kind)), default=0)


def _names_read(kind: type) -> Iterator[str]:
    """Yield the names that the methods of a layer read, or the forward of another module."""
    for base in kind.__mro__:
        if base in (MessagePassing, nn.Module):
            return
        methods = vars(base) if issubclass(kind, MessagePassing) else {"forward": vars(base).get("forward")}
        for method in methods.values():
            yield from getattr(getattr(method, "__code__", None), "co_names", ())


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


log = logging.getLogger(__name__)


class Exactness:
    """Knows whether figures are those of the whole graph, and tells when they are not.

    Args:
        sampler: Draws training batches.
        estimating: Draws neighbours in evaluations, or None where they see all.
        probes: Whether a few seeds are looked at before an evaluation.
    """

    def __init__(self, sampler: Sampler, estimating: Sampler | None, *, probes: bool) -> None:
        self._sampler, self._estimating = sampler, estimating
        self._is_told = False
        self._checked: object = None  # the model whose depth was checked last, however many loaders evaluate it
        self.probe = Probe(sampler.num_hops) if probes else None

    def check(self, trainer: Trainer | None) -> None:
        """Refuse a model that is certainly deeper than its batches, and tell once that neighbours are drawn."""
        module: Any = getattr(trainer, "lightning_module", None)
        if module is not None and module is not self._checked:
            self._checked = module
            check_depth(module, self._sampler.num_hops, self._sampler)
        if self._estimating is not None and not self._is_told:
            log.info("Evaluation draws neighbours with %s: figures are estimates.", self._estimating)
            self._is_told = True

    def look(self, judged: Judged, access: Any, num_batches: int) -> None:
        """Before an evaluation of so many batches, look whether the model sees farther. All ranks do so."""
        if self.probe is not None:
            self.probe.look(judged, access, num_batches)

    def forget(self) -> None:
        """Look anew before the next evaluation."""
        if self.probe is not None:
            self.probe.forget()
