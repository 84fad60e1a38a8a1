"""Whether an evaluation sees as far as a model does, as far as layers say it.

    hops = max(hops of the sampler, hops of all layers, if one takes several) + hops more in which degrees are counted

A batch of all neighbours within H hops gives its seeds the outputs that the whole graph does, if the model has at most
H layers that pass messages. How a module uses its layers cannot be read off it, with one exception: PyG's own models
say how many layers they chain. Of all others a look at a few seeds tells.

A layer that divides by the degrees of senders counts them in the edges that it is given. The outermost nodes of a batch
have none, so an evaluation draws theirs, too. What a module does by functions of its own cannot be seen.

So a few seeds are looked at before the first evaluation:

    difference = max |f(hops as planned) - f(one hop more)| / max |f(hops as planned)|

It is 0 but for rounding if the rows of an evaluation are those of the whole graph. All ranks look at the same seeds,
and call the model equally often, so that they stay in step whatever it asks of the others.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import UnionType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import HeteroConv, MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.batch import in_type
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import RowsOfRanks
from lightning_gnn_dist.layers.choice import Judged, Neighbourhoods
from lightning_gnn_dist.layers.layered_loader import for_layers
from lightning_gnn_dist.layers.through_layers import has_layers, is_compiled, is_in_training, is_watched
from lightning_gnn_dist.sampling.base import Sampler

log = logging.getLogger(__name__)

_CANDIDATES, _SEEDS = 32, 8  # seeds that are measured, and of these the most that are looked at
_MOST_BYTES = 8 << 20  # of a batch: a model takes some 10 ms for it
_MOST_STATE = 64 << 20  # bytes of a module's buffers, which are copied
_ROUNDING = 2 / 3  # two ways to add up differ by less than this power of a type's precision

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


def check_depth(module: nn.Module, sampler: Sampler) -> None:
    """Refuse a model that certainly passes messages over more hops than a sampler draws."""
    for name, child in module.named_modules():
        if isinstance(child, BasicGNN) and child.num_layers > sampler.num_hops:
            raise ValueError(
                f"{name or 'the model'} ({type(child).__name__}) has num_layers={child.num_layers}, and {sampler} "
                f"draws {sampler.num_hops} hops: metrics would not be those of the whole graph. Give the sampler "
                "as many hops as the model has layers."
            )


def seen_farther(module: LightningModule, judged: Judged, access: Any, num_batches: int, num_hops: int) -> float | None:
    """Compare the outputs of a model with those on one hop more, and warn if they differ. All ranks do so.

    Args:
        module: The model.
        judged: What all ranks evaluate.
        access: Where the graph lives.
        num_batches: Batches of each rank.
        num_hops: The hops of training batches.

    Returns:
        What one hop more makes of the outputs, in parts of 1; None if nothing, or if it cannot be tried.
    """
    precision, name = access.running.trainer.precision_plugin, type(module).__name__
    try:
        with torch.no_grad(), untouched(module), isolate_rng(), precision.forward_context():
            found = _difference(module, judged, access, num_hops)
    except Exception as error:  # of any kind: what the module does in its own steps may be right
        log.info("Whether %s sees farther than its batches could not be tried: %s", name, error)
        return None
    whole = access.whole if num_batches == judged.num_ranks == 1 else None
    if found is None or (whole is not None and _is_all(whole, judged)):
        return None  # or all: the batch of the evaluation is the whole graph
    rank_zero_warn(
        f"{name} sees farther than num_hops={num_hops}: with one more hop, outputs of some seeds differ by up to "
        f"{found:.1%}. Figures and predictions are estimates. Define the model by layers(), give the sampler more "
        "hops, or predict all nodes in one batch of the whole graph; Evaluation(probe=False) leaves this look out."
    )
    return found


def _is_all(graph: Graph, judged: Judged) -> bool:
    """Whether one batch around all that is judged is the whole graph."""
    reached = Neighbourhoods(graph, judged.sampler(0).num_hops).of(judged.nodes)
    return (reached.nodes[-1], reached.edges[-1]) == (graph.num_nodes, graph.num_edges)


def may_be_called(module: nn.Module) -> bool:
    """Whether one more call leaves no trace, takes no long preparation, and asks no other rank for rows."""
    if is_in_training(module) or any(map(is_lazy, module.parameters())):
        return False
    if sum(tensor.nbytes for tensor in _tensors(module)) > _MOST_STATE:
        return False
    children = list(module.modules())
    return not any(is_compiled(each) or is_watched(each) or isinstance(each, RowsOfRanks) for each in children)


def _difference(module: LightningModule, judged: Judged, access: Any, num_layers: int) -> float | None:
    """The largest difference that one hop more makes, if it is more than rounding."""
    ids, run = _ids_to_look_at(judged, access), access.running
    model = _model_of(module)
    if model is None or not len(ids):
        return None

    def rows(more_hops: int) -> Tensor:
        source = access.whole_source(judged.sampler(more_hops), evaluates=True)
        (batch,) = source.make([ids], [BatchKey(0, 0, 0)])
        batch = for_layers(in_type(batch, run.dtype), num_layers).to(run.trainer.strategy.root_device)
        return _rows_of_seeds(_called(model, batch), batch)

    planned, wider = rows(0), rows(1)
    found = _distance(planned, wider)
    if not found > _precision(planned) ** _ROUNDING or _distance(planned, rows(0)):  # a model that draws differs anyway
        return None
    return found


def _ids_to_look_at(judged: Judged, access: Any) -> Tensor:
    """Some seeds around which there is little, and more with one hop more: no hubs."""
    count = len(judged.ids)
    ids = judged.at(torch.linspace(0, count - 1, min(_CANDIDATES, count)).round().to(torch.int64))
    sizes = access.bytes_around([judged.nodes_of(one) for one in ids.split(1)], _MOST_BYTES)
    taken, left = list[int](), _MOST_BYTES
    for size, at in sorted((size, at) for at, size in enumerate(sizes) if size is not None):
        left -= size
        if left >= 0 and len(taken) < _SEEDS:
            taken.append(at)
    return ids[sorted(taken)]


def _model_of(module: LightningModule) -> nn.Module | None:
    """What can be asked for outputs: the module, or where it has no forward, the one model in it."""
    if type(module).forward is not LightningModule.forward:
        return module
    inner = [child for child in module.children() if any(isinstance(each, MessagePassing) for each in child.modules())]
    return inner[0] if len(inner) == 1 and type(inner[0]).forward is not nn.Module.forward else None


def _called(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch, or if its forward takes several arguments, with what the batch has by their names."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]
    given = [batch] if len(needed) == 1 else [getattr(batch, name) for name in needed]
    return model.forward(*given)


def _rows_of_seeds(outputs: Any, batch: Any) -> Tensor:
    """The rows of seeds, or of pairs of them, in what a model returns."""
    count = min(batch.batch_size, batch.num_targets)
    if isinstance(outputs, Mapping):  # by the types of nodes
        outputs = outputs[batch.seed_type]
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point() or len(outputs) < count:
        raise TypeError(f"it returned no rows of {count} seeds.")
    return outputs[:count].detach()


def _distance(first: Tensor, second: Tensor) -> float:
    first, second = first.cpu().double(), second.cpu().double()  # not every device has float64
    return float((first - second).abs().max() / first.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _precision(rows: Tensor) -> float:
    """The precision of the least precise type that has a part in some rows."""
    kind = rows.device.type
    types = [rows.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    if kind == "cuda" and torch.get_float32_matmul_precision() != "highest":
        types.append(torch.float16)  # which has as many digits as TF32
    return max(torch.finfo(each).eps for each in types)


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Set buffers, attributes, and what lists and dicts among these hold, back to what they were."""
    attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
    holders = [held for _, values in attributes for held in values.values() if isinstance(held, list | dict | set)]
    contents = [copy.copy(holder) for holder in holders]
    values = [(tensor, tensor.clone()) for tensor in _tensors(module)]
    try:
        yield
    finally:
        for holder, content in [*attributes, *zip(holders, contents, strict=True)]:
            _set_back(holder, content)
        for tensor, value in values:
            if not tensor.equal(value):
                tensor.copy_(value)


