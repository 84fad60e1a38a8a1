"""Ranks as processes that this one starts by itself, where there may be no script to run again for each of them.

A rank is forked, or a fresh process that reads its work by value. What it has done, or why it ended, it writes to a
file. An interrupt (Ctrl-C, the stop button of a notebook) ends all ranks, whichever of the processes has got it.

What every rank does is an object with these members:

run()           does it, and returns "done" or "left"; raises InterruptedRankError or KeyboardInterrupt if interrupted
result()        what the starting process gets of this rank, however it ended
shared()        objects that results may refer to, in the same order in all processes, before anything runs
on_interrupt()  raises InterruptedRankError, now or soon; called in a rank by a signal handler
failure         what ended it, and when, by time.monotonic(): before anything is torn down, which other ranks notice,
                and where an interrupt may come between; None as long as nothing has
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal

from lightning_gnn_dist.extensions.notebooks import by_value
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, LEFT_BY_SIGTERM, end_all, end_of, tie_to_parent

Start = Literal["spawn", "fork", "forkserver"]
How = Literal["done", "left", "interrupted", "failed"]  # left: by SIGTERM
CODES = {"done": 0, "left": LEFT_BY_SIGTERM, "interrupted": 128 + signal.SIGINT, "failed": 1}
_PACKAGE = __name__.partition(".")[0]
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_SHOW = 2.0


class RankTraceback(Exception):
    """Where in a rank an exception was raised: the cause of the one that is raised here."""

    def __init__(self, rank: int, story: str) -> None:
        super().__init__(f"in rank {rank}:\n\n{story}")


class InterruptedRankError(BaseException):
    """Ends the work of a rank. Lightning would turn a KeyboardInterrupt into the end of the process."""


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

    def exception(self, rank: int) -> BaseException:
        """Return the exception of a rank, as it is raised here."""
        error: BaseException = RuntimeError(self.story.strip().splitlines()[-1])
        with suppress(Exception):  # whatever the user's own class raises when it is made again
            if isinstance(made := pickle.loads(self.error), BaseException):
                error = made
        error.__cause__ = RankTraceback(rank, self.story)
        return error


@dataclass
class RankProcesses:
    """Starts ranks, waits for them, and lets none stay behind.

    Args:
        work: What they do. It travels by value, except to forked ranks.
        count: How many to start.
        start: How ``multiprocessing`` starts them.
        environment: The variables of their environment, to which ``LOCAL_RANK`` is added.
    """

    work: Any
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
        with tempfile.TemporaryDirectory(prefix="ranks-") as name, _shown_here() as streams:
            folder, culprit = Path(name), None
            try:
                self._start(folder, streams)
                culprit = self._wait(folder)
            except KeyboardInterrupt:
                self.was_interrupted = True
            finally:
                self.kill(signal.SIGINT)
                started = {rank: process for rank, process in enumerate(self._processes) if process.pid is not None}
                self.was_interrupted |= end_all(started, GRACE_SECONDS)
            for rank in range(self.count):
                with suppress(FileNotFoundError, EOFError, pickle.UnpicklingError):  # of a rank that was killed
                    self.outcomes[rank] = by_value.read(outcome_file(folder, rank), self.work.shared())
        return None if self.was_interrupted else self._error_of(culprit)

    def kill(self, number: int) -> None:
        """Send a signal to the ranks that live."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _start(self, folder: Path, streams: dict[int, Connection]) -> None:
        context: Any = multiprocessing.get_context(self.start)
        if self.start == "forkserver":  # its server imports once what takes seconds; the package itself imports little
            context.set_forkserver_preload([name for name in list(sys.modules) if name.partition(".")[0] == _PACKAGE])
        work, main = self.work, sys.modules["__main__"]
        if self.start != "fork":
            by_value.write(folder / "work", self.work)
            # Or multiprocessing would run the main script again in each rank; what it defines travels by value.
            work, sys.modules["__main__"] = None, ModuleType("__main__")
        try:
            for rank in range(self.count):
                args = (rank, folder, dict(self.environment), os.getcwd(), [*sys.path], streams, work)
                self._processes.append(context.Process(target=be_rank, args=args, name=f"rank {rank}"))
                self._processes[-1].start()
        finally:
            sys.modules["__main__"] = main
        for writer in streams.values():
            writer.close()  # or this process would wait for its own words

    def _wait(self, folder: Path) -> int | None:
        """Return the first rank that ended before its work did, None if all have come to the end."""
        waiting, files = dict(enumerate(self._processes)), [outcome_file(folder, rank) for rank in range(self.count)]
        while waiting:
            wait([process.sentinel for process in waiting.values()], _SECONDS_BETWEEN_LOOKS)
            if all(file.exists() for file in files):
                for path in folder.glob("work*"):  # mapped by the ranks; nobody else could delete it after a SIGKILL
                    path.unlink()
            for rank in [rank for rank, process in waiting.items() if process.exitcode is not None]:
                code = waiting.pop(rank).exitcode
                if code not in (0, LEFT_BY_SIGTERM) or not files[rank].exists() or not files[rank].stat().st_size:
                    return rank
        return None

    def _error_of(self, culprit: int | None) -> BaseException | None:
        """Return what ended a rank too early: of several the first, as the others follow from it."""
        code = 0 if culprit is None else self._processes[culprit].exitcode
        if culprit is not None and culprit not in self.outcomes and code != CODES["interrupted"]:
            why = ", but not at the end of its work" if code >= 0 else ""
            why = " and wrote down no reason: is the disk full? The" if code == CODES["failed"] else f"{why}. The"
            return RuntimeError(f"Rank {culprit} {end_of(code)}{why} other ranks are ended.")
        ended = {rank: outcome for rank, outcome in self.outcomes.items() if outcome.how in ("interrupted", "failed")}
        rank = min(ended, key=lambda rank: ended[rank].at, default=culprit)
        self.was_interrupted = rank is not None and (rank not in ended or ended[rank].how == "interrupted")
        return None if rank is None or self.was_interrupted else ended[rank].exception(rank)


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


