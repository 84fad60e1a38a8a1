"""How many steps a fit in rounds is going to take."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.clock import EveryPass, RoundClock, steps_of_round, takes_equal_steps
from lightning_gnn_dist.rounds.lightning_internals import accumulated_batches


def estimated_steps(clock: RoundClock, trainer: Trainer, batches_per_pass: Callable[[], int]) -> float:
    """The local steps of the whole run, of a resumed one too; infinite for a fit without end."""
    if trainer.max_epochs == -1:
        return math.inf
    if not takes_equal_steps(clock):
        refusals.refuse_estimate(clock, "it does not say how many steps a rank takes in a round")
    num_batches = batches_per_pass() if isinstance(clock, EveryPass) else 0
    batches_per_step = [accumulated_batches(trainer, epoch) for epoch in range(max(trainer.max_epochs or 0, 1))]
    steps = (steps_of_round(clock, r, -(-num_batches // batches)) for r, batches in enumerate(batches_per_step))
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return min(next(steps), -(-int(trainer.limit_train_batches) // batches_per_step[0]))
    return sum(steps)
