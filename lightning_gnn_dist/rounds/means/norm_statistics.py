"""Running statistics of batch normalisation, estimated again on the whole graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gnn_dist.rounds.correction_gradients import RunsSteps, step_of, unrecorded, without_noise
from lightning_gnn_dist.rounds.lightning_internals import module_of
from lightning_gnn_dist.wire import collectives


@torch.no_grad()
def reestimate_statistics(strategy: RunsSteps, batches: Iterable[Any]) -> None:
    """Replace running means and variances by their mean over ``batches``, then over ranks by seeds. Collective.

    Layers in evaluation mode keep theirs: they are frozen.

    Statistics that ranks saw on their own parts do not fit the whole graph, which the model is evaluated on: parts
    differ, and neighbours are missing.
    """
    module = module_of(strategy)
    norms = [child for child in module.modules() if _learns_statistics(child)]
    momenta = [norm.momentum for norm in norms]
    with unrecorded(module), without_noise(module, moving=norms):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over batches
        step, seeds = step_of(module), 0
        for batch in batches:
            if batch.batch_size:
                seeds += batch.batch_size
                with strategy.precision_plugin.train_step_context():
                    step(strategy.batch_to_device(batch))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    collectives.average_((buffer for norm in norms for buffer in norm.buffers()), float(seeds))


def _learns_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and module.track_running_stats and module.training
