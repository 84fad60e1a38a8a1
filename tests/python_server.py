"""A `python` for tests that start commands: each is forked from a server that has imported torch and Lightning once.

To import them takes each process four to six seconds of CPU time. What `fast_python` returns is a program that takes
the arguments of `python`, and stands for it in `sys.executable` as well, so that the ranks that Lightning starts are
forked, too. A test of signals, or of what a command imports, takes `sys.executable` itself.

    subprocess.run([fast_python(), "examples/node_rows.py"], ...)
"""

import atexit
import gc
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from types import ModuleType

IMPORTS = ["tests.no_garbage", "lightning.pytorch.cli", "torch_geometric.nn", "torchmetrics", "numba"]
IMPORTS += ["lightning_gnn_dist.cli.main", "lightning_gnn_dist.cli.train", "torch.distributed.run"]
RANKS = ["RANK", "LOCAL_RANK"]  # what Lightning reads when it is imported

# Run by the program with no import but those of builtin modules and `socket`: in some milliseconds.
CLIENT = """#!{python} -IS
import os, socket, sys
if sys.argv[1].startswith("-") and sys.argv[1] not in ("-m", "-c"):
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
    address, program = f"{folder}/socket", Path(folder, "python")
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.python_server", str(program), str(listener.fileno())]
    with listener:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[listener.fileno()])
    atexit.register(server.communicate)  # which closes what it reads, and waits for its end
    return str(program)


def serve(program: str, listener: socket.socket) -> None:
    """Fork for each that asks, until the process that started this ends."""
    for name in IMPORTS:
        import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch a command
    while sys.stdin not in select([listener, sys.stdin], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return watch(program, asked)
        asked.close()
    shutil.rmtree(Path(program).parent)


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
    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    random.seed(), np.random.seed(), torch.seed()
    sys.executable, sys.argv = program, arguments
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
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


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
