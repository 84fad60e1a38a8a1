"""Gradients outside Lightning's loop: of the user's step at the current weights, on batches that strategies choose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lightning_gnn_dist.rounds.meeting_hook import Fit
from lightning_gnn_dist.rounds.reducer import are_finite, leave_out_, refuse_gradients
from lightning_gnn_dist.rounds.sparse_gradients import check_sparse, no_rows
from lightning_gnn_dist.wire import collectives


def mean_gradient(
    fit: Fit, batches: Iterable[Any], parameters: list[Tensor] | None = None
) -> tuple[list[Tensor], float]:
    r"""Return the gradient of the mean loss over the targets of all ``batches``, and the number of targets.

    .. math::
        \frac{\sum_b n_b \nabla \mathcal{L}_b}{\sum_b n_b},
        \qquad n_b = \texttt{b.num\_targets},\; \mathcal{L}_b \text{ the mean over the targets of } b

    The gradient has one tensor for each of ``parameters``, by default those that are trained; that of a weight
    with rows is sparse. Nothing is exchanged. A batch without targets, or whose step returns None, counts for nothing;
    without any batch the gradient is zero.
    """
    module = fit.lightning_module
    parameters = fit.trained_parameters() if parameters is None else parameters
    scale = loss_scale(fit)
    total, targets = [no_rows(each) if id(each) in fit.rows else torch.zeros_like(each) for each in parameters], 0
    for batch in batches:
        count = getattr(batch, "num_targets", None)  # how many targets its loss is a mean over
        if not (count := int(batch.batch_size if count is None else count)):
            continue
        with torch.enable_grad(), fit.precision_plugin.train_step_context():
            loss = _of_any_size(module, fit.batch_to_device(batch))
        if loss is None:
            continue
        fit.round.gradients_beyond += 1
        gradients = _gradients(fit, loss * scale, parameters)
        if scale != 1.0 and not are_finite(gradient for gradient in gradients if gradient is not None):
            continue  # an overflow of half precision: as in training, the batch is skipped
        for whole, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                whole.add_(gradient, alpha=count / scale)
        targets += count
    means = [whole.div_(max(targets, 1)) for whole in total]
    return [each.coalesce() if each.is_sparse else each for each in means], float(targets)


def average_gradient_(fit: Fit, gradient: list[Tensor], weight: float, what: str = "correction") -> None:
    """Replace each rank's :func:`mean_gradient` by the mean over the targets of all ranks. Collective.

    A rank whose own is not finite is named or left out. Of a weight whose rows live with one rank each, a rank gets the
    gradient of the rows that lie there.

    Args:
        fit: The fit.
        gradient: This rank's.
        weight: What it counts for: its targets.
        what: What gradient it is, for an error.
    """
    is_finite = are_finite(gradient)
    if not is_finite and fit.nonfinite == "leave_out" and collectives.world_size() > 1:
        weight = leave_out_(gradient)
    try:
        fit.reducer.mean_({"gradient": [each for each in gradient if not each.is_sparse]}, weight)
        for state in fit.states if any(each.is_sparse for each in gradient) else ():
            state.average_gradients_(fit.trained_parameters(), gradient, weight)
    except ValueError:  # on all ranks alike: none of them has any
        require_seeds(fit, 0.0)
    if not are_finite(gradient):  # the same on all ranks
        refuse_gradients(is_finite, gradient[0].device, what)


def require_seeds(fit: Fit, seeds: float) -> None:
    """Refuse a gradient of no targets; with half precision, whose overflows leave none, let it pass."""
    if not seeds and loss_scale(fit) == 1.0:
        raise ValueError(
            f"{name_of_step(fit.lightning_module)}() returned None for every batch of a correction, which leaves "
            "nothing to correct by: return the mean loss over the first batch.batch_size nodes."
        )


def name_of_step(module: LightningModule) -> str:
    """Return ``"correction_step"`` if the module defines it, or ``"training_step"``."""
    return "correction_step" if callable(getattr(module, "correction_step", None)) else "training_step"


def loss_of(module: LightningModule, batch: Any) -> Tensor | None:
    """Return the loss of a batch by the module's ``correction_step`` or ``training_step``; None if it is skipped."""
    name = name_of_step(module)
    takes_index = name == "training_step" and _takes_batch_idx(vars(module).get(name) or type(module).training_step)
    loss = getattr(module, name)(batch, *[0] * takes_index)
    loss = loss.get("loss", loss) if isinstance(loss, dict) else loss
    if loss is None:  # Lightning's way to skip a batch
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or (torch.is_grad_enabled() and not loss.requires_grad):
        _refuse_loss(loss, name)
    return loss


@lru_cache(maxsize=8)
def _takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Return whether Lightning's loop calls ``training_step`` with ``batch_idx``, too."""
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


@contextmanager
def unrecorded(module: LightningModule) -> Iterator[None]:
    """Run steps outside the loop: what they log and what the module's metrics count is forgotten."""
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
def without_noise(module: nn.Module, moving: Collection[nn.Module] = ()) -> Iterator[None]:
    """Run steps without dropout, and put back every buffer but those of the modules ``moving``.

    An anchor gradient must be of the function that local steps differentiate. A norm in evaluation mode is another
    function: it divides by statistics of earlier batches, which would give the control variate a bias, a large one
    while the statistics are young. So modules with buffers of their own stay in training mode: batch and instance
    norms, power iterations of spectral norms, and the user's own. What a step writes into the buffers is put back.

    All other modules go to evaluation mode, which turns off dropout of features, attention coefficients and edges. No
    list of classes would find it all, as ``functional.dropout(x, training=self.training)`` may stand in any module. A
    module that is in evaluation mode already, such as a frozen norm, stays there.
    """
    silent = [each for each in module.modules() if each.training and not _keeps_what_batches_show(each)]
    saved = [
        (child._buffers, name, buffer, None if buffer is None else buffer.clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if child not in moving
    ]
    for child in silent:
        child.training = False
    try:
        yield
    finally:
        for buffers, name, buffer, value in saved:
            if buffer is not None and value is not None:
                buffer.detach().copy_(value)
            buffers[name] = buffer  # a step may have put another in its place
        for child in silent:
            child.training = True


def _keeps_what_batches_show(module: nn.Module) -> bool:
    """Return whether it has buffers, and its children no parameters; a network with class weights does not count."""
    has_buffers = any(buffer is not None for buffer in module._buffers.values())
    return has_buffers and not any(list(child.parameters()) for child in module.children())


def loss_scale(fit: Fit) -> float:
    """Return the factor by which mixed precision multiplies the loss, 1 without it."""
    scaler = getattr(fit.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _refuse_loss(loss: Any, name: str) -> NoReturn:
    if not isinstance(loss, Tensor):
        problem = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        problem = f"a tensor of shape {tuple(loss.shape)}"
    else:
        problem = "a loss without a gradient, detached or computed under no_grad()"
    otherwise = "" if name == "correction_step" else ", or define correction_step(batch), which does"
    raise TypeError(
        f"{name}() returned {problem}, but a correction needs the mean loss over the first batch.batch_size nodes, "
        f"with its gradient: return that{otherwise}."
    )


def _gradients(fit: Fit, loss: Tensor, parameters: list[Tensor]) -> Sequence[Tensor | None]:
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        name = name_of_step(fit.lightning_module)
        raise RuntimeError(f"{name}() must return the loss and leave backward() to the strategy.") from error
    found = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and id(parameter) in fit.rows:
            check_sparse(gradient, fit.rows[id(parameter)])
        elif gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()  # as ranks exchange it
        found.append(gradient)
    return found


def _of_any_size(module: LightningModule, batch: Any) -> Tensor | None:
    """Return the loss of a batch that may be too small for a norm: a slice can be a single seed.

    One row has no variance. Such a batch is normalised by the running statistics, as PyG's norm does with
    ``allow_single_element``.
    """
    try:
        return loss_of(module, copy.copy(batch))  # the step may have put something into it when it fails
    except ValueError as error:
        if "more than 1 value per channel" not in str(error) and "more than 1 spatial element" not in str(error):
            raise
    norms = [child for child in module.modules() if isinstance(child, _NormBase) and child.training]
    for norm in norms:
        norm.training = not norm.track_running_stats
    try:
        return loss_of(module, batch)
    finally:
        for norm in norms:
            norm.training = True


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: _copied(metric.__dict__[name]) for name in names if name in metric.__dict__}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
