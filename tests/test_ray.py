"""Strategies on the workers of Ray Train, where Ray is installed: equal replicas, and a run that Ray starts again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.pages import ROOT

TRAIN = """
import os
import sys

import lightning.pytorch as pl
import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_checkpoint
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

FOLDER = sys.argv[1]


class Stumble(pl.Callback):
    # The first time, the second epoch ends with an error on rank 1.
    def on_train_epoch_start(self, trainer, pl_module):
        mark = os.path.join(FOLDER, "stumbled")
        if trainer.current_epoch == 2 and trainer.global_rank == 1 and not os.path.exists(mark):
            open(mark, "w").close()
            raise RuntimeError("stumbled")


def fit(base, options, name, callbacks=(), path=None):
    from lightning_gnn_dist import NeighborSampler, PartitionedDataModule, communities
    from tests.sage import SAGE

    strategy = type("OnRay", (base, RayDDPStrategy), {})(**options)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        callbacks=list(callbacks),
        max_epochs=4,
        **quiet,
    )
    data = PartitionedDataModule(communities(600, 4, num_features=8), sampler=NeighborSampler([4, 4]), batch_size=32)
    pl.seed_everything(0)
    model = SAGE(8, 4)
    prepare_trainer(trainer).fit(model, data, ckpt_path=path)
    assert trainer.world_size == 2
    torch.save(model.state_dict(), os.path.join(FOLDER, f"{name}-{trainer.global_rank}.pt"))


def by_strategy(config):
    from lightning_gnn_dist import EverySteps, GrappaStrategy, LLCGStrategy, LocalSGDStrategy, TMAStrategy

    fit(GrappaStrategy, {}, "grappa")
    for base in (LocalSGDStrategy, LLCGStrategy, TMAStrategy):
        fit(base, {"clock": EverySteps(3)}, base.__name__)


def started_again(config):
    from lightning_gnn_dist import EverySteps, LLCGStrategy

    checkpoint, report = get_checkpoint(), RayTrainReportCallback()
    callbacks = [report, Stumble()]
    if checkpoint is None:
        fit(LLCGStrategy, {"clock": EverySteps(3)}, "again", callbacks)
    else:
        with checkpoint.as_directory() as folder:
            fit(LLCGStrategy, {"clock": EverySteps(3)}, "again", callbacks, f"{folder}/{report.CHECKPOINT_NAME}")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    workers = ScalingConfig(num_workers=2)
    for train in (by_strategy, started_again):
        run = RunConfig(storage_path=FOLDER, name=train.__name__, failure_config=FailureConfig(max_failures=1))
        result = TorchTrainer(train, scaling_config=workers, run_config=run).fit()
    print("reported", result.metrics["epoch"], result.metrics["accuracy"] > 0)
"""


@pytest.mark.slow
def test_replicas_are_equal_and_a_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
    (tmp_path / "train.py").write_text(TRAIN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "train.py", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "reported 3 True" in done.stdout
    assert (tmp_path / "stumbled").is_file()
    weights = {path.stem: torch.load(path) for path in tmp_path.glob("*-[01].pt")}
    assert len(weights) == 10
    for name in ("grappa", "LocalSGDStrategy", "LLCGStrategy", "TMAStrategy", "again"):
        assert same(weights[f"{name}-0"], weights[f"{name}-1"]), name
    assert same(weights["again-0"], weights["LLCGStrategy-0"])  # of a run that never stopped


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
