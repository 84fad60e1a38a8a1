"""All ranks stop at one place, leave a checkpoint, and go on from it as if nothing had been."""

import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback

import lightning_gnn_dist as lgd
from lightning_gnn_dist.callbacks.preemption import FILE_NAME, PreemptionCheckpoint
from tests.cli.conftest import EXAMPLES, shipped
from tests.data_fitting import trainer
from tests.every_strategy import every_strategy
from tests.python_server import fast_python
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of

STRATEGIES = every_strategy(5)


class Preempt(Callback):
    """The scheduler takes one rank's machine away, before its batch number ``at``."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at, self.batches = rank, at, 0

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.batches += 1
        if trainer.global_rank == self.rank and self.batches == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(name: str, world_size: int, callbacks: list[Callback], **options: Any) -> tuple[pl.Trainer, SAGE]:
    pl.seed_everything(0, verbose=False)
    graph = lgd.communities(400, 4, num_features=8)
    parts, sampler = lgd.RandomPartitioner(), lgd.NeighborSampler([3, 3])
    data = lgd.PartitionedDataModule(
        graph, partitioner=parts, sampler=sampler, batch_size=16, evaluation=lgd.Evaluation(batch_size=10)
    )
    strategy = STRATEGIES[name]() if world_size > 1 else "auto"
    running, model = trainer(world_size, strategy, callbacks=callbacks, max_epochs=4), SAGE(8, 4)
    running.fit(model, data, **options)
    return running, model


def stop_and_go_on(rank: int, world_size: int, name: str, folder: Path) -> tuple[int, int, State, State]:
    _, whole = fit(name, world_size, [])
    at = 3 if name == "grappa" else 7
    callbacks: list[Callback] = [PreemptionCheckpoint(folder), Preempt(world_size - 1, at)]
    with pytest.raises(SystemExit):
        fit(name, world_size, callbacks)
    saved = (folder / FILE_NAME).stat().st_size  # every rank sees it as soon as it ends
    running, resumed = fit(name, world_size, [], ckpt_path=folder / FILE_NAME)
    assert saved > 0
    return running.global_step, running.current_epoch, state_of(whole), state_of(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_that_was_preempted_ends_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    for steps, epochs, whole, resumed in run_ranks(stop_and_go_on, 2, name, tmp_path):
        assert (steps, epochs) == ({"grappa": 4 * 2}.get(name, 20), 4)
        assert differs(whole, resumed) == 0.0


def test_one_process_leaves_a_checkpoint_too(tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    ((_, epochs, whole, resumed),) = run_ranks(stop_and_go_on, 1, "grappa", tmp_path)
    assert epochs == 4 and differs(whole, resumed) == 0.0


def fail(rank: int, world_size: int, folder: Path) -> list[str]:
    class Fail(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        fit("local_sgd", world_size, [PreemptionCheckpoint(folder), Fail()])
    return [path.name for path in folder.iterdir()]


def test_other_ends_leave_none(tmp_path: Path) -> None:
    assert run_ranks(fail, 2, tmp_path) == [[], []]


LAUNCHERS = {"lightning": [], "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]}
RUNS = [("lightning", "llcg"), ("torchrun", "local_sgd")]  # the ways to start; every strategy is stopped above
TOLD = "{class_path: tests.callbacks.test_preemption.Preempt, init_args: {rank: 1, at: 5}}"


@shipped
@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name"), RUNS)
def test_the_command_stops_with_a_checkpoint_and_goes_on(launcher: str, name: str, tmp_path: Path) -> None:
    config = [f"--config=configs/{name}.yaml", "--data.graph.init_args.num_nodes=2000", "--trainer.max_epochs=2"]
    quiet = ["--trainer.enable_progress_bar=false", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    fit_it = [fast_python(), *LAUNCHERS[launcher], "-m", "lightning_gnn_dist", "fit", *config, *quiet]
    how: dict[str, Any] = {"cwd": EXAMPLES, "capture_output": True, "text": True, "timeout": 600}
    how["env"] = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*fit_it, f"--trainer.callbacks={TOLD}"], **how)
    (checkpoint,) = tmp_path.rglob(FILE_NAME)
    assert torch.load(checkpoint, weights_only=False)["global_step"] > 0 and f"ckpt_path={checkpoint}" in done.stderr
    # torchrun says 1 whatever a rank ended with; Lightning's launcher may kill the first rank once another has left.
    assert done.returncode in {"lightning": (143, -signal.SIGKILL), "torchrun": (1,)}[launcher]
    assert subprocess.run([*fit_it, f"--ckpt_path={checkpoint}"], **how).returncode == 0
