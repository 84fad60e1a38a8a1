"""The life of a process that another one starts as a rank: what it is given, what it does, and what it leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.processes import LEFT_BY_SIGTERM, tie_to_parent

How = Literal["done", "left", "interrupted", "failed"]  # left: by SIGTERM
CODES = {"done": 0, "left": LEFT_BY_SIGTERM, "interrupted": 128 + signal.SIGINT, "failed": 1}


class Work(Protocol):
    """What every rank does.

    Attributes:
        failure: What ended it, and when, by ``time.monotonic()``: before anything is torn down, which other ranks
            notice, and where an interrupt may come between. None as long as nothing has.
    """

    failure: tuple[BaseException, float] | None

    def shared(self) -> Sequence[object]:
        """Return objects that results may refer to, in the same order in all processes, before anything runs."""

    def run(self) -> How:
        """Do it, in a rank. Raises InterruptedRankError, or KeyboardInterrupt, if it is interrupted."""

    def result(self, how: How) -> Any:
        """Return what the starting process gets of this rank, however it ended."""

    def on_interrupt(self) -> None:
        """Raise InterruptedRankError, now or soon; called in a rank by a signal handler."""


@dataclass
class Outcome:
    """What a rank writes at its end: how and when (by the host's clock) it ended, its result, and its exception."""

    how: How
    at: float = 0.0
    result: Any = None
    error: bytes = b""
    story: str = ""

    def fail(self, failure: BaseException) -> None:
        """Note an exception."""
        self.how, self.story = "failed", "".join(traceback.format_exception(failure))
        with suppress(Exception):  # whatever the user's own class raises when it is pickled
            self.error = by_value.as_bytes(failure)


class InterruptedRankError(BaseException):
    """Ends the work of a rank. Lightning would turn a KeyboardInterrupt into the end of the process."""


@dataclass
class Surroundings:
    """What a rank is told of its surroundings."""

    folder: Path
    environment: dict[str, str]
    directory: str
    path: list[str]  # where modules are looked for; "" in it is the directory
    streams: dict[int, Connection]  # by the number of the file that takes their place in a rank

    def take(self, rank: int) -> None:
        for number, writer in self.streams.items():
            os.dup2(writer.fileno(), number)
            stream = open(number, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
            setattr(sys, {1: "stdout", 2: "stderr"}[number], stream)
        os.chdir(self.directory)
        sys.path[:] = self.path  # multiprocessing has put another directory in the place of ""
        os.environ.clear()
        os.environ.update(self.environment, LOCAL_RANK=str(rank))


def be_rank(rank: int, surroundings: Surroundings, work: Work | None) -> None:
    """The life of a rank's process."""
    tie_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handlers
    outcome, shared = Outcome("failed"), []
    try:
        signal.signal(signal.SIGINT, _once(_raise_interrupt))
        try:
            surroundings.take(rank)
            if work is None:
                work = by_value.read(surroundings.folder / "work")
            outcome_file(surroundings.folder, rank).touch()
            shared = [*work.shared()]
            signal.signal(signal.SIGINT, _once(work.on_interrupt))
            outcome.how = work.run()
        except Exception as failure:
            outcome.fail(failure)
        except SystemExit as failure:
            outcome.fail(RuntimeError(f"sys.exit({failure.code!r}) was called before the end of the work."))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except (KeyboardInterrupt, InterruptedRankError):  # at any place above, but once
        outcome.how = "interrupted"
    error, outcome.at = (work and work.failure) or (None, time.monotonic())
    if isinstance(error, Exception) and outcome.how in ("failed", "interrupted"):
        outcome.fail(error)  # the first one: tearing down may have raised another, or have been interrupted
    _write_outcome(outcome_file(surroundings.folder, rank), outcome, work, shared)
    sys.exit(CODES[outcome.how])


def _write_outcome(path: Path, outcome: Outcome, work: Work | None, shared: Sequence[object]) -> None:
    try:
        outcome.result = None if work is None else work.result(outcome.how)
        by_value.write(path, outcome, shared)
    except Exception as failure:
        if outcome.how == "done":
            outcome.fail(failure)
        outcome.result = None
        by_value.write(path, outcome, shared)


def _once(interrupt: Callable[[], None]) -> Callable[..., None]:
    """Return a handler of the first SIGINT: a second one would come while the first is dealt with."""

    def handle(*args: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupt()

    return handle


def _raise_interrupt() -> None:
    raise InterruptedRankError


def outcome_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank: there once it has read its work, and with its outcome at the end."""
    return folder / f"rank-{rank}"