def be_rank(
    rank: int,
    folder: Path,
    environment: dict[str, str],
    directory: str,
    path: list[str],
    streams: dict[int, Connection],
    work: Any,
) -> None:
    """The life of a rank's process.

    Args:
        rank: Its local number.
        folder: Where its work is, and where its outcome goes.
        environment: The variables of its environment.
        directory: The one that it works in.
        path: Where modules are looked for; "" in it is the directory.
        streams: By the number of the file that takes their place here, pipes to the process that started it.
        work: What it does; None where it reads that.
    """
    tie_to_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handlers
    outcome, shared = Outcome("failed"), []
    try:
        signal.signal(signal.SIGINT, _once(None))
        try:
            for number, writer in streams.items():
                os.dup2(writer.fileno(), number)
                stream = open(number, "w", buffering=1, closefd=False, encoding="utf-8")  # noqa: SIM115
                setattr(sys, {1: "stdout", 2: "stderr"}[number], stream)
            os.chdir(directory)
            sys.path[:] = path  # multiprocessing has put another directory in the place of ""
            os.environ.clear()
            os.environ.update(environment, LOCAL_RANK=str(rank))
            work = by_value.read(folder / "work") if work is None else work
            outcome_file(folder, rank).touch()
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
    try:
        outcome.result = None if work is None else work.result()
        by_value.write(outcome_file(folder, rank), outcome, shared)
    except Exception as failure:
        if outcome.how == "done":
            outcome.fail(failure)
        outcome.result = None
        by_value.write(outcome_file(folder, rank), outcome, shared)
    sys.exit(CODES[outcome.how])


def _once(interrupt: Callable[[], None] | None) -> Callable[..., None]:
    """Return a handler of the first SIGINT: a second one would come while the first is dealt with."""

    def handle(*args: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if interrupt is None:
            raise InterruptedRankError
        interrupt()

    return handle


def outcome_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank: there once it has read its work, and with its outcome at the end."""
    return folder / f"rank-{rank}"
