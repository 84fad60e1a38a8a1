"""Steps of several batches a rank, which a data module divides so that any number of ranks takes the same ones."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_gnn_dist.joint import DividesSteps
from lightning_gnn_dist.rounds.lightning_internals.loops import scale_batches
from lightning_gnn_dist.rounds.lightning_internals.trainer import datamodule_of

# The weight of a seed without coverage: negligible beside others, and equal where all seeds are without.
_UNCOVERED = 1e-20


class DividedSteps:
    """Lets a trainer step after as many batches as the data module says, in a fit in which it says so."""

    def __init__(self) -> None:
        self._asked: int | None = None

    @property
    def factor(self) -> int:
        """By what Lightning divides losses because of this."""
        return self._asked or 1

    def begin(self, trainer: Trainer) -> None:
        """Begin a fit."""
        self._asked = batches_of_step(trainer)
        if self._asked is not None:
            _check(trainer)
            trainer.accumulate_grad_batches = self._asked

    def end(self, trainer: Trainer) -> None:
        """Give the trainer back as it was."""
        if self._asked is not None:
            trainer.accumulate_grad_batches = 1
        self._asked = None

    def begin_batch(self, batch: Any, weights: str) -> tuple[float | Tensor, float | Tensor]:
        """Return the weight of a batch, and that of all that the rank computes in its step.

        The model then draws the same random numbers on the batch, whichever rank computes it.
        """
        own = _weight(batch, weights)
        if self._asked is None:
            return own, own
        torch.manual_seed(batch.of_step.random_seed)
        return own, float(batch.of_step.num_batches if weights == "uniform" else batch.of_step.num_seeds)

    def of_run(self) -> dict[str, int]:
        """Return what a checkpoint holds."""
        return {} if self._asked is None else {"batches_of_step": self._asked}


def batches_of_step(trainer: Trainer) -> int | None:
    """Return the batches that each rank takes in a step, where the data module says so."""
    data = datamodule_of(trainer)
    return data.batches_of_step if isinstance(data, DividesSteps) else None


def take_from_checkpoint(checkpoint: dict[str, Any], before: int | None, trainer: Trainer) -> None:
    """Let a checkpoint count batches as a fit does that goes on, where its fit took ``before`` in a step."""
    asked = batches_of_step(trainer)
    if asked is not None and before is not None:
        scale_batches(checkpoint, before, asked)
    elif asked is not before:
        was, now = ("of the ranks", "as AsRanks() says") if before is None else ("as AsRanks() says", "of the ranks")
        raise ValueError(
            f"In the checkpoint the batches of a step are {was}, and in this fit {now}: give the data module the "
            "holding of that fit, or begin a new fit with the weights alone, Model.load_from_checkpoint(path)."
        )


def _check(trainer: Trainer) -> None:
    """Refuse settings that end a step elsewhere."""
    others = [type(each).__name__ for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1 or others:
        setting = others[0] if others else f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
        raise ValueError(
            f"AsRanks(...) says how many batches a step has, and {setting} does so, too: leave it out, and choose "
            "batch_size."
        )
    limit = trainer.limit_train_batches
    if limit != 1.0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ValueError(
            f"AsRanks(...) makes steps of several batches, and limit_train_batches={limit} may end a pass within one: "
            "use max_steps."
        )


def _weight(batch: Any, weights: str) -> float | Tensor:
    """Return the weight of a batch; 0 for a filler."""
    if getattr(batch, "is_filler", False):
        return 0.0
    size = 1.0 if weights == "uniform" else float(getattr(batch, "num_targets", getattr(batch, "batch_size", 1)))
    coverage = getattr(batch, "coverage", None)
    if coverage is None or weights != "coverage":
        return size
    total = coverage[: batch.batch_size].sum(dtype=torch.float64)
    return torch.where(total > 0, total, _UNCOVERED * size)
