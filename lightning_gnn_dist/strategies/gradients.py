"""Gradients outside Lightning's loop: of the user's own step, on batches of our choice, at the current weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_gnn_dist import collectives
from lightning_gnn_dist.strategies import finite
from lightning_gnn_dist.strategies.lightning_internals import takes_batch_idx

Step = Callable[[Any], Tensor | None]


def trained_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters that training changes, in the same order on every rank."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def mean_gradient(strategy: Strategy, batches: Iterable[Any]) -> tuple[list[Tensor], float]:
    r"""The gradient of the mean loss over the seeds of all ``batches``, and how many seeds those are.

    .. math::
        \frac{\sum_b n_b \nabla \mathcal{L}_b}{\sum_b n_b},
        \qquad n_b = \texttt{batch.batch\_size},\; \mathcal{L}_b \text{ the mean over the seeds of } b

    Nothing is exchanged. A batch without seeds, or whose step returns None, counts for nothing, and no batches give
    a zero gradient.
    """
    module = strategy.lightning_module
    assert module is not None
    parameters, step, scale = trained_parameters(module), step_of(module), loss_scale(strategy)
    total, seeds = [torch.zeros_like(parameter) for parameter in parameters], 0
    for batch in batches:
        if not batch.batch_size:
            continue
        with torch.enable_grad(), strategy.precision_plugin.train_step_context():
            loss = step(strategy.batch_to_device(batch))
        if loss is None:
            continue
        gradients = _gradients(loss * scale, parameters, _name_of_step(module))
        if scale != 1.0 and not all(bool(g.isfinite().all()) for g in gradients if g is not None):
            continue  # an overflow of half precision: as in training, the batch is skipped
        for whole, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                whole.add_(gradient, alpha=batch.batch_size / scale)
        seeds += batch.batch_size
    return [whole.div_(max(seeds, 1)) for whole in total], float(seeds)


def average_gradient_(strategy: Strategy, gradient: list[Tensor], seeds: float) -> None:
    """Replace what :func:`mean_gradient` gave each rank by the mean over the seeds of all. Collective."""
    try:
        finite.average_gradient_(gradient, seeds, getattr(strategy, "nonfinite", "refuse"), "correction")
    except ValueError:  # on all ranks alike: none of them has any
        require_seeds(strategy, 0.0)
    if collectives.world_size() == 1:
        require_seeds(strategy, seeds)


def require_seeds(strategy: Strategy, seeds: float) -> None:
    """Refuse a gradient over nothing, but for overflows of half precision, which pass."""
    if not seeds and loss_scale(strategy) == 1.0:
        assert strategy.lightning_module is not None
        raise ValueError(
            f"{_name_of_step(strategy.lightning_module)}() returned None for every batch of a correction, which leaves "
            "nothing to correct by: return the mean loss over the first batch.batch_size nodes."
        )


def has_own_step(module: LightningModule) -> bool:
    """Whether the module says itself what a correction is."""
    return callable(getattr(module, "correction_step", None))


def step_of(module: LightningModule) -> Step:
    """The module's ``correction_step(batch)`` if it has one, else its ``training_step``."""
    step, name = getattr(module, _name_of_step(module)), _name_of_step(module)
    index = (0,) if not has_own_step(module) and takes_batch_idx(module) else ()
    return lambda batch: _loss(step(batch, *index), name)


@contextmanager
def unrecorded(module: LightningModule) -> Iterator[None]:
    """Run steps that are not the user's: what they log and what their metrics count is forgotten."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [_metric_state(metric) for metric in metrics]
    module.log = module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del module.log, module.log_dict
        for metric, state in zip(metrics, states, strict=True):
            metric.__dict__.update(state)


@contextmanager
def evaluating(module: nn.Module, moving: Collection[nn.Module] = ()) -> Iterator[None]:
    """Without dropout, and with every buffer but those of ``moving`` left as it is, whatever a step writes into it."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        with _unmoved(child for child in module.modules() if child not in moving):
            yield
    finally:
        for child in training:
            child.training = True


def loss_scale(strategy: Strategy) -> float:
    """By what mixed precision multiplies the loss, so that half precision holds its gradients."""
    scaler = getattr(strategy.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _name_of_step(module: LightningModule) -> str:
    return "correction_step" if has_own_step(module) else "training_step"


def _loss(output: Any, name: str) -> Tensor | None:
    loss = output.get("loss", output) if isinstance(output, dict) else output
    if loss is None:  # Lightning's way to skip a batch
        return None
    if problem := _problem(loss):
        otherwise = "" if name == "correction_step" else ", or define correction_step(batch), which does"
        raise TypeError(
            f"{name}() returned {problem}, but a correction needs the mean loss over the first batch.batch_size nodes, "
            f"with its gradient: return that{otherwise}."
        )
    assert isinstance(loss, Tensor)
    return loss


def _problem(loss: Any) -> str | None:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}"
    if torch.is_grad_enabled() and not loss.requires_grad:
        return "a loss without a gradient, detached or computed under no_grad()"
    return None


def _gradients(loss: Tensor, parameters: list[Tensor], name: str) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise RuntimeError(f"{name}() must return the loss and leave backward() to the strategy.") from error


@contextmanager
def _unmoved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What steps write into the buffers of these modules, without their children's, is forgotten."""
    saved = [
        (child._buffers, name, buffer, None if buffer is None else buffer.clone())
        for child in modules
        for name, buffer in child._buffers.items()
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, value in saved:
            if buffer is not None and value is not None:
                buffer.detach().copy_(value)
            buffers[name] = buffer  # a step may have put another in its place


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: _copied(metric.__dict__[name]) for name in names if name in metric.__dict__}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
