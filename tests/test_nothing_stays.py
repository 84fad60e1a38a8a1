"""After a fault no process, port, shared memory or temporary file of a run is left, however it was started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tests.extensions import brought
from tests.faulty_fit import SECONDS

ROOT = Path(__file__).parents[1]
FAULTS = {  # each fault at least once, and each way to start ranks twice
    "popen": ("exit 0", "exception", "full", "SIGTERM"),
    "fork": ("early", "kill", "SIGKILL"),
    "torchrun": ("stop", "exit 1"),
}
OTHERS = {more.METHOD: more for more in brought("faults")}
FAULTS |= {method: more.FAULTS for method, more in OTHERS.items()}
TABLE = [(method, fault) for method, faults in FAULTS.items() for fault in faults]
# Modules of torch_geometric, whose processes take them away unless they are killed, what Python keeps of them, and
# torchrun's logs.
NOT_OURS = ("torch_geometric.", "__pycache__", "torchelastic_")
# Python's, small folders of our launchers, and fsspec's half of a checkpoint, which nobody is left to take away.
OF_A_KILLED_LAUNCHER = ("pymp-", "ranks-", "elastic-", "tmp")
ENDS_IN = 300.0  # much more than it takes; a rank that stays would stay for ever

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds processes by /proc"),
]


def command_of(method: str, fault: str) -> list[str]:
    script = ["-m", "tests.faulty_fit", method, fault.replace(" ", "")]
    if method == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *script]
    if method in OTHERS:
        return [sys.executable, *OTHERS[method].LAUNCH, sys.executable, *script]
    return [sys.executable, *script]


def processes_in(folder: Path) -> Iterator[int]:
    """Those that stand in this folder, as all of a run do."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                yield int(entry.name)


def wait_until_none(folder: Path, seconds: float) -> list[int]:
    end = time.monotonic() + seconds
    while (left := list(processes_in(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def abandoned_memory() -> set[str]:
    """What lies in shared memory and no process uses any more."""
    names, used = set(os.listdir("/dev/shm")), ""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            used += (entry / "maps").read_text() if entry.name.isdigit() else ""
    return {name for name in names if f"/dev/shm/{name}" not in used and Path("/dev/shm", name).exists()}


def signal_it(process: subprocess.Popen[bytes], fault: str, folder: Path) -> None:
    """To the launcher, when ranks train."""
    while not list((folder / "checkpoints").glob("*.ckpt")) and process.poll() is None:
        time.sleep(0.1)
    if process.poll() is None:
        process.send_signal(signal.Signals[fault])
        (folder / "met").touch()


def run_case(case: tuple[str, str], folder: Path) -> str | None:
    """What is wrong after a run with that fault, None if nothing is."""
    method, fault = case
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    with (folder / "said").open("wb") as said:
        streams = {"stdout": said, "stderr": said}
        process = subprocess.Popen(command_of(*case), cwd=folder, env=environment, start_new_session=True, **streams)
        if fault.startswith("SIG"):
            signal_it(process, fault, folder)
        try:
            code: int | None = process.wait(ENDS_IN)
        except subprocess.TimeoutExpired:
            code = None
    # What ends with its parent is gone at once, what ends by a closed pipe a moment later.
    left = wait_until_none(folder, 20.0)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    others = NOT_OURS + (OF_A_KILLED_LAUNCHER if fault == "SIGKILL" else ())
    files = [path.name for path in temporary.iterdir() if not path.name.startswith(others)]
    succeeded = code == 0 and fault != "full" and method not in OTHERS  # others may come to the end
    succeeded |= fault == "SIGTERM" and method not in OTHERS and code != 128 + signal.SIGTERM
    wrong = left or code is None or succeeded or files or not (folder / "met").exists()
    last = (folder / "said").read_text(errors="replace")[-1500:]
    (folder / "outcome").write_text(f"{case} {code} {time.monotonic() - start:.0f} s {left} {files}")
    return f"{case}: code {code}, processes {left}, files {files}\n{last}" if wrong else None


def test_nothing_of_a_run_is_left_after_a_fault(tmp_path: Path) -> None:
    assert SECONDS < ENDS_IN
    before = abandoned_memory()
    with ThreadPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        found = pool.map(run_case, TABLE, [tmp_path / str(number) for number in range(len(TABLE))])
    assert not (wrong := [report for report in found if report]), "\n\n".join(wrong)
    end = time.monotonic() + 20
    while (left := abandoned_memory() - before) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
