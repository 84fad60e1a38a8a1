"""Tools that users of Lightning know do on several ranks what their page says."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from lightning_gnn_dist import (
    DiscrepancyProbe,
    EverySteps,
    GrappaStrategy,
    LocalSGDStrategy,
    PartitionedDataModule,
    RunReport,
)
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.pages import ROOT, blocks
from tests.ranks import run_ranks

STRATEGIES = {
    "rounds": lambda: LocalSGDStrategy(EverySteps(4), **PATIENCE),
    "grappa": lambda: GrappaStrategy(**PATIENCE),
}
SEARCH = """
import lightning.pytorch as pl
import torch
from lightning_gnn_dist import *
from tests.sage import SAGE as Net

graph, in_channels, out_channels = communities(600, 4, num_features=12), 12, 4


class SAGE(Net):
    def __init__(self, in_channels, out_channels, learning_rate):
        super().__init__(in_channels, out_channels)
        self.learning_rate = learning_rate

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


"""


@pytest.mark.slow
def test_a_search_runs_its_trials_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    (block,) = (block.code for block in blocks("python", "tools") if "import optuna" in block.code)
    code = SEARCH + block.replace("n_trials=20", "n_trials=2").replace("max_epochs=8", "max_epochs=2, logger=False")
    (tmp_path / "search.py").write_text(f"{code}    print('values', [trial.value for trial in study.trials])\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (values,) = re.findall(r"values \[(.*)\]", done.stdout)  # from one process
    assert all(0 < float(value) < 1 for value in values.split(",")) and values.count(",") == 1


def with_averages(rank: int, world_size: int, name: str) -> list[list[Tensor]]:
    """The weights with, and without, the mean over the last two of four epochs."""
    weights = []
    for callbacks in ([StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)], []):
        net, data = model(), PartitionedDataModule(small_graph(), batch_size=16)
        fit = trainer(world_size, STRATEGIES[name](), max_epochs=4, callbacks=callbacks, limit_val_batches=0)
        fit.fit(net, data)
        weights.append([each.detach().clone() for each in net.parameters()])
    return weights


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("name", [pytest.param("grappa", marks=pytest.mark.slow), "rounds"])
def test_averages_over_time_are_equal_on_all_ranks(name: str) -> None:
    (mean, last), (other_mean, _) = run_ranks(with_averages, 2, name)
    assert all(map(torch.equal, mean, other_mean))
    assert not any(map(torch.equal, mean, last))


def curves_of_tensorboard(logger: Any) -> dict[str, int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-not-found]

    read = EventAccumulator(logger.log_dir).Reload()
    return {name: len(read.Scalars(name)) for name in read.Tags()["scalars"]}


def curves_of_mlflow(logger: Any) -> dict[str, int]:
    client = logger.experiment
    names = client.get_run(logger.run_id).data.metrics
    return {name: len(client.get_metric_history(logger.run_id, name)) for name in names}


def curves_of_wandb(logger: Any) -> dict[str, int]:
    return {name: 1 for name in logger.experiment.summary.keys() if not name.startswith("_")}  # noqa: SIM118


LOGGERS: dict[str, tuple[Any, Any]] = {
    "tensorboard": (lambda folder: TensorBoardLogger(folder), curves_of_tensorboard),
    "mlflow": (lambda folder: MLFlowLogger(tracking_uri=f"sqlite:///{folder}/runs.db"), curves_of_mlflow),
    "wandb": (lambda folder: WandbLogger(save_dir=folder, offline=True), curves_of_wandb),
}


def logged(rank: int, world_size: int, folder: Path, tool: str, name: str) -> dict[str, int]:
    """How many points each curve of rank 0 has."""
    warnings.simplefilter("ignore")  # of the tools themselves
    make, curves = LOGGERS[tool]
    logger, data = make(folder), PartitionedDataModule(small_graph(), batch_size=16)
    callbacks = [DiscrepancyProbe(), RunReport()] if name == "rounds" else [RunReport()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 1}
    trainer(world_size, STRATEGIES[name](), **options).fit(model(), data)
    return curves(logger) if rank == 0 else {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the tools themselves
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("tool", LOGGERS)
def test_a_logger_has_the_names_of_the_page(tool: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(tool, reason=f"{tool} is not installed")
    if tool == "mlflow":
        LOGGERS[tool][0](tmp_path)  # makes the tables, which two ranks would make at once
    curves, nothing = run_ranks(logged, 2, tmp_path, tool, name)
    (table,) = re.findall(r"^\| name \| what \|\n(.*?)\n\n", (ROOT / "docs" / "tools.md").read_text(), re.M | re.S)
    told = {found for found in re.findall(r"`([\w/]+)`", table) if "/" in found}
    assert nothing == {} and {"accuracy", "comm/bytes_sent", "data/waited_seconds"} <= set(curves)
    extra = {found for found in curves if "/" in found} - told
    assert extra <= {"trainer/global_step"}, extra  # which belongs to Weights & Biases
    if name == "rounds":
        assert {"round/index", "round/seconds", "round/discrepancy"} <= set(curves)
    assert tool == "wandb" or curves["accuracy"] == 2


def profiled(rank: int, world_size: int, folder: Path, name: str) -> None:
    warnings.simplefilter("ignore")  # torch's profiler warns of its own future
    makers: tuple[Any, ...] = (SimpleProfiler, AdvancedProfiler, PyTorchProfiler)
    for number, make in enumerate(makers):
        options: dict[str, Any] = {"profiler": make(folder, str(number)), "max_epochs": 1, "limit_val_batches": 0}
        data = PartitionedDataModule(small_graph(), batch_size=16)
        trainer(world_size, STRATEGIES[name](), **options).fit(model(), data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("name", STRATEGIES)
def test_profilers_count_each_rank_by_itself(name: str, tmp_path: Path) -> None:
    run_ranks(profiled, 2, tmp_path, name)
    written = [path.name for path in tmp_path.glob("*.txt")]
    assert sorted(written) == [f"fit-{number}-{rank}.txt" for number in range(3) for rank in range(2)]
    assert "MeetingCallback" in (tmp_path / "fit-0-0.txt").read_text() or name == "grappa"


# Strategies on the workers of Ray Train, where Ray is installed: equal replicas, and a run that Ray starts again.


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
