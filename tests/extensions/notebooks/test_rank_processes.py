"""Ranks that a process starts: what comes back, who is named when one fails, and that none stays."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist.extensions.notebooks.rank_processes import (
    How,
    InterruptedRankError,
    RankProcesses,
    RankTraceback,
)

WAITS = 600.0  # seconds that a rank is there unless it is ended


@dataclass
class Task:
    """Does what ``act`` does, and what ``tear_down`` does when that has failed."""

    act: Callable[[int], Any]
    tear_down: Callable[[int], None] = lambda rank: None
    returned: Any = None
    failure: tuple[BaseException, float] | None = None

    def shared(self) -> list[object]:
        return [self]

    def run(self) -> How:
        rank = int(os.environ["LOCAL_RANK"])
        try:
            self.returned = self.act(rank)
        except ValueError as error:
            self.failure = error, time.monotonic()
            self.tear_down(rank)
            raise
        return "done"

    def result(self, how: How) -> Any:
        return how, self.returned, self

    def on_interrupt(self) -> None:
        raise InterruptedRankError


class TwoWordsError(Exception):
    def __init__(self, one: str, two: str) -> None:  # cannot be made again from its args
        super().__init__(f"{one} {two}")


def ranks_of(act: Callable[[int], Any], count: int = 2, **more: Any) -> RankProcesses:
    return RankProcesses(Task(act, **more), count, "fork", dict(os.environ))


def wait_unless(rank: int, act: Callable[[], Any]) -> Callable[[int], Any]:
    def do(own: int) -> None:
        if own == rank:
            act()
        time.sleep(WAITS)

    return do


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def test_results_come_back_and_refer_to_what_is_here() -> None:
    ranks = ranks_of(lambda rank: rank * 10)
    assert ranks.run() is None and not ranks.was_interrupted
    assert [ranks.outcomes[rank].result[:2] for rank in (0, 1)] == [("done", 0), ("done", 10)]
    assert ranks.outcomes[1].result[2] is ranks.work


@pytest.mark.slow
def test_a_module_beside_a_notebook_is_found_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_a_notebook.py").write_text("def tens(rank):\n    return 10 * rank + 10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a kernel
    ranks = RankProcesses(Task(import_module("beside_a_notebook").tens), 1, "spawn", dict(os.environ))
    assert ranks.run() is None
    assert ranks.outcomes[0].result[:2] == ("done", 10)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (fail(ValueError("odd labels")), ValueError, "odd labels"),
        (fail(TwoWordsError("odd", "labels")), RuntimeError, r"TwoWordsError: odd labels$"),
        (fail(SystemExit(0)), RuntimeError, r"sys.exit\(0\) was called before the end of the work"),
        (lambda: os._exit(0), RuntimeError, "Rank 1 ended with exit code 0, but not at the end of its work"),
        (lambda: os._exit(1), RuntimeError, "Rank 1 ended with exit code 1 and wrote down no reason: is the disk"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RuntimeError, "Rank 1 was killed by SIGKILL. The other ranks"),
    ],
)
def test_the_rank_that_fails_is_heard_and_the_others_end(
    act: Callable[[], Any], kind: type[BaseException], message: str
) -> None:
    start = time.monotonic()
    ranks = ranks_of(wait_unless(1, act))
    error = ranks.run()
    with pytest.raises(kind, match=message):
        raise error or AssertionError
    assert time.monotonic() - start < WAITS / 2
    assert all(not process.is_alive() for process in ranks._processes)
    if isinstance(error, ValueError):
        assert isinstance(error.__cause__, RankTraceback) and "in rank 1" in str(error.__cause__)
        assert "raise error\nValueError: odd labels" in str(error.__cause__)


def test_of_several_failures_the_first_is_the_cause() -> None:
    failed = [multiprocessing.Event() for _ in range(3)]

    def act(rank: int) -> None:  # rank 2 fails first, then rank 1, then rank 0
        assert rank == 2 or failed[rank + 1].wait(WAITS)
        raise ValueError(f"of rank {rank}")

    def tear_down(rank: int) -> None:  # rank 0 ends first; the others are interrupted then
        failed[rank].set()
        if rank > 0:
            time.sleep(WAITS)

    assert str(ranks_of(act, 3, tear_down=tear_down).run()) == "of rank 2"


@pytest.fixture
def listens_to_interrupts() -> Iterator[None]:
    """A shell that starts a command in the background lets it ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_interrupts")
@pytest.mark.parametrize("who", ["here", "a rank"])
def test_an_interrupt_ends_all_whoever_gets_it(who: str) -> None:
    if who == "here":
        begun = [multiprocessing.Event() for _ in range(2)]

        def interrupt() -> None:
            if all(event.wait(WAITS) for event in begun):
                os.kill(os.getpid(), signal.SIGINT)

        def act(rank: int) -> None:
            begun[rank].set()
            time.sleep(WAITS)

        threading.Thread(target=interrupt, daemon=True).start()
        ranks = ranks_of(act)
    else:
        ranks = ranks_of(wait_unless(1, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert ranks.run() is None and ranks.was_interrupted
    assert all(not process.is_alive() for process in ranks._processes)
    assert all(ranks.outcomes[rank].how == "interrupted" for rank in ranks.outcomes)


def test_words_of_ranks_are_shown_where_stdout_was_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    def act(rank: int) -> None:
        print(f"rank {rank} says é")
        os.write(2, b"and below Python\n")
        assert sys.stdout.line_buffering

    assert ranks_of(act).run() is None
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["rank 0 says é", "rank 1 says é"]
    assert said.err.count("and below Python") == 2
