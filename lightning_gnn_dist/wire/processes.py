"""Processes that end with the one that started them, whatever ended it.

A process that is killed runs no line of Python any more, so who it started has to notice by itself. Linux kills a
child for it, stopped or not, that has asked to be killed when the thread that started it is gone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

GRACE_SECONDS = 10.0  # for ranks to end by themselves when one has failed, before they are killed
_TIES = sys.platform == "linux"
_SET_SIGNAL_AT_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2); a program that is then executed keeps it
# The parent may be gone before its child has asked.
_ASK = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({_SET_SIGNAL_AT_DEATH_OF_PARENT}, {int(signal.SIGKILL)})\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def tied(command: Sequence[str]) -> list[str]:
    """The command as one that ends with this process. Only Linux can; elsewhere it stays as it is."""
    if not _TIES or threading.current_thread() is not threading.main_thread():
        return list(command)  # another thread may end long before the process
    return [sys.executable, "-I", "-S", "-c", _ASK, str(os.getpid()), *command]


def tie_to_parent() -> None:
    """Let this process, made by ``multiprocessing``, end with its parent. Only Linux can."""
    if not _TIES:
        return
    ctypes.CDLL(None).prctl(_SET_SIGNAL_AT_DEATH_OF_PARENT, int(signal.SIGKILL))
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Give processes so long to end, and kill those that have not. Returns which were killed."""
    deadline = time.monotonic() + seconds
    killed = []
    for number, process in enumerate(processes):
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed.append(number)
    return killed


def end_of(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
