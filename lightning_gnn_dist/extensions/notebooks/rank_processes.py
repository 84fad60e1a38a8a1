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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Literal

from lightning_gnn_dist.extensions.notebooks.rank_life import CODES, Outcome, Surroundings, Work, be_rank, outcome_file
from lightning_gnn_dist.wire.launching import by_value
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, LEFT_BY_SIGTERM, end_all, end_of

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
