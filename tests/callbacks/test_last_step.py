"""A rank or a host that dies costs one step, and those that are left go on along the same curve."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback

from lightning_gnn_dist import Elastic, Halo, Holding, LocalSGDStrategy, RandomPartitioner, TMAStrategy
from lightning_gnn_dist.callbacks.last_step import LastStep
from lightning_gnn_dist.wire.addresses import wait_for_listener
from tests.cli.test_train import SMALL, command
from tests.data_fitting import trainer
from tests.ranks import free_port, run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.test_as_ranks import STEPS, TOLERANCE, Model, data_of
from tests.strategies.weighted_fitting import grappa

STEPS_OF_PASS = STEPS // 3
RUN = {"TORCHELASTIC_RUN_ID": "a run/7", "GROUP_WORLD_SIZE": "3", "LOCAL_RANK": "0"}


class Copies(Callback):
    """Keeps what a machine that dies behind a step would leave."""

    def __init__(self, last: LastStep, to: Path, steps: set[int]) -> None:
        self.last, self.to, self.steps = last, to, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps and not (self.to / f"{trainer.global_step}").exists():
            trainer.strategy.barrier()
            assert [path.name for path in self.last.folder.iterdir()] == [f"{trainer.global_step}.ckpt"]
            if trainer.is_global_zero:
                shutil.copytree(self.last.folder, self.to / f"{trainer.global_step}")
            trainer.strategy.barrier()


def fit(world_size: int, callbacks: list[Callback], path: Path | None = None) -> State:
    module = Model()
    runner = trainer(world_size, grappa(), max_epochs=3, callbacks=callbacks)
    runner.fit(module, data_of(Halo(2)), ckpt_path=path)
    assert runner.global_step == STEPS
    return state_of(module)


def stop_and_go_on(rank: int, world_size: int, folder: Path) -> list[State]:
    """The weights of a whole run, and of those that went on behind some steps, in a pass and at its end."""
    if world_size == 2:
        last = LastStep(folder / "memory")
        return [fit(2, [last, Copies(last, folder, {STEPS_OF_PASS + 4, 2 * STEPS_OF_PASS})])]
    copies = [LastStep(path) for path in sorted(folder.glob("[0-9]*"))]
    return [fit(world_size, [last], last.newest()) for last in copies]


def test_any_number_of_ranks_goes_on_behind_any_step(tmp_path: Path) -> None:
    ((whole,), _) = run_ranks(stop_and_go_on, 2, tmp_path)
    (resumed,) = run_ranks(stop_and_go_on, 1, tmp_path)
    assert len(resumed) == 2
    for state in resumed:
        assert differs(state, whole) < TOLERANCE


def stop_behind_a_round(rank: int, world_size: int, folder: Path) -> tuple[State, State]:
    """The weights of a run of rounds, and of one that was stopped behind its second round and went on."""
    made = []
    for callbacks, rounds in (([], 3), ([LastStep(folder)], 2), ([LastStep(folder)], 3)):
        module = Model()
        runner = trainer(world_size, LocalSGDStrategy(), max_epochs=rounds, callbacks=[*callbacks])
        path = callbacks[0].newest() if callbacks else None
        runner.fit(module, data_of(Halo(2), holding=Holding(), partitioner=RandomPartitioner()), ckpt_path=path)
        made.append(state_of(module))
        assert len([*folder.glob("*.ckpt")]) == len(callbacks)
    return made[0], made[-1]


def test_rounds_go_on_behind_the_last_one(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(stop_behind_a_round, 2, tmp_path):
        assert differs(whole, resumed) == 0.0


def bring(rank: int, world_size: int, folder: Path) -> bytes:
    os.environ |= RUN
    last = LastStep(folder / f"host{rank}")
    assert last.newest() is None  # the first start
    for step in (9, 10)[:rank]:  # host 0 is new, host 1 lacks a step
        (last.folder / f"{step}.ckpt").write_bytes(bytes([step]) * 7)
    (last.folder / "being-written").write_bytes(b"half")
    found = last.newest()
    assert found == last.folder / "10.ckpt" and not torch.distributed.is_initialized()
    return found.read_bytes()


def test_all_hosts_get_the_newest_state(tmp_path: Path) -> None:
    assert run_ranks(bring, 3, tmp_path) == [bytes([10]) * 7] * 3


def test_what_cannot_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match=r"this run has none: name it, torchrun --rdzv-id=NAME"):
        LastStep()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run/7")
    assert LastStep().folder.name == f"lightning-gnn-dist-{os.getuid()}-a_run_7"
    with pytest.raises(ValueError, match="every_n_steps must be an integer of at least 1, got 0"):
        LastStep(tmp_path, every_n_steps=0)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(ValueError, match=r"Others may write into .*: give another folder"):
        LastStep(tmp_path / "open").newest()
    for strategy, match in (
        ("auto", "use GrappaStrategy"),
        (TMAStrategy(peers=Elastic()), "bring each other up to date"),
    ):
        with pytest.raises(ValueError, match=match):
            LastStep(tmp_path / "own").on_fit_start(trainer(1, strategy), Model())


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from lightning_gnn_dist import Halo
from lightning_gnn_dist.callbacks.last_step import LastStep
from tests.callbacks.test_last_step import Dies
from tests.data_fitting import trainer
from tests.strategies.fitting import state_of
from tests.strategies.test_as_ranks import Model, data_of
from tests.strategies.weighted_fitting import grappa

host, out = Path(sys.argv[1]), Path(sys.argv[2])
last, module = LastStep(host), Model()
hosts = int(os.environ["GROUP_WORLD_SIZE"])
runner = trainer(1, grappa(), max_epochs=3, num_nodes=hosts, callbacks=[last, Dies(host, out)])
runner.fit(module, data_of(Halo(2)), ckpt_path=last.newest())
if runner.is_global_zero:
    torch.save(state_of(module), out / "being-written")
    (out / "being-written").replace(out / "state")
last.clear()
"""


