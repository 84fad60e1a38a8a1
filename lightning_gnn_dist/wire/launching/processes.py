"""Processes that end with the one that started them, whatever ended it.

A process that is killed cannot end its children, so a child has to notice by itself. On Linux it can ask to be killed,
even while it is stopped, when the thread that started it is gone.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

LEFT_BY_SIGTERM = 128 + signal.SIGTERM  # the exit code of a process that was told to end, and ended by itself
GRACE_SECONDS = 10.0  # that ranks have to end by themselves when one has failed, before they are killed
_log = logging.getLogger(__name__)
_TIES = sys.platform == "linux"
_SET_SIGNAL_AT_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2); it outlasts exec
# Checks the parent after it has asked, as it may be gone by then.
_ASK = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_SET_SIGNAL_AT_DEATH_OF_PARENT}, {int(signal.SIGKILL)})\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def tied(command: Sequence[str]) -> list[str]:
    """The command, changed so that it ends with this process; unchanged except on Linux and in the main thread."""
    if not _TIES or threading.current_thread() is not threading.main_thread():
        return list(command)  # another thread may end long before the process
    return [sys.executable, "-I", "-S", "-c", _ASK, str(os.getpid()), *command]


class Command(subprocess.Popen[bytes]):
    """A command that runs, and the names that a process of ``multiprocessing`` has for how it ends."""

    @property
    def exitcode(self) -> int | None:
        """The return code, or None while it runs."""
        return self.poll()

    def join(self, seconds: float | None = None) -> None:
        """Wait for its end, so many seconds at most."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(seconds)


def start(command: Sequence[str], variables: Mapping[str, str], **options: Any) -> Command:
    """Start a fresh process that is to be a rank."""
    return Command(tied(command), env=variables, **options)


def tie_to_parent() -> None:
    """Let this process, made by ``multiprocessing``, end with its parent. Works only on Linux."""
    if not _TIES:
        return
    ctypes.CDLL(None).prctl(_SET_SIGNAL_AT_DEATH_OF_PARENT, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def end_all(processes: Mapping[int, Any], seconds: float) -> None:
    """Wait ``seconds`` for ranks to end by themselves, or until Ctrl-C, kill the others, and say so.

    Args:
        processes: Each rank's, a :class:`Command` or one of ``multiprocessing``.
        seconds: For all of them together.
    """
    deadline = time.monotonic() + seconds
    for rank, process in processes.items():
        try:
            process.join(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            deadline = 0.0
        if process.exitcode is None:
            process.kill()
            process.join()
            _log.error("Rank %d (process %d) did not end in %g s and was killed.", rank, process.pid, seconds)


def end_of(code: int) -> str:
    """How a process with this return code ended, in words."""
    if code == LEFT_BY_SIGTERM:
        return "was told to end by SIGTERM"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
