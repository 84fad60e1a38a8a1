"""Keeps what is left when a fit is interrupted: the weights of the last meeting."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_gnn_dist.wire.launching.rank_life import InterruptedRankError


class Keeper(Callback):
    """Keeps the weights of the last meeting, on local rank 0, for the case that the round does not come to its end."""

    def __init__(self) -> None:
        self.is_told = self.is_in_step = False
        self._round: int | None = -1  # the one whose start the weights are of
        self._weights: dict[str, Any] = {}

    def weights(self, trainer: Trainer) -> dict[str, Any]:
        """Return the weights of the last meeting, or for a strategy without meetings those of now."""
        if self._round == _round_of(trainer):
            return self._weights
        return trainer.lightning_module.state_dict()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._look()
        is_alone: bool = trainer.strategy.is_alone  # type: ignore[attr-defined]
        self.is_in_step = not is_alone  # gradients are exchanged: only whole steps leave all ranks alike
        is_new_round = is_alone and self._round != _round_of(trainer)
        # Of a table that no rank holds whole there is nothing to keep that a rank has the memory for.
        if is_new_round and os.environ["LOCAL_RANK"] == "0" and not trainer.strategy.ownership.tables:  # type: ignore[attr-defined]
            self._weights = {name: _copied(value) for name, value in pl_module.state_dict().items()}
            self._round = _round_of(trainer)

    def on_train_batch_end(self, *args: Any) -> None:
        self.is_in_step = False
        self._look()

    def on_validation_batch_start(self, *args: Any) -> None:
        self._look()

    def on_test_batch_start(self, *args: Any) -> None:
        self._look()

    def on_predict_batch_start(self, *args: Any) -> None:
        self._look()

    def _look(self) -> None:
        if self.is_told:  # where Python threw the exception of the signal's handler away, as in a destructor
            raise InterruptedRankError


def _round_of(trainer: Trainer) -> int | None:
    """Return how many meetings a strategy that holds some has held."""
    state = getattr(trainer.strategy, "state", None)
    return None if state is None else int(state.round_idx)


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