class Dies(Callback):
    """Host b dies with all its processes at its step 11; a host that is alone waits at step 14 until another comes."""

    def __init__(self, host: Path, out: Path) -> None:
        self.host, self.out = host, out

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with (self.out / f"{self.host.name}.steps").open("a") as file:  # what each start has trained
            file.write(f"{trainer.world_size} {trainer.global_step}\n")
        if self.host.name == "b" and trainer.global_step == 11:
            os.killpg(os.getppid(), signal.SIGKILL)  # the host's torchrun
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.world_size == 1 and trainer.global_step == 14:
            (self.out / "alone").touch()
            until = time.monotonic() + 60
            while not trainer.strategy.sigterm_received and time.monotonic() < until:  # torchrun's: another has come
                time.sleep(0.05)


@pytest.mark.slow
def test_hosts_die_and_come_for_a_step_each(tmp_path: Path) -> None:
    """Of two hosts, a torchrun each, one is killed and a third comes: along the curve of one that never stopped."""
    (tmp_path / "train.py").write_text(SCRIPT)
    processes: list[subprocess.Popen[bytes]] = []
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"]
    command += ["--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=60,last_call_timeout=8", "--monitor-interval=0.2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as docs/elastic.md says

    def start(host: str) -> None:
        given = [*command, str(tmp_path / "train.py"), str(tmp_path / host), str(tmp_path)]
        with (tmp_path / f"{host}.said").open("wb") as said:
            processes.append(subprocess.Popen(given, env=environment, stdout=said, stderr=said, start_new_session=True))

    try:
        start("a")
        wait_for_listener("127.0.0.1", port, time.monotonic() + 60)  # it serves the meeting of hosts, and b dies
        start("b")
        until = time.monotonic() + 240
        while not (tmp_path / "alone").exists():
            assert processes[0].poll() is None and time.monotonic() < until, (tmp_path / "a.said").read_text()[-4000:]
            time.sleep(0.1)
        start("c")
        codes = [processes[at].wait(240) for at in (0, 2)]
        assert codes == [0, 0], "".join((tmp_path / f"{host}.said").read_text()[-4000:] for host in "ac")
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    starts = _starts((tmp_path / "a.steps").read_text())
    assert [size for size, _ in starts] == [2, 1, 2] and starts[0][1][-1] in (10, 11)
    assert starts[1][1][0] in (10, 11) and starts[1][1][-1] == 14 and starts[2][1] == [*range(14, STEPS + 1)]
    assert _starts((tmp_path / "c.steps").read_text()) == starts[2:]
    said = "".join((tmp_path / f"{host}.said").read_text() for host in "ac")  # either may be the first rank
    assert "Going on behind step 14" in said
    state = torch.load(tmp_path / "state", weights_only=True)
    assert differs(state, run_ranks(whole, 1)[0]) < TOLERANCE
    assert not (tmp_path / "a").exists() and not (tmp_path / "c").exists()


def _starts(lines: str) -> list[tuple[int, list[int]]]:
    """The number of ranks of each start, and behind which steps its batches were: a step has several of a rank."""
    steps = [tuple(map(int, line.split())) for line in dict.fromkeys(lines.splitlines())]
    return [(size, [step for _, step in of_start]) for size, of_start in groupby(steps, key=itemgetter(0))]


@pytest.mark.slow
def test_the_example_goes_on_when_a_rank_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += [str(Path(__file__).parents[2] / "examples" / "strategies.py"), "restarted"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 200
        while "Epoch 3" not in (tmp_path / "said").read_text():
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "said").read_text()[-2000:]
            time.sleep(0.1)
        ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(ranks.stdout.split()[-1]), signal.SIGKILL)
        assert process.wait(200) == 0
    finally:
        process.kill()
        process.wait()
    told = (tmp_path / "said").read_text()
    assert "Going on behind step" in told and float(told.split("accuracy")[-1].split()[0]) > 0.6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")  # it is that of the first start
def test_the_command_goes_on_by_itself(tmp_path: Path) -> None:
    (tmp_path / "last.yaml").write_text(
        f"class_path: {LastStep.__module__}.LastStep\ninit_args: {{folder: {tmp_path / 'memory'}}}\n"
    )
    own = ["fit", "--config=configs/grappa.yaml", *SMALL, "--trainer.max_steps=2", "--trainer.logger=false"]
    own += [f"--trainer.callbacks+={tmp_path / 'last.yaml'}", f"--trainer.default_root_dir={tmp_path}"]
    run_ranks(command, 2, *own)
    kept = (tmp_path / "memory" / "2.ckpt").stat().st_mtime_ns
    run_ranks(command, 2, *own)  # has nothing left to do
    assert (tmp_path / "memory" / "2.ckpt").stat().st_mtime_ns == kept


def whole(rank: int, world_size: int) -> State:
    return fit(world_size, [])
