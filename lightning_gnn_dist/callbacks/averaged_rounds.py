"""Weights averaged over rounds: what is validated, tested and kept where models swing from one meeting to the next."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_gnn_dist.checks import check_between


class AveragedRounds(WeightAveraging):
    r"""Judge and keep a moving average of the models that meetings lead to, in the place of the last one.

    Where parts differ much in their labels and no halo fits, the accuracy swings from round to round. With
    :math:`\theta_r` the model after round :math:`r`, validation, test, checkpoints and the end of the fit have

    .. math::
        a_r = \beta\, a_{r-1} + (1 - \beta)\, \theta_r, \qquad a_0 = \theta_0,

    while training goes on from :math:`\theta_r`. It takes memory of one more model, and sends nothing: all ranks have
    the same average. With strategies that have no rounds it averages once an epoch.

    Args:
        decay: :math:`\beta`, the share of the average before, between 0 and 0.99.
    """

    def __init__(self, decay: float = 0.5) -> None:
        check_between(0, 0.99, "with 0 the last round alone counts", decay=decay)
        super().__init__(avg_fn=get_ema_avg_fn(decay))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Average the model that a round has ended with: it is validated next. Until they meet, ranks differ."""
        if trainer.is_last_batch:
            super().on_train_batch_end(trainer, *args)
