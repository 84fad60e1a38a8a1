"""Clocks, which say when a round is over. A clock is a frozen dataclass with one method; each rank has its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from lightning_gnn_dist.checks import (
    MAX_NUMBER,
    check_at_least,
    check_instance,
)
from lightning_gnn_dist.rules import Count, Positive, check_fields, whole, within

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
        if not isinstance(progress, RoundProgress):
            _refuse(progress)
        return progress.local_steps >= self.steps_of_round(progress.round_idx, progress.steps_per_pass)


def _refuse(progress: object) -> None:
    check_instance("progress", progress, RoundProgress, "a RoundProgress")


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
        if not isinstance(progress, RoundProgress):
            _refuse(progress)
        return progress.seconds >= self.seconds
