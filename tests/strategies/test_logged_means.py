"""What ranks log with `sync_dist=True` is the mean over the seeds of all, however unequal their counts."""

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_gnn_dist import EveryPass, EverySeconds, GrappaStrategy, TMAStrategy
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

SIZES = [[3, 1, 5], [2, 2, 2], [4, 1, 1]]  # of the batches of each rank: 21 seeds, and 7 to a rank only on average
STAGES = ("train", "val", "test")


def values(rank: int, stage: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + STAGES.index(stage))
    # A rank may test on fewer batches than others.
    sizes = SIZES[rank][: 2 if stage == "test" and rank == 2 else 3]
    return [torch.rand(size, 1, generator=generator, dtype=torch.float64) for size in sizes]


def loader(rank: int, stage: str) -> DataLoader[Any]:
    return DataLoader(values(rank, stage), batch_size=None)  # type: ignore[arg-type]


def mean_by_hand(stage: str, world_size: int) -> float:
    batches = [batch for rank in range(world_size) for batch in values(rank, stage)]
    return sum(float(batch.sum()) for batch in batches) / sum(len(batch) for batch in batches)


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, dtype=torch.float64)
        self.means = nn.ModuleDict({f"of_{stage}": MeanMetric() for stage in STAGES})

    def log_means(self, stage: str, batch: Tensor) -> None:
        how: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": len(batch)}
        self.log(stage, batch.mean(), sync_dist=True, **how)
        self.log(f"{stage}_ones", torch.ones(()), sync_dist=True, **how)
        self.log(f"{stage}_sum", float(len(batch)), sync_dist=True, reduce_fx="sum", **how)
        metric = self.means[f"of_{stage}"]
        metric.update(batch.float())
        self.log(f"{stage}_metric", metric, **how)

    def training_step(self, batch: Tensor) -> Tensor:
        self.log_means("train", batch)
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.log_means("val", batch)

    def test_step(self, batch: Tensor) -> None:
        self.log_means("test", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def log(rank: int, world_size: int, strategy: Any) -> dict[str, float]:
    warnings.filterwarnings("ignore", ".*does not have many workers")
    running, module = trainer(world_size, strategy, max_epochs=1, use_distributed_sampler=False), Logs()
    running.fit(module, loader(rank, "train"), loader(rank, "val"))
    metrics = dict(running.callback_metrics)
    running.test(module, loader(rank, "test"), verbose=False)
    return {name: float(value) for name, value in (metrics | dict(running.callback_metrics)).items()}


@pytest.mark.parametrize(
    "strategy",
    [TMAStrategy(EveryPass(), weights="steps", **PATIENCE), GrappaStrategy(**PATIENCE)],
    ids=lambda strategy: strategy.strategy_name,
)
def test_a_logged_mean_is_that_of_all_seeds(strategy: Any) -> None:
    for metrics in run_ranks(log, 3, strategy):
        for stage in STAGES:
            mean = mean_by_hand(stage, 3)
            assert metrics[stage] == pytest.approx(mean, rel=1e-14)
            assert metrics[f"{stage}_ones"] == 1.0
            assert metrics[f"{stage}_sum"] == sum(len(b) for rank in range(3) for b in values(rank, stage))
            assert metrics[f"{stage}_metric"] == pytest.approx(mean, rel=1e-6)


def test_ranks_of_unequal_speed_log_the_mean_of_what_each_of_them_saw() -> None:
    for metrics in run_ranks(log, 3, TMAStrategy(EverySeconds(0.1), **PATIENCE)):
        assert metrics["train_ones"] == 1.0
        assert metrics["train"] == pytest.approx(metrics["train_metric"], rel=1e-6)
