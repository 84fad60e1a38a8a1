"""When a round is over: clocks, what reads one for a rank, and the batches of one round.

A clock is a frozen dataclass with one method; each rank has its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Annotated, Any, NamedTuple, Protocol

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_gnn_dist.checks import (
    MAX_NUMBER,
    Count,
    Positive,
    check_at_least,
    check_fields,
    check_instance,
    whole,
    within,
)
from lightning_gnn_dist.rounds.meeting_hook import RoundState

MAX_STEPS = 10**9  # a round of more steps would never end
Steps = Annotated[int, whole(1, MAX_STEPS)]


class RoundProgress(NamedTuple):
    """How far this rank is in the running round."""

    round_idx: int
    local_steps: int
    steps_per_pass: int
    """Steps that visit every training node of the largest part once: the same on all ranks."""
    seconds: float = 0.0
    """The estimated length of the round on this rank when these steps are done."""


def schedule(clock: RoundClock, num_rounds: int | None, steps_per_pass: int) -> str:
    """Return a sentence for the log that says how long the rounds of a fit are."""
    rounds = -1 if num_rounds is None else num_rounds
    if isinstance(clock, EverySeconds):
        if rounds < 0:
            return f"Rounds without end, of {clock.seconds:g} seconds."
        total = rounds * clock.seconds
        return f"{rounds} rounds of {clock.seconds:g} seconds, {total:g} seconds in all, and the meetings."
    if not isinstance(clock, KnownSteps):
        return f"Rounds end when {clock} says so."
    if rounds < 0:
        return f"Rounds without end, the first of {clock.steps_of_round(0, steps_per_pass)} local steps."
    steps = [clock.steps_of_round(round_idx, steps_per_pass) for round_idx in range(rounds)]
    lengths = " to ".join(dict.fromkeys([f"{steps[0]}", f"{steps[-1]}"])) if steps else "0"
    return f"{rounds} rounds of {lengths} local steps, {sum(steps)} steps in all on each rank."


class RoundClock(Protocol):
    """Decides when a round ends.

    Only ``EverySteps`` and ``EveryPass`` are known to give all ranks the same number of steps. With any other clock a
    strategy refuses what needs equal steps, such as a learning rate scheduled by steps.
    """

    def is_over(self, progress: RoundProgress) -> bool:
        """Return whether the round ends with the steps of ``progress``; the last may still be to come."""
        ...


class KnownSteps:
    """A clock whose rounds have the same number of steps on all ranks, which is known before the fit."""

    def steps_of_round(self, round_idx: int, steps_per_pass: int) -> int:
        """Return the local steps of a round."""
        raise NotImplementedError

    def is_over(self, progress: RoundProgress) -> bool:
        """Return whether the round ends with the steps of ``progress``."""
        check_instance("progress", progress, RoundProgress, "a RoundProgress")
        return progress.local_steps >= self.steps_of_round(progress.round_idx, progress.steps_per_pass)


@dataclass(frozen=True)
class EverySteps(KnownSteps):
    r"""A round of :math:`K_r = \min(K_\mathrm{max}, \lceil K \rho^r \rceil)` local steps.

    Args:
        steps: :math:`K`, the local steps of the first round.
        growth: :math:`\rho`, by which each round is longer than the last. 1 keeps them equal.
        limit: :math:`K_\mathrm{max}`. Needed when rounds grow: 64 steps growing by 1.1 are 74,001 after 75 rounds.
    """

    steps: Steps
    growth: Annotated[float, within(1, MAX_NUMBER, "1 keeps rounds equal")] = 1.0
    limit: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.growth > 1.0 and self.limit is None:
            raise ValueError(
                f"Rounds that grow by {self.growth} need a limit, or the last ones never end: "
                f"EverySteps({self.steps}, growth={self.growth}, limit={16 * self.steps})."
            )
        if self.limit is not None and self.limit < self.steps:
            raise ValueError(f"limit ({self.limit}) must not be below steps ({self.steps}).")

    def local_steps(self, round_idx: int) -> int:
        """Return :math:`K_r`."""
        check_at_least(0, round_idx=round_idx)
        return self.steps_of_round(round_idx, 0)

    def steps_of_round(self, round_idx: int, steps_per_pass: int) -> int:
        if self.limit is None:
            return self.steps
        grown = math.log(self.steps) + round_idx * math.log(self.growth)
        if grown >= math.log(self.limit):  # in logarithms: growth ** round_idx overflows in long runs
            return self.limit
        # Rounded first: 100 * 1.1 is 110.00000000000001.
        return min(self.limit, math.ceil(round(self.steps * self.growth**round_idx, 9)))


@dataclass(frozen=True)
class EveryPass(KnownSteps):
    """A round of whole passes over the training nodes.

    Args:
        passes: Passes in a round.
    """

    passes: Steps = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def steps_of_round(self, round_idx: int, steps_per_pass: int) -> int:
        return self.passes * steps_per_pass


@dataclass(frozen=True)
class EverySeconds:
    """A round by the wall clock: fast ranks take more steps than slow ones, and none waits for another's step.

    Every rank reads its own clock, which starts with the first step after the meeting. Validation and checkpoints do
    not count.

    Args:
        seconds: The length of a round. It ends with the step that reaches it, and has one step at least.
    """

    seconds: Positive

    def __post_init__(self) -> None:
        check_fields(self)

    def is_over(self, progress: RoundProgress) -> bool:
        check_instance("progress", progress, RoundProgress, "a RoundProgress")
        return progress.seconds >= self.seconds


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
            reads_ahead = hasattr(self.loader, "stream")
            self._stream = iter(self.loader.stream(self._at)) if reads_ahead else _cycle(self.loader, self._at)
        for batches in count(1):
            batch = next(self._stream)
            self._at += 1
            yield batch
            if self._is_over(batches):
                return

    def read_again(self) -> None:
        """Draw from torch's generator, which was set, what a usual loader has drawn for what was read ahead."""
        if self._stream is not None and not hasattr(self.loader, "stream"):
            self._stream = _cycle(self.loader, done := self._state.batches_done)
            deque(islice(self._stream, self._at - done), 0)

    def close(self) -> None:
        """Stop reading ahead."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self._stream = None


def _cycle(loader: Any, start: int) -> Iterator[Any]:
    """Yield pass after pass of a usual loader, whose sampler shuffles by the number of the pass."""
    number, skip = divmod(start, len(loader))
    while True:
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(number)
        with torch.random.fork_rng([], enabled=skip > 0):  # for these it was drawn before
            batches = iter(loader)
            deque(islice(batches, skip), 0)
        yield from batches
        number, skip = number + 1, 0


def batches_per_step(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches whose gradients make one step in an epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches
