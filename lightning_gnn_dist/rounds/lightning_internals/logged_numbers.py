"""Numbers that are logged, and the metrics that callbacks, loggers and bars see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync


def log_numbers(module: LightningModule, numbers: Mapping[str, float]) -> None:
    """Log the mean of each number over the epoch, as ``log_dict`` does; not collective, and no warning says so.

    Lightning walks through all that it keeps of a name whenever the name is logged, which takes a millisecond, and here
    it does not. A module with a ``log`` of its own hears each number.
    """
    if not numbers:
        return
    trainer, hook = module.trainer, module._current_fx_name
    is_lightnings = getattr(module.log, "__func__", None) is LightningModule.log
    if not is_lightnings or trainer._results is None or hook is None or trainer.barebones:
        flags: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        # With both of these Lightning neither sends nor complains.
        module.log_dict(numbers, **flags, sync_dist=True, rank_zero_only=True)
        return
    metrics = [_logged_metric(trainer, hook, name) for name in numbers]
    begins = trainer._logger_connector.should_reset_tensors(hook)  # the means of a new epoch
    if begins:
        _reset_others(trainer._results, hook, metrics)
    one = torch.tensor(1, device=module.device)
    values = torch.tensor([*numbers.values()], dtype=torch.get_default_dtype(), device=module.device).unbind()
    for metric, value in zip(metrics, values, strict=True):
        metric.value = value if begins else metric.value + value
        metric.cumulated_batch_size = one if begins else metric.cumulated_batch_size + one
        metric._update_count, metric._computed, metric.has_reset = 1, None, False
    trainer._logger_connector._current_fx = hook


def _logged_metric(trainer: Trainer, hook: str, name: str) -> Any:
    """Return what keeps the mean of a name that a hook logs, as ``log`` makes it when the name is new."""
    results: Any = trainer._results
    if (key := f"{hook}.{name}") not in results:
        meta = _Metadata(fx=hook, name=name)
        is_distributed = trainer._accelerator_connector.is_distributed
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=is_distributed, rank_zero_only=True)
        results[key] = _ResultMetric(meta, is_tensor=True)
    return results[key]


def _reset_others(results: Any, hook: str, metrics: Sequence[Any]) -> None:
    """Forget what a hook has logged in the epoch before, but for metrics that are about to be given a number."""
    kept = {id(metric) for metric in metrics}
    for metric in results.values():
        if metric.is_tensor and metric.meta.fx == hook and id(metric) not in kept:
            metric.reset()


def metrics_of(trainer: Trainer) -> tuple[dict[str, Any], ...]:
    """Return the metrics that callbacks, loggers and the progress bar see."""
    return dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)


def set_metrics(trainer: Trainer, metrics: Sequence[dict[str, Any]]) -> None:
    """Give a trainer the metrics that :func:`metrics_of` returned on another rank."""
    connector = trainer._logger_connector
    connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = metrics
