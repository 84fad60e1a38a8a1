"""A look at a few seeds, which shows what layers do not say: whether a model sees farther than its batches.

    difference = max |f(hops as planned) - f(one hop more)| / max |f(hops as planned)|

It is 0 but for rounding if the rows of an evaluation are those of the whole graph. All ranks look at the same seeds,
and call the model equally often, so that they stay in step whatever it asks of the others.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from lightning_gnn_dist.batches.batch import in_type
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.joint import RowsOfRanks
from lightning_gnn_dist.layers.choice import Judged
from lightning_gnn_dist.layers.layered_loader import for_layers
from lightning_gnn_dist.layers.model_layers import is_compiled, is_in_training, is_watched

log = logging.getLogger(__name__)

_CANDIDATES, _SEEDS = 32, 8  # seeds that are measured, and of these the most that are looked at
_MOST_BYTES = 8 << 20  # of a batch: a model takes some 10 ms for it
_MOST_STATE = 64 << 20  # bytes of a module's buffers, which are copied
_ROUNDING = 2 / 3  # two ways to add up differ by less than this power of a type's precision


class Probe:
    """Compares the outputs of a model with those on one hop more, once for each run and model.

    Args:
        num_hops: The hops of training batches.

    Attributes:
        difference: What one hop more makes of the outputs of the last model, in parts of 1; None if nothing.
    """

    def __init__(self, num_hops: int) -> None:
        self._num_hops = num_hops
        self._seen: object = None  # the model that was looked at last
        self.difference: float | None = None

    def forget(self) -> None:
        """Look anew before the next evaluation."""
        self._seen = self.difference = None

    def look(self, judged: Judged, access: Any, num_batches: int) -> None:
        """Before the first evaluation of a model, compare its outputs with those on one hop more. All ranks do so.

        Args:
            judged: What all ranks evaluate.
            access: Where the graph lives.
            num_batches: Batches of each rank.
        """
        trainer: Trainer | None = access.running.trainer
        if trainer is None or not (trainer.evaluating or trainer.predicting):
            return
        module: Any = trainer.lightning_module
        if module is self._seen or not _may_be_called(module):
            return
        self._seen, self.difference = module, None
        try:
            with torch.no_grad(), untouched(module), isolate_rng(), trainer.precision_plugin.forward_context():
                found = _difference(module, judged, access, self._num_hops)
        except Exception as error:  # of any kind: what the module does in its own steps may be right
            log.info("Whether %s sees farther than its batches could not be tried: %s", type(module).__name__, error)
            return
        is_all = num_batches == judged.num_ranks == 1 and found is not None and access.is_whole_graph(judged.nodes)
        if found is not None and not is_all:  # all: the batch of the evaluation is the whole graph
            self.difference = found
            name, num_hops = type(module).__name__, self._num_hops
            rank_zero_warn(
                f"{name} sees farther than num_hops={num_hops}: with one more hop, outputs of some seeds differ by up "
                f"to {found:.1%}. Figures and predictions are estimates. Define the model by layers(), give the "
                "sampler more hops, or predict all nodes in one batch of the whole graph; Evaluation(probe=False) "
                "leaves this look out."
            )


def _may_be_called(module: nn.Module) -> bool:
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
        source = access.evaluation_source(judged.sampler(more_hops))
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
