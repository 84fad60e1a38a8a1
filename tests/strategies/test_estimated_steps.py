"""`trainer.estimated_stepping_batches` is the number of steps that a rank takes: schedules by steps come out right."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_gnn_dist import EveryPass, EverySeconds, EverySteps, GrappaStrategy, LocalSGDStrategy, TMAStrategy
from lightning_gnn_dist.rounds.clock import RoundProgress
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, fit

BATCHES = 6  # in a pass of `fitting.batches`


class Scheduled(Net):
    """Asks how many steps there will be, and records the learning rate of each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_end(self) -> None:
        self.last_rate = self.trainer.optimizers[0].param_groups[0]["lr"]


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = 0

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.layers(batch[0]), batch[1]))
            optimizer.step()
        self.steps += 1

    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[-1])]


CASES: list[tuple[Any, dict[str, Any], int]] = [
    (EverySteps(4), {}, 3 * 4),
    (EverySteps(2, growth=1.6, limit=5), {"max_epochs": 5}, 2 + 4 + 5 + 5 + 5),
    (EverySteps(3), {"accumulate_grad_batches": 2}, 3 * 3),
    (EveryPass(2), {}, 3 * 2 * BATCHES),
    (EveryPass(), {"accumulate_grad_batches": 4}, 3 * 2),
    (EverySteps(2), {"callbacks": {0: 1, 1: 3}}, 3 * 2),
    (EveryPass(), {"callbacks": {0: 1, 1: 3}}, BATCHES + 2 + 2),
    (EverySteps(9), {"fast_dev_run": 4, "accumulate_grad_batches": 2}, 2),
]


def decay(rank: int, world_size: int) -> list[tuple[int, int, list[float], float, int]]:
    found = []
    for clock, options, _ in CASES:
        if "callbacks" in options:
            options = options | {"callbacks": [GradientAccumulationScheduler(dict(options["callbacks"]))]}
        module = Scheduled()
        trainer = fit(rank, LocalSGDStrategy(clock, **PATIENCE), module, devices=world_size, **options)
        after = trainer.estimated_stepping_batches
        found.append((module.total, after, module.rates, module.last_rate, trainer.global_step))
    return found


def test_a_linear_decay_ends_at_nothing_with_the_last_step() -> None:
    for outcomes in run_ranks(decay, 2):
        for (clock, _, total), (found, after, rates, last, steps) in zip(CASES, outcomes, strict=True):
            assert found == after == steps == total, clock
            assert rates == pytest.approx([0.1 * (1 - step / total) for step in range(total)]), clock
            assert last == pytest.approx(0.0, abs=1e-12)


def two_optimizers(rank: int, world_size: int) -> tuple[int, int]:
    module = TwoOptimizers()
    fit(rank, LocalSGDStrategy(EverySteps(4), **PATIENCE), module, devices=world_size)
    return module.total, module.steps


def test_optimizers_are_not_added_up() -> None:
    assert run_ranks(two_optimizers, 2) == [(12, 12)] * 2


class Own:
    def is_over(self, progress: RoundProgress) -> bool:
        return progress.local_steps >= 3


def ask_in_vain(rank: int, world_size: int) -> tuple[list[str], float]:
    found = []
    for strategy in (TMAStrategy(EverySeconds(30), **PATIENCE), LocalSGDStrategy(Own(), **PATIENCE)):
        with pytest.raises(ValueError, match="estimated_stepping_batches") as caught:
            fit(rank, strategy, Scheduled(), devices=world_size)
        found.append(str(caught.value))
    endless = Endless()
    fit(rank, LocalSGDStrategy(Own(), **PATIENCE), endless, devices=world_size, max_epochs=-1)
    return found, endless.total


class Endless(Net):
    def configure_optimizers(self) -> Any:
        self.total = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True


def test_what_nobody_can_know_is_refused_with_the_way_out() -> None:
    for messages, endless in run_ranks(ask_in_vain, 2):
        assert messages[0].startswith(
            "trainer.estimated_stepping_batches cannot be known with EverySeconds(seconds=30)"
        )
        assert all('"interval": "epoch"' in message and "EverySteps(16)" in message for message in messages)
        assert endless == math.inf  # as Lightning says of a fit without end


def test_passes_of_ranks_that_come_and_go_have_no_known_length() -> None:
    strategy = TMAStrategy(EveryPass())
    strategy.peers.may_change = True
    with pytest.raises(ValueError, match=r"EveryPass\(passes=1\): parts, and so passes, change with the ranks"):
        strategy.estimated_steps()


# What ranks log with `sync_dist=True` is the mean over the seeds of all, however unequal their counts.


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
