"""Ranks as processes that this one starts by itself, where there may be no script to run again for each of them.

A rank is forked, or a fresh process that reads its work by value. What it has done, or why it ended, it writes to a
file. An interrupt (Ctrl-C, the stop button of a notebook) ends all ranks, whichever of the processes has got it.
"""

from __future__ import annotations

import codecs
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal, Protocol

from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, LEFT_BY_SIGTERM, end_all, end_of, tie_to_parent

Start = Literal["spawn", "fork", "forkserver"]
_PACKAGE = __name__.partition(".")[0]
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_SHOW = 2.0


class RankTraceback(Exception):
    """Where in a rank an exception was raised: the cause of the one that is raised here."""

    def __init__(self, rank: int, story: str) -> None:
        super().__init__(f"in rank {rank}:\n\n{story}")


@dataclass
class RankProcesses:
    """Starts ranks, waits for them, and lets none stay behind.

    Args:
        work: What they do. It travels by value, except to forked ranks.
        count: How many to start.
        start: How ``multiprocessing`` starts them.
        environment: The variables of their environment, to which ``LOCAL_RANK`` is added.
    """

    work: Work
    count: int
    start: Start
    environment: Mapping[str, str]
    outcomes: dict[int, Outcome] = field(default_factory=dict, init=False)
    was_interrupted: bool = field(default=False, init=False)
    _processes: list[Any] = field(default_factory=list, init=False)

    def run(self) -> BaseException | None:
        """Return when all ranks have ended, with the exception to raise if one failed. ``outcomes`` has what they say.

        After an interrupt of this process or of a rank there is no exception, but ``was_interrupted`` is set.
        """
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _shown_here() as streams:
            culprit = None
            try:
                self._start(Path(folder), streams)
                culprit = self._wait(Path(folder))
            except KeyboardInterrupt:
                self.was_interrupted = True
            finally:
                self.kill(signal.SIGINT)
                started = {rank: process for rank, process in enumerate(self._processes) if process.pid is not None}
                self.was_interrupted |= end_all(started, GRACE_SECONDS)
            self._read_outcomes(Path(folder))
        return None if self.was_interrupted else self._error_of(culprit)

    def kill(self, number: int) -> None:
        """Send a signal to the ranks that live."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _start(self, folder: Path, streams: dict[int, Connection]) -> None:
        context: Any = multiprocessing.get_context(self.start)
        is_forked = self.start == "fork"
        if not is_forked:
            by_value.write(folder / "work", self.work)
        if self.start == "forkserver":
            context.set_forkserver_preload(_loaded())  # by its server, once, as it takes seconds
        surroundings = Surroundings(folder, dict(self.environment), os.getcwd(), [*sys.path], streams)
        with nullcontext() if is_forked else _main_left_out():
            for rank in range(self.count):
                args = (rank, surroundings, self.work if is_forked else None)
                self._processes.append(context.Process(target=be_rank, args=args, name=f"rank {rank}"))
                self._processes[-1].start()
        for writer in streams.values():
            writer.close()  # or this process would wait for its own words

    def _wait(self, folder: Path) -> int | None:
        """Return the first rank that ended before its work did, None if all have come to the end."""
        waiting, has_forgotten = dict(enumerate(self._processes)), False
        while waiting:
            wait([process.sentinel for process in waiting.values()], _SECONDS_BETWEEN_LOOKS)
            if not has_forgotten and all(outcome_file(folder, rank).exists() for rank in range(self.count)):
                has_forgotten = True
                for path in folder.glob("work*"):  # mapped by the ranks; nobody else could delete it after a SIGKILL
                    path.unlink()
            for rank in [rank for rank, process in waiting.items() if process.exitcode is not None]:
                code = waiting.pop(rank).exitcode
                if code not in (0, LEFT_BY_SIGTERM) or not _has_outcome(folder, rank):
                    return rank
        return None

    def _read_outcomes(self, folder: Path) -> None:
        for rank in range(self.count):
            with suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):  # of a rank that was killed
                self.outcomes[rank] = by_value.read(outcome_file(folder, rank), self.work.shared())

    def _error_of(self, culprit: int | None) -> BaseException | None:
        """Return what ended a rank too early: of several the first, as the others follow from it."""
        code = 0 if culprit is None else self._processes[culprit].exitcode
        if culprit is not None and culprit not in self.outcomes and code != CODES["interrupted"]:
            return RuntimeError(f"Rank {culprit} {_silent_end_of(code)}")
        ended = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.how in ("interrupted", "failed")}
        rank = min(ended, key=lambda rank: ended[rank].at, default=culprit)
        self.was_interrupted = rank is not None and (rank not in ended or ended[rank].how == "interrupted")
        if rank is None or self.was_interrupted:
            return None
        error = _exception_of(ended[rank])
        error.__cause__ = RankTraceback(rank, ended[rank].story)
        return error


def _has_outcome(folder: Path, rank: int) -> bool:
    file = outcome_file(folder, rank)
    return file.exists() and file.stat().st_size > 0


def _loaded() -> list[str]:
    """What this process has imported of the package, so that it uses it: the package itself imports next to nothing."""
    return [name for name in list(sys.modules) if name.partition(".")[0] == _PACKAGE]


def _exception_of(outcome: Outcome) -> BaseException:
    with suppress(Exception):  # whatever the user's own class raises when it is made again
        error = pickle.loads(outcome.error)
        if isinstance(error, BaseException):
            return error
    return RuntimeError(outcome.story.strip().splitlines()[-1])


def _silent_end_of(code: int) -> str:
    if code == CODES["failed"]:
        return f"{end_of(code)} and wrote down no reason: is the disk full? The other ranks are ended."
    return f"{end_of(code)}{', but not at the end of its work' if code >= 0 else ''}. The other ranks are ended."


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Keep ``multiprocessing`` from running the main script again in each rank: what it defines travels by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _shown_here() -> Iterator[dict[int, Connection]]:
    """Yield a pipe for each of stdout and stderr that something has replaced here, as a notebook does."""
    pipes, threads = {}, []
    for number, stream, original in ((1, sys.stdout, sys.__stdout__), (2, sys.stderr, sys.__stderr__)):
        if stream is not None and stream is not original:
            reader, pipes[number] = multiprocessing.Pipe(duplex=False)
            threads.append(threading.Thread(target=_show, args=(reader, stream), daemon=True))
            threads[-1].start()
    try:
        yield pipes
    finally:
        for writer in pipes.values():
            writer.close()
        for thread in threads:
            thread.join(_SECONDS_TO_SHOW)  # a process that a rank has started may hold the other end


def _show(reader: Connection, stream: IO[str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with reader:
        while octets := os.read(reader.fileno(), 1 << 16):
            with suppress(ValueError, OSError):  # a closed stream, but ranks must not wait for a full pipe
                stream.write(decoder.decode(octets))
                stream.flush()


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
