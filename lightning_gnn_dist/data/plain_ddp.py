"""What torch's DDP spoils, and how its ranks compare weights and optimizers."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_gnn_dist.joint import RowsOfRanks, WeighsRanks
from lightning_gnn_dist.wire.alike import Replica


def guard_plain_ddp(trainer: Trainer) -> None:
    """Refuse what torch's DDP spoils, and let its ranks compare weights and optimizers in the fit.

    With tables of sparse gradients it divides all other gradients by the ranks once more. The strategies of this
    package exchange such gradients, and compare ranks, themselves.
    """
    if isinstance(trainer.strategy, WeighsRanks):
        return
    _refuse_sparse_gradients(trainer)
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if found := next((each for each in callbacks if isinstance(each, BaseFinetuning)), None):
        raise ValueError(
            f"{type(found).__name__} unfreezes parameters in a fit, and torch's DDP exchanges the gradients of those "
            "alone that train when it begins, so that replicas would part: use GrappaStrategy(), which exchanges all."
        )
    if isinstance(trainer.strategy, DDPStrategy) and not any(isinstance(each, _ComparesRanks) for each in callbacks):
        callbacks.append(_ComparesRanks())


def _refuse_sparse_gradients(trainer: Trainer) -> None:
    for name, child in trainer.lightning_module.named_modules():
        if isinstance(child, RowsOfRanks):
            raise ValueError(
                f"{name} is an OwnedEmbedding, whose rows live with one rank each, and Lightning's DDP trains replicas "
                "that hold all: use GrappaStrategy()."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"{name} has sparse=True, and beside its sparse gradients torch's DDP makes those of all other "
                "parameters too small: use GrappaStrategy(), which exchanges the rows that were touched, or "
                "sparse=False."
            )


class _ComparesRanks(Callback):
    """Compares weights before the first batch of a fit, after all hooks of its start, and optimizers in each epoch."""

    _epoch: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        if self._epoch != trainer.current_epoch and isinstance(strategy, DDPStrategy):  # the next fit may have another
            # Later, processors of different kinds have other last digits.
            weights = dict(pl_module.named_parameters()) if self._epoch is None else {}
            Replica(weights, strategy.optimizers).check(strategy.root_device)
        self._epoch = trainer.current_epoch
