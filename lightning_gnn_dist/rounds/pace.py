"""Reads the clock: when this rank's round is over, how many steps a fit takes, and the batches of one round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.clock import EveryPass, KnownSteps, RoundClock, RoundProgress, schedule
from lightning_gnn_dist.rounds.meeting_hook import RoundState

_LOOKED_AT = 100_000  # rounds whose ends are compared with changes of parts


class RoundTimer:
    """Estimates how long a round will have lasted at the end of a batch that is yet to be trained on.

    Lightning asks whether a batch is the last one before it trains on it. So the estimate is the time of the batches
    before, and one more of their mean length.
    """

    def __init__(self) -> None:
        self.seconds_per_batch = 0.0  # in the round before
        self._start: float | None = None

    def begin(self) -> None:
        """Start the timer at the first batch of a round."""
        self._start = time.monotonic()

    def expected(self, batches: int) -> float:
        """Return the seconds from the start of the round to the end of ``batches``, the last of them to come."""
        if self._start is None or batches == 1:
            return self.seconds_per_batch * batches
        return (time.monotonic() - self._start) * batches / (batches - 1)

    def end(self, batches: int) -> float:
        """Stop the timer after the last batch, and return the seconds of the round."""
        seconds = 0.0 if self._start is None else time.monotonic() - self._start
        self.seconds_per_batch, self._start = seconds / batches, None
        return seconds


class RoundLoader:
    """Hands out the batches of one round per iteration, from an endless stream over ``loader``.

    It has no length on purpose: Lightning then ends the epoch when the iteration stops, and asks no other rank
    how long its loader is. An iteration starts at the batch that ``state`` names, so a round that was cut
    short, or a run that was resumed, goes on where it stopped.

    Args:
        loader: The loader of one pass. If it has ``stream(start)``, as the data module's has, that is read; any other
            loader with a length is cycled.
        state: Says how many batches this rank has trained on since the start of the run.
        is_over: Returns whether the round ends after that many batches of it.
    """

    def __init__(self, loader: Any, state: RoundState, is_over: Callable[[int], bool]) -> None:
        self.loader = loader
        self._state = state
        self._is_over = is_over
        self._stream: Iterator[Any] | None = None
        self._at = -1

    def __iter__(self) -> Iterator[Any]:
        if self._stream is None or self._at != self._state.batches_done:
            self.close()
            self._at = self._state.batches_done
            self._stream = _stream(self.loader, self._at)
        batches = 0
        while True:
            batch = next(self._stream)
            self._at += 1
            batches += 1
            yield batch
            if self._is_over(batches):
                return

    def close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self._stream = None


def _stream(loader: Any, start: int) -> Iterator[Any]:
    if hasattr(loader, "stream"):
        return iter(loader.stream(start))
    return _cycle(loader, start)


def _cycle(loader: Any, start: int) -> Iterator[Any]:
    """Yield pass after pass of a usual loader, whose sampler shuffles by the number of the pass."""
    number, skip = divmod(start, len(loader))
    while True:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        for index, batch in enumerate(loader):
            if index >= skip:
                yield batch
        number, skip = number + 1, 0


class Pace:
    """Reads a clock for this rank and its training loader.

    Args:
        strategy: The strategy whose trainer counts batches.
        clock: Decides when a round ends.
    """

    def __init__(self, strategy: Any, clock: RoundClock) -> None:
        self._strategy, self._clock = strategy, clock
        self.begin()
        self.loader: RoundLoader | None = None

    def begin(self) -> None:
        """Forget the fit before."""
        self.timer = RoundTimer()

    def is_over(self, round_idx: int, batches: int) -> bool:
        """Return whether the round ends with batch number ``batches`` of it, counted from 1."""
        assert self.loader is not None
        per_step: int = self._strategy.lightning_module.trainer.accumulate_grad_batches
        if batches % per_step:
            return False
        per_pass, seconds = -(-len(self.loader.loader) // per_step), self.timer.expected(batches)
        return self._clock.is_over(RoundProgress(round_idx, batches // per_step, per_pass, seconds))

    def steps_per_pass(self) -> int:
        """Return the steps that visit every training node of the largest part once."""
        return -(-self._batches_per_pass() // self._trainer().accumulate_grad_batches)

    def batches_of_round(self, round_idx: int) -> float:
        """Return the batches of this rank in a round, infinity where the clock does not say before."""
        if not isinstance(self._clock, KnownSteps):
            return math.inf
        return self._clock.steps_of_round(round_idx, self.steps_per_pass()) * self._trainer().accumulate_grad_batches

    def check_parts(self, batches_of_part: int | None, round_idx: int, batches_done: int) -> None:
        """Refuse parts that change within a round.

        Args:
            batches_of_part: After how many batches a rank's part changes, or None if it never does.
            round_idx: The round that is about to begin.
            batches_done: This rank's batches in the rounds before.
        """
        if batches_of_part is None:
            return
        if not isinstance(self._clock, KnownSteps):
            _refuse_changes(f"with {self._clock} nobody knows before when that is. Use EverySteps or EveryPass")
        last, num_batches = self._trainer().max_epochs, self._batches_per_pass()
        for idx in range(round_idx, _LOOKED_AT if last is None or last < 0 else min(last, _LOOKED_AT)):
            per_step = _accumulated_batches(self._trainer(), idx)
            stop = batches_done + per_step * self._clock.steps_of_round(idx, -(-num_batches // per_step))
            if batches_done // batches_of_part != (stop - 1) // batches_of_part:
                _refuse_changes(
                    f"round {idx} is of batches {batches_done} to {stop - 1}, and parts change every "
                    f"{batches_of_part} batches. Let rounds have a length that divides this"
                )
            batches_done = stop

    def schedule(self) -> str:
        """Return a sentence for the log that says how long the rounds of the fit are."""
        return schedule(self._clock, self._trainer().max_epochs, self.steps_per_pass())

    def estimated_steps(self) -> float:
        """Return the local steps of the whole run, those before a resume included; infinite for a fit without end."""
        trainer, clock = self._trainer(), self._clock
        if trainer.max_epochs == -1:
            return math.inf
        if not isinstance(clock, KnownSteps):
            refusals.refuse_estimate(clock, "it does not say before how many steps a rank takes in a round")
        num_batches = self._batches_per_pass() if isinstance(clock, EveryPass) else 0
        batches_per_step = [_accumulated_batches(trainer, epoch) for epoch in range(max(trainer.max_epochs or 0, 1))]
        steps = (clock.steps_of_round(r, -(-num_batches // batches)) for r, batches in enumerate(batches_per_step))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return min(next(steps), -(-int(trainer.limit_train_batches) // batches_per_step[0]))
        return sum(steps)

    def _batches_per_pass(self) -> int:
        if self.loader is None:  # asked for by configure_optimizers()
            self._trainer().fit_loop.setup_data()  # as Lightning's estimated_stepping_batches does
        assert self.loader is not None
        return len(self.loader.loader)

    def _trainer(self) -> Trainer:
        trainer: Trainer = self._strategy.lightning_module.trainer
        return trainer


def _refuse_changes(why: str) -> NoReturn:
    raise ValueError(
        "boundary=History() has ranks compute rows for their parts at meetings, so parts may change only there, and "
        f"{why}, or keep parts, with Holding(Fixed()), or use boundary=Halo()."
    )


def _accumulated_batches(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches whose gradients make one step in an epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches
