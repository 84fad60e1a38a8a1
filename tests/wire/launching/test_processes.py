"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gnn_dist.wire.launching import by_value, processes
from lightning_gnn_dist.wire.launching.by_value import CannotTravelError
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
    assert parent.stdout is not None
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
    assert not end_all(ranks, 0.1)
    assert [end_of(rank.returncode) for rank in ranks.values()] == ["ended with exit code 0", "was killed by SIGKILL"]
    assert logged == [f"Rank 4 (process {ranks[4].pid}) did not end in 0.1 s and was killed."]


# Objects that travel to other processes: one stays one, large arrays are mapped, and what cannot travel is refused.


LARGE = 1 << 18  # of float32: a file of its own


def sent(item: Any, folder: Path, *, there: tuple[Any, ...] = (), here: tuple[Any, ...] = ()) -> Any:
    by_value.write(folder / "item", item, here)
    return by_value.read(folder / "item", there)


def test_large_arrays_are_files_that_readers_share(tmp_path: Path) -> None:
    tensor, array = torch.arange(LARGE, dtype=torch.float32), np.arange(LARGE, dtype=np.int64)
    got = sent([tensor, array, tensor, tensor.view(2, -1)], tmp_path)
    assert got[0] is got[2]
    assert torch.equal(got[0], tensor) and torch.equal(got[3], tensor.view(2, -1)) and np.array_equal(got[1], array)
    assert (tmp_path / "item").stat().st_size < 10_000
    assert len(list(tmp_path.glob("item.*.npy"))) == 3
    got[0][0] = -1  # its own copy of that page
    assert float(by_value.read(tmp_path / "item")[0][0]) == 0.0 == float(tensor[0])


@pytest.mark.parametrize(
    "item",
    [torch.ones(3), torch.ones(LARGE, dtype=torch.bfloat16), nn.Parameter(torch.ones(LARGE)), torch.ones(2, LARGE).T],
)
def test_every_tensor_is_what_it_was(item: torch.Tensor, tmp_path: Path) -> None:
    got = sent(item, tmp_path)
    assert type(got) is type(item) and got.dtype == item.dtype and got.requires_grad == item.requires_grad
    assert torch.equal(got, item)


def test_what_both_sides_have_stays_what_it_is(tmp_path: Path) -> None:
    mine, theirs = nn.Linear(2, 2), nn.Linear(3, 3)
    got = sent({"model": mine, "other": [1]}, tmp_path, here=(mine,), there=(theirs,))
    assert got["model"] is theirs and got["other"] == [1]
    assert by_value.from_bytes(by_value.as_bytes([mine], (mine,)), (theirs,))[0] is theirs


def test_what_cannot_travel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotTravelError, match=r"list: cannot pickle '_thread.lock' object"):
        by_value.write(tmp_path / "item", [threading.Lock()])
    with pytest.raises(CannotTravelError):
        by_value.check([threading.Lock()])
    by_value.check([torch.ones(LARGE)])
