r"""How far the ranks' gradients are from the gradient of the whole graph: the kappa of the LLCG paper.

The paper (arXiv:2111.08202) bounds the error of plain averaging by how much the gradient of a part differs from that
of the graph. This callback measures the difference at the averaged model, after a meeting, where replicas are equal:

.. math::
    \kappa_p = \frac{\lVert g_p(\bar\theta) - \nabla\mathcal{L}_\mathrm{global}(\bar\theta) \rVert}
                    {\lVert \nabla\mathcal{L}_\mathrm{global}(\bar\theta) \rVert}
"""

from __future__ import annotations

from itertools import count, islice

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_at_least_if_given
from lightning_gnn_dist.rounds.correction_gradients import average_gradient_, mean_gradient, unrecorded, without_noise
from lightning_gnn_dist.rounds.refusals import require_batches
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.wire import collectives


class DiscrepancyProbe(Callback):
    """Logs the mean and the largest :math:`\\kappa_p` over the ranks, after a meeting.

    Near 0, a part's gradient is the graph's, and averaging loses nothing. Around 1 and above, the ranks pull in
    different directions: correct more (``drift``, ``correction``), meet more often, or cut the graph so
    that parts look alike (``RandomPartitioner``, ``SuperNodePartitioner``).

    Each time it takes two passes over the training nodes, or ``2 * steps`` gradients, an exchange of the size of the
    model, and the memory of one batch. It logs ``round/discrepancy`` and ``round/discrepancy_worst``.

    Args:
        every_n_rounds: Measure after every n-th round.
        steps: Batches for each of the two gradients. Default: a pass. With few batches their noise is measured, too;
            near the end of a training it is larger than any difference between parts.
    """

    def __init__(self, every_n_rounds: int = 1, steps: int | None = None) -> None:
        check_at_least(1, every_n_rounds=every_n_rounds)
        check_at_least_if_given(1, steps=steps)
        self.every_n_rounds = every_n_rounds
        self.steps = steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, RoundStrategy):
            raise ValueError(
                f"DiscrepancyProbe measures at meetings, and {type(trainer.strategy).__name__} has none: use a "
                "strategy of rounds such as LocalSGDStrategy or LLCGStrategy."
            )
        for name in ("correction_batches", "anchor_batches"):
            self._data = require_batches(trainer, name, "DiscrepancyProbe")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, RoundStrategy)
        strategy, state = trainer.strategy, trainer.strategy.state
        if state.round_idx % self.every_n_rounds:
            return
        with unrecorded(pl_module), without_noise(pl_module):
            fit, number = strategy.meeting.fit, count()
            parameters = fit.dense_parameters()
            parts = islice(self._data.anchor_batches(state.round_idx, start=state.batches_done), self.steps)
            own, _ = mean_gradient(fit, (batch for batch, _ in zip(parts, number)), parameters)  # noqa: B905  # no end
            whole, seeds = mean_gradient(
                fit, self._data.correction_batches(state.round_idx, stop=next(number)), parameters
            )
        average_gradient_(fit, whole, seeds)
        difference = _norm([mine - ours for mine, ours in zip(own, whole, strict=True)])
        kappas = collectives.all_gather_rows(difference / _norm(whole).clamp(min=1e-12))
        figures = {"round/discrepancy": kappas.mean(), "round/discrepancy_worst": kappas.max()}
        pl_module.log_dict(figures, batch_size=1, sync_dist=True, rank_zero_only=True)


def _norm(tensors: list[Tensor]) -> Tensor:
    norm: Tensor = torch.cat([tensor.float().view(-1) for tensor in tensors]).norm()
    return norm
