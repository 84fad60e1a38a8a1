"""Running statistics of batch normalisation, estimated again on the whole graph."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.correction_gradients import step_of, unrecorded, without_noise
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.wire import collectives


class GlobalStatistics(Part):
    """Replaces running means and variances by their mean over batches of the whole graph, then over ranks by seeds.

    Layers in evaluation mode keep theirs: they are frozen.

    Statistics that ranks saw on their own parts do not fit the whole graph, which the model is evaluated on: parts
    differ, and neighbours are missing.

    Args:
        num_batches: How many batches it takes.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data = refusals.require_corrections(fit.lightning_module.trainer, 'buffers="global"')
        refusals.require_step(fit.lightning_module)

    @torch.no_grad()
    def apply(self) -> None:
        fit, module = self.fit, self.fit.lightning_module
        norms = [child for child in module.modules() if _learns_statistics(child)]
        momenta = [norm.momentum for norm in norms]
        with unrecorded(module), without_noise(module, moving=norms):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches
            step, seeds = step_of(module), 0
            for batch in self._data.correction_batches(fit.round.round_idx, stop=self._num_batches):
                if batch.batch_size:
                    seeds += batch.batch_size
                    with fit.precision_plugin.train_step_context():
                        step(fit.batch_to_device(batch))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        collectives.average_((buffer for norm in norms for buffer in norm.buffers()), float(seeds))


def _learns_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and module.track_running_stats and module.training
