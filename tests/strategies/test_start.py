"""Who does not come to the start is named by those who do, in the time that was stated."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist.roll_call import Roll
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from lightning_gnn_dist.strategies.tma import TMAStrategy
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, fit

SECONDS = 1.5


def come_together(folder: Path, rank: int, num_ranks: int) -> None:
    """However long each takes to get there, these ranks call the roll at once."""
    call = Roll.call

    def when_all_are_here(roll: Roll) -> Any:
        (folder / str(rank)).touch()
        while len(list(folder.iterdir())) < num_ranks:
            time.sleep(0.01)
        return call(roll)

    Roll.call = when_all_are_here  # type: ignore[method-assign]


def come_or_stay_away(
    rank: int, world_size: int, absent: set[int], strategy: Any, folder: Path
) -> tuple[str, float] | None:
    if rank in absent:
        return None
    come_together(folder, rank, world_size - len(absent))
    start = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        fit(rank, strategy(start_timeout=timedelta(seconds=SECONDS)), Net(), devices=world_size)
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("world_size", "absent", "named", "strategy"),
    [
        (2, {1}, "Of 2 ranks, rank 1 did not start within 1.5 s (here: 0 on ", LocalSGDStrategy),
        (4, {1, 3}, "Of 4 ranks, ranks [1, 3] did not start within 1.5 s (here: 0 on ", GrappaStrategy),
        (2, {0}, "Of 2 ranks, rank 0 did not start within 1.5 s (nobody answers at 127.0.0.1:", TMAStrategy),
    ],
)
def test_missing_ranks_are_named_in_time(
    world_size: int, absent: set[int], named: str, strategy: Any, tmp_path: Path
) -> None:
    outcomes = run_ranks(come_or_stay_away, world_size, absent, strategy, tmp_path)
    assert [rank for rank, outcome in enumerate(outcomes) if outcome is None] == sorted(absent)
    messages, seconds = zip(*filter(None, outcomes), strict=True)
    assert all(message.startswith(named) and "start_timeout" in message for message in messages)
    assert SECONDS <= max(seconds) < SECONDS + 60  # rank 0 waits so long; who came a little later, a little less


def come_late(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(1.0)
    return fit(rank, LocalSGDStrategy(start_timeout=timedelta(seconds=30)), Net(), devices=world_size).global_step


def test_who_is_late_is_waited_for() -> None:
    assert run_ranks(come_late, 2) == [18, 18]


served: list[Any] = []  # by rank 0, until all have returned


def call_twice(rank: int, world_size: int) -> bool:
    port = int(os.environ["MASTER_PORT"])
    for _ in range(2):
        served.append(Roll("127.0.0.1", port, rank, world_size, timedelta(seconds=60)).call())
    return None not in served


def test_the_roll_is_called_anew_each_time() -> None:
    assert run_ranks(call_twice, 3) == [True] * 3


def test_one_rank_waits_for_nobody() -> None:
    assert Roll("nowhere", 1, 0, 1, timedelta(seconds=1)).call() is not None


def threads_of_gloo() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


def leave(rank: int, world_size: int, strategy: Any) -> tuple[bool, list[str]]:
    """Whether there were any before, and those that are left: what has ended is listed for a moment longer."""
    trainer = fit(rank, strategy(), Net(), devices=world_size)
    had_threads = bool(threads_of_gloo())
    atexit._run_exitfuncs()
    assert trainer.state.finished  # and is still held, as at the end of a script
    deadline = time.monotonic() + 20
    while (left := threads_of_gloo()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return had_threads, left


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
@pytest.mark.parametrize("strategy", [LocalSGDStrategy, GrappaStrategy, DDPStrategy])
def test_no_thread_of_gloo_outlives_the_interpreter(strategy: Any) -> None:
    """One that does may abort the process after its work: it holds tensors that belong to the interpreter."""
    assert run_ranks(leave, 2, strategy) == [(True, [])] * 2


def test_a_start_takes_some_time() -> None:
    with pytest.raises(ValueError, match="start_timeout must be longer than nothing, got 0:00:00"):
        LocalSGDStrategy(start_timeout=timedelta(0))
