"""The launcher of elastic ranks: who dies is told, who is left goes on, nobody stays behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main

pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")

LAUNCH = [sys.executable, "-m", "lightning_gnn_dist", "elastic"]


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a launcher, whose ranks may read in the file ``said`` what it has told so far."""
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}  # as users have it
    command, errors = [*LAUNCH, *arguments], subprocess.PIPE
    with (cwd / "said").open("w") as said:
        done = subprocess.run(command, cwd=cwd, env=environment, stdout=said, stderr=errors, text=True, timeout=600)
    done.stdout = (cwd / "said").read_text()
    return done


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


DIE_ONCE = """
import os, pathlib, signal, time
rank = os.environ["LIGHTNING_GNN_DIST_RANK"]
assert os.environ["TORCHFT_LIGHTHOUSE"].startswith("http")
pathlib.Path(f"here-{rank}").touch()
while len(list(pathlib.Path(".").glob("here-*"))) < 3: time.sleep(0.05)
if rank == "1" and not pathlib.Path("died").exists():
    pathlib.Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1": pathlib.Path("again").touch()
while not pathlib.Path("again").exists(): time.sleep(0.05)
"""


@pytest.mark.slow
def test_who_died_is_told_and_started_again_when_asked(tmp_path: Path) -> None:
    done = launch("--ranks", "3", "--restarts", "1", *python(DIE_ONCE), cwd=tmp_path)
    assert "Rank 1 was killed by SIGKILL; 2 of 3 are alive." in done.stdout
    assert "Rank 1 is started again." in done.stdout
    assert "torchft::" not in done.stdout + done.stderr  # its log lines can crash the launcher
    assert done.returncode == 0


LATE = """
import os, pathlib, sys, time
rank, folder = os.environ["LIGHTNING_GNN_DIST_RANK"], pathlib.Path(".")
if rank == "0":
    pathlib.Path(os.environ["LIGHTNING_GNN_DIST_SIGN"]).write_text("waits")
    (folder / "waits").touch()
    time.sleep(600)
while not (folder / "waits").exists(): time.sleep(0.05)
sys.exit(143 if rank == "1" else 0)
"""


@pytest.mark.slow
def test_who_waits_in_vain_is_ended(tmp_path: Path) -> None:
    done = launch("--ranks", "4", "--restarts", "1", *python(LATE), cwd=tmp_path)
    assert "Rank 0 came back too late to take part: it is ended." in done.stdout
    assert re.search(r"Rank 0 was killed by SIGKILL; \d of 4 are alive and \d have finished", done.stdout)
    assert "Rank 1 was told to end by SIGTERM; " in done.stdout and "started again" not in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("code", "how"), [(3, "ended with exit code 3"), (143, "was told to end by SIGTERM")])
def test_if_nobody_finishes_the_launcher_fails(code: int, how: str, tmp_path: Path) -> None:
    done = launch("--ranks", "2", *python(f"import sys; sys.exit({code})"), cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.count(how) == 2


STANDS_STILL = """
import os, pathlib, signal, time
sign = pathlib.Path(os.environ["LIGHTNING_GNN_DIST_SIGN"])
sign.touch()
pid = pathlib.Path("pid")
if os.environ["LIGHTNING_GNN_DIST_RANK"] == "1":
    pid.with_name("draft").write_text(str(os.getpid()))
    pid.with_name("draft").rename(pid)
    os.kill(os.getpid(), signal.SIGSTOP)
signs = lambda: len(list(sign.parent.glob("rank-*")))
while signs() < 2: time.sleep(0.05)
while signs() == 2: sign.touch(); time.sleep(0.2)
while "1 of 2 are alive" not in pathlib.Path("said").read_text(): time.sleep(0.05)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_who_stands_still_is_ended_when_too_few_are_left(tmp_path: Path) -> None:
    done = launch("--ranks", "2", "--heartbeat", "1", "--grace", "4", *python(STANDS_STILL), cwd=tmp_path)
    assert "Rank 1 stands still for 5 s, and too few are left without it: it is ended." in done.stdout
    assert "Rank 1 was killed by SIGKILL; 1 of 2 are alive." in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_rank_outlives_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(600)"
    process = subprocess.Popen([*LAUNCH, "--ranks", "2", "--grace", "5", *python(code)], cwd=tmp_path)
    while len(pids := list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(240) == 128 + number
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


DIE_AFTER_A_ROUND = """
import os, pathlib, runpy, signal, sys, threading, time

def die_after_a_round():
    while not list(pathlib.Path("checkpoints").glob("*.ckpt")): time.sleep(0.1)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["LIGHTNING_GNN_DIST_RANK"] == "0":
    threading.Thread(target=die_after_a_round, daemon=True).start()
"""


@pytest.mark.slow
def test_the_example_survives_a_death(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "strategies.py"
    kill = DIE_AFTER_A_ROUND + f"sys.argv = [{str(example)!r}, 'elastic']\n"
    kill += f"sys.path.insert(0, {str(example.parent)!r})\n"  # as for any script
    kill += f"runpy.run_path({str(example)!r}, run_name='__main__')"
    done = launch("--ranks", "3", *python(kill), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Rank 0 was killed by SIGKILL; 2 of 3 are alive." in done.stdout
    (accuracy,) = re.findall(r"accuracy\D+(0\.\d+)", done.stdout)[-1:]  # of the test
    assert float(accuracy) > 0.6
    # Those of the last rounds, and perhaps one that the dead rank alone knew of.
    names = [path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")]
    assert "last.ckpt" in names and 2 <= len(names) <= 3


def test_a_command_is_needed() -> None:
    with pytest.raises(SystemExit, match="Say what each rank runs"):
        main(["elastic", "--ranks", "2"])


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="no program 'pyhton' that ranks could run"):
        main(["elastic", "--ranks", "2", "--", "pyhton", "train.py"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--restarts", "-1", "must be at least 0, got -1"),
        ("--heartbeat", "0", "must be a number of seconds, more than 0, got 0"),
        ("--heartbeat", "nan", "must be a number of seconds, more than 0, got nan"),
        ("--grace", "-5", "must be a number of seconds, more than 0, got -5"),
    ],
)
def test_options_that_could_not_work_are_refused(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["elastic", "--ranks", "2", f"{option}={value}", "--", sys.executable, "train.py"])
    assert message in capsys.readouterr().err
