"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_gnn_dist.wire.launching import processes
from lightning_gnn_dist.wire.launching.processes import Command, end_all, end_of, tied

SLEEPS = [sys.executable, "-S", "-c", "import time; print('here', flush=True); time.sleep(600)"]
# The module alone: a start without torch takes no time.
PARENT = """
import importlib.util, subprocess, sys, time
spec = importlib.util.spec_from_file_location("processes", sys.argv[1])
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
child = subprocess.Popen(module.tied(sys.argv[2:]), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_tied_process_ends_with_its_parent(stopped: bool) -> None:
    command = [sys.executable, "-S", "-c", PARENT, processes.__file__, *SLEEPS]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    assert is_there(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 20
    while is_there(pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_there(pid)


def test_a_tied_command_is_what_it_was() -> None:
    said = subprocess.run(
        tied([sys.executable, "-c", "import sys; print(sys.argv[1:], sys.flags.isolated)", "a b"]),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == "['a b'] 0\n"


def test_who_does_not_end_is_killed_and_named(logged: list[str]) -> None:
    ranks = {3: Command([sys.executable, "-S", "-c", ""]), 4: Command(SLEEPS, stdout=subprocess.DEVNULL)}
    os.kill(ranks[4].pid, signal.SIGSTOP)
    ranks[3].wait()
    end_all(ranks, 0.1)
    assert [end_of(rank.returncode) for rank in ranks.values()] == ["ended with exit code 0", "was killed by SIGKILL"]
    assert logged == [f"Rank 4 (process {ranks[4].pid}) did not end in 0.1 s and was killed."]
