"""A `python` for tests that start commands: each is forked from a server, which is forked from that of the ranks.

To import torch and Lightning takes each process four to six seconds of CPU time. What `fast_python` returns is a
program that takes the arguments of `python`, and stands for it in `sys.executable` as well, so that the ranks that
Lightning starts are forked, too. A test of signals, or of what a command imports, takes `sys.executable` itself.
With `-u -c`, as pytest-xdist starts those it deals tests to, `sys.executable` and loggers stay as they are.

    subprocess.run([fast_python(), "examples/node_rows.py"], ...)
"""

import atexit
import gc
import logging
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from select import select
from types import ModuleType
from typing import Any

from tests.ranks import CONTEXT, PRELOAD

IMPORTS = ["lightning_gnn_dist.cli.main", "torch.distributed.run"]  # beside what the ranks' server has
RANKS = ["RANK", "LOCAL_RANK"]  # what Lightning reads when it is imported

# Run by the program with no import but those of builtin modules and `socket`: in some milliseconds.
CLIENT = """#!{python} -IS
import os, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1] not in ("-m", "-c", "-u"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
command = [os.getcwd(), *sys.argv[1:]]
words = [*(f"{{name}}={{value}}" for name, value in os.environ.items()), "", *command]
asked = "\\0".join(words).encode(errors="surrogateescape")
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
code = int(server.recv(8) or b"1")
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@cache
def fast_python() -> str:
    """The path of a program that runs a script, a module (`-m`) or code (`-c`), while this process lives."""
    folder = tempfile.mkdtemp(prefix="python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, program = f"{folder}/socket", Path(folder, "python")
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        CONTEXT.Process(target=serve, args=(str(program), listener), daemon=True).start()
    return str(program)


def serve(program: str, listener: socket.socket) -> None:
    """Fork for each that asks, until the process that started this ends."""
    for name in IMPORTS:
        import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch a command
    parent = multiprocessing.parent_process()
    while parent.sentinel not in select([listener, parent.sentinel], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return watch(program, asked)
        asked.close()


def watch(program: str, asked: socket.socket) -> None:
    """Run one command and say how it ended; kill it when the one who asked is gone."""
    size, streams, _, _ = socket.recv_fds(asked, 8, 3)
    with asked.makefile("rb") as file:
        words = file.read(int.from_bytes(size, "big")).decode(errors="surrogateescape").split("\0")
    if (process := os.fork()) == 0:
        asked.close()
        for at, stream in enumerate(streams):
            os.dup2(stream, at)
            os.close(stream)
        return become(program, words)
    for stream in (0, 1, 2, *streams):
        os.close(stream)
    ended = os.pidfd_open(process)
    ends: list[int | socket.socket] = [ended, asked]
    if ended not in select(ends, [], [])[0]:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        asked.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(program: str, words: list[str]) -> None:
    """Do in this process what `python` does with these arguments."""
    at = words.index("")
    os.environ.clear()
    os.environ.update(word.split("=", 1) for word in words[:at])
    folder, *arguments = words[at + 1 :]
    os.chdir(folder)
    stand_alone()
    is_dealt_to = arguments[:2] == ["-u", "-c"]
    if arguments[0] == "-u":  # torchrun starts its ranks with it, too
        del arguments[0]
    if is_dealt_to:
        logging.getLogger("lightning").handlers.clear()  # that of ranks would write past what pytest captures
    else:
        be_a_command(program)
    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    random.seed(), np.random.seed(), torch.seed()
    sys.argv = arguments
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    try:
        execute(folder, arguments)
    finally:
        atexit._run_exitfuncs()


def be_a_command(program: str) -> None:
    """Write to loggers as Lightning does where it is imported: see `quieten`."""
    sys.executable = program
    logging.getLogger().handlers.clear()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [logging.StreamHandler()], False


def stand_alone() -> None:
    """Forget who started this process: its children, streams and warnings are its own."""
    own: Any = multiprocessing.current_process()
    own._name, own._identity, own._config["daemon"] = "MainProcess", (), False
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    for of_parent in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        type(of_parent).__init__(of_parent)
    CONTEXT.set_forkserver_preload(PRELOAD)
    multiprocessing.set_start_method(None, force=True)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def execute(folder: str, arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.path.insert(0, folder)
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path.insert(0, "")
        code, sys.argv = arguments[1], ["-c", *arguments[2:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