def _set_back(holder: Any, content: Any) -> None:
    holder.clear()
    (holder.extend if isinstance(holder, list) else holder.update)(content)


def _tensors(module: nn.Module) -> list[Tensor]:
    own = [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
    return [*module.buffers(), *own]


class Exactness:
    """Knows in a run whether figures are those of the whole graph, and tells when they are not.

    Args:
        sampler: Draws training batches.
        estimating: Draws neighbours in evaluations, or None where they see all.
        probes: Whether a few seeds are looked at before an evaluation.

    Attributes:
        difference: What one hop more makes of the outputs of the last model, in parts of 1; None if nothing.
    """

    def __init__(self, sampler: Sampler, estimating: Sampler | None, *, probes: bool) -> None:
        self._num_hops, self._probes = sampler.num_hops, probes
        self._seen: object = None  # the model that was looked at last
        self.difference: float | None = None
        if estimating is not None:
            log.info("Evaluation draws neighbours with %s: figures are estimates.", estimating)

    def look(self, judged: Judged, access: Any, num_batches: int) -> None:
        """Before the first evaluation of a model, of so many batches, look whether it sees farther. All ranks do so."""
        trainer: Trainer | None = access.running.trainer
        if not self._probes or trainer is None or not (trainer.evaluating or trainer.predicting):
            return
        module: Any = trainer.lightning_module
        if module is not self._seen and may_be_called(module):
            self._seen = module
            self.difference = seen_farther(module, judged, access, num_batches, self._num_hops)
