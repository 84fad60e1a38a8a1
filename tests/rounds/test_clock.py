"""Clocks: how long rounds are, and what is refused."""

from typing import Any

import pytest

from lightning_gnn_dist import EveryPass, EverySeconds, EverySteps
from lightning_gnn_dist.rounds.clock import RoundProgress, RoundTimer, schedule


def length(clock: Any, round_idx: int, steps_per_pass: int = 7) -> int:
    steps = 1
    while not clock.is_over(RoundProgress(round_idx, steps, steps_per_pass)):
        steps += 1
    return steps


def test_rounds_grow_up_to_the_limit() -> None:
    clock = EverySteps(64, growth=1.1, limit=100)
    assert [length(clock, r) for r in range(7)] == [64, 71, 78, 86, 94, 100, 100]
    assert clock.local_steps(10**9) == 100


def test_a_length_is_not_that_of_a_rounding_error() -> None:
    assert [EverySteps(100, growth=1.1, limit=1000).local_steps(r) for r in range(4)] == [100, 110, 121, 134]
    assert EverySteps(10, growth=1.2, limit=100).local_steps(2) == 15


def test_seconds() -> None:
    clock = EverySeconds(2)
    assert [clock.is_over(RoundProgress(0, 5, 7, seconds)) for seconds in (0.0, 1.9, 2.0, 3.0)] == [False] * 2 + [
        True
    ] * 2


def test_a_timer_tells_the_end_of_the_batch_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    timer = RoundTimer()
    assert timer.expected(1) == 0.0  # nothing is known before the first batch of the first round
    timer.begin()
    now = 106.0
    assert timer.expected(4) == 8.0 and timer.expected(3) == 9.0
    assert timer.end(3) == 6.0
    now = 200.0
    assert timer.expected(1) == 2.0  # as long as in the round before
    timer.begin()
    now = 203.0
    assert timer.expected(2) == 6.0


def test_the_schedule_is_told_at_the_start() -> None:
    assert schedule(EverySteps(5), 10, 7) == "10 rounds of 5 local steps, 50 steps in all on each rank."
    assert schedule(EverySteps(4, growth=2.0, limit=10), 4, 7).startswith("4 rounds of 4 to 10 local steps, 32 steps")
    assert schedule(EveryPass(2), 3, 7) == "3 rounds of 14 local steps, 42 steps in all on each rank."
    assert schedule(EveryPass(), -1, 7) == "Rounds without end, the first of 7 local steps."
    assert schedule(EverySeconds(30), 20, 7).startswith("20 rounds of 30 seconds, 600 seconds in all")
    assert schedule(EverySeconds(0.5), None, 7) == "Rounds without end, of 0.5 seconds."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EverySteps(64, growth=1.1), r"need a limit.*limit=1024"),
        (lambda: EverySteps(64, limit=8), r"limit \(8\) must not be below steps \(64\)"),
    ],
)
def test_a_clock_that_could_not_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
