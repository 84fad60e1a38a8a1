"""The harness that runs the ranks: results, failures, time limits, and nothing left behind."""

import os
import signal
import threading
import time

import pytest

from tests.ranks import RankError, run_ranks, start_ranks


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("no such part")


def fail_in_a_thread(rank: int, world_size: int) -> None:
    thread = threading.Thread(target=fail_on_one, args=(1, 2))
    thread.start()
    thread.join()


def hang_on_one(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_exception_in_a_thread_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"exceptions in threads or destructors:(.|\n)*no such part"):
        run_ranks(fail_in_a_thread, 1)


@pytest.mark.slow
def test_a_hanging_rank_is_named_with_its_stack_and_killed() -> None:
    with start_ranks(hang_on_one, 2, timeout=4) as running:  # in which rank 0 returns, even on a busy machine
        pids, started = running.pids, time.monotonic()
        running.wait_for({0})
        with pytest.raises(RankError, match=r"^rank 1 of 2 did not finish in time \(4 s\)") as caught:
            running.results()
    assert "in hang_on_one" in str(caught.value)
    assert time.monotonic() - started < 120
    assert not any(map(is_alive, pids))


def test_a_killed_rank_is_named_unless_it_may_die() -> None:
    with start_ranks(hang_on_one, 3) as running:
        os.kill(running.pids[1], signal.SIGKILL)
        assert running.results(may_die={1}) == [0, None, 2]
    with start_ranks(hang_on_one, 2) as running:
        os.kill(running.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 of 2 died with exit code -9 before it returned"):
            running.results()
