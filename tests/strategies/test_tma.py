"""Laws of time-based rounds: unequal steps, equal replicas, and nothing in between."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gnn_dist import EverySeconds, Launch, TMAStrategy
from lightning_gnn_dist.rounds import clock
from lightning_gnn_dist.rounds.clock import RoundProgress
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, before_and_after, differs, fit, same_start, state_of

PATIENCE = Launch(timeout=timedelta(seconds=120))


class StepsOfRank(NamedTuple):
    """A clock that ends this rank's rounds after a number of steps of its own: unequal, and the same in every run."""

    steps: int

    def is_over(self, progress: RoundProgress) -> bool:
        return progress.local_steps >= self.steps + progress.round_idx


def unequal(rank: int) -> StepsOfRank:
    return StepsOfRank((7, 2, 4)[rank])


def tma(clock: Any, **options: Any) -> TMAStrategy:
    return TMAStrategy(clock, launch=PATIENCE, **options)


# Ranks of unequal speed.


class Round(NamedTuple):
    steps: int
    lasted: float


class Slow(Net):
    """On the clock that ends its rounds, every step takes as long as it is told, and nothing else takes any time."""

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self.seconds, self.now = seconds, 0.0
        self.rounds: list[Round] = []
        clock.time = SimpleNamespace(monotonic=lambda: self.now)  # type: ignore[attr-defined]

    def on_train_epoch_start(self) -> None:
        self.steps, self.start = 0, self.now

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.trainer.training:
            self.steps += 1
            self.now += self.seconds
        return super().training_step(batch)

    def on_train_batch_end(self, *args: Any) -> None:  # after the companion: the meeting is over
        if self.trainer.is_last_batch:
            self.rounds.append(Round(self.steps, self.now - self.start))


def run_at_own_speed(
    rank: int, world_size: int, seconds: float, steps: tuple[float, ...]
) -> tuple[list[Round], list[State], int]:
    module = Slow(steps[rank])
    trainer = fit(rank, tma(EverySeconds(seconds)), module, devices=world_size, max_epochs=3, validate=True)
    return module.rounds, [*module.validated, state_of(module)], trainer.global_step


def test_ranks_of_unequal_speed_all_work_all_the_time() -> None:
    results = run_ranks(run_at_own_speed, 3, 1.0, (1 / 64, 1 / 16, 3 / 16))
    for states in zip(*(states for _, states, _ in results), strict=True):
        assert differs(states[0], states[1]) == differs(states[0], states[2]) == 0.0
    expected = [Round(64, 1.0), Round(16, 1.0), Round(6, 1.125)]  # to the end of the step that gets there
    assert [lengths for lengths, _, _ in results] == [[each] * 3 for each in expected]
    assert [steps for _, _, steps in results] == [3 * 64] * 3


# Unequal steps, the same in every run.


def replicas(rank: int, world_size: int, accumulate: int) -> tuple[list[State], int, list[int]]:
    module = same_start(dropout=0.5, batch_norm=True, optimizer="Adam")
    torch.manual_seed(rank)
    strategy = tma(unequal(rank))
    trainer = fit(rank, strategy, module, devices=world_size, validate=True, accumulate_grad_batches=accumulate)
    return [*module.validated, state_of(module)], trainer.global_step, strategy.state.batches_of_ranks


def test_replicas_are_equal_after_unequal_steps() -> None:
    accumulate = 3
    results = run_ranks(replicas, 3, accumulate)
    for states in zip(*(states for states, _, _ in results), strict=True):
        assert differs(states[0], states[1]) == differs(states[0], states[2]) == 0.0
    for _, global_step, counts in results:
        assert global_step == 7 + 8 + 9 and counts == [9 * accumulate, 4 * accumulate, 6 * accumulate]


def weighted(rank: int, world_size: int, options: dict[str, Any]) -> tuple[State, State]:
    return before_and_after(rank, world_size, TMAStrategy, unequal(rank), **options)


def test_weights_by_the_steps_done() -> None:
    first, second, third = run_ranks(weighted, 3, {"weights": "steps"})
    expected = {name: (7 * first[0][name] + 2 * second[0][name] + 4 * third[0][name]) / 13 for name in first[0]}
    assert differs(first[0], second[0]) > 0.01
    assert differs(first[1], expected) < 1e-6


def test_nobody_learns_from_the_parts_of_failed_ranks() -> None:
    first, second, third = run_ranks(weighted, 3, {"failed_ranks": [1], "drift": None})
    expected = {name: (first[0][name] + third[0][name]) / 2 for name in first[0]}
    assert differs(first[1], expected) < 1e-6 and differs(first[1], second[1]) == 0.0


def outlive(rank: int, world_size: int, folder: str) -> tuple[list[int], str, float]:
    torch.manual_seed(0)
    strategy, saver = tma(unequal(rank), failed_ranks=[0], weights="steps"), ModelCheckpoint(folder, save_top_k=-1)
    options: dict[str, Any] = {"validate": True, "callbacks": [saver], "enable_checkpointing": True}
    trainer = fit(rank, strategy, Net(), devices=world_size, **options)
    return strategy.state.batches_of_ranks, saver.best_model_path, float(trainer.callback_metrics["val_loss"])


def test_a_run_with_failed_ranks_validates_and_saves_as_any_other(tmp_path: Path) -> None:
    results = run_ranks(outlive, 3, str(tmp_path))
    assert all(result == results[0] for result in results) and results[0][0] == [1, 4, 6]
    assert len(list(tmp_path.glob("*.ckpt"))) == 3


# What Lightning makes of it: files, stops, schedules.


def stopped_and_resumed(rank: int, world_size: int, folder: str) -> list[tuple[State, list[int], str]]:
    """What a fit of five rounds leaves, and one that went on after two."""
    found = []
    for name, epochs, path in (
        ("whole", 5, None),
        ("half", 2, None),
        ("half", 5, f"{folder}/half/epoch=1-step=15.ckpt"),
    ):
        module = same_start(dropout=0.5, batch_norm=True, optimizer="Adam")
        torch.manual_seed(10 + rank)
        saver = ModelCheckpoint(f"{folder}/{name}", filename="{epoch}-{step}", save_top_k=-1, monitor="val_loss")
        strategy = tma(unequal(rank), buffers="local", weights="steps")
        options: dict[str, Any] = {"validate": True, "callbacks": [saver], "enable_checkpointing": True}
        trainer = fit(rank, strategy, module, devices=world_size, max_epochs=epochs, ckpt_path=path, **options)
        assert epochs == 2 or trainer.global_step == 7 + 8 + 9 + 10 + 11
        found.append((state_of(module), strategy.state.batches_of_ranks, saver.best_model_path))
    return [found[0], found[2]]


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    results = run_ranks(stopped_and_resumed, 3, str(tmp_path))
    for (whole, *_), (resumed, counts, _) in results:
        assert differs(whole, resumed) == 0.0 and counts == [11, 6, 8]
    (best,) = {best for (*_, best), _ in results}
    assert Path(best).is_file()


def scheduled(rank: int, world_size: int, interval: str) -> list[float]:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.008)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": interval}]

    trainer = fit(rank, tma(unequal(rank)), Scheduled(), devices=world_size)
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


def test_schedules_go_by_rounds() -> None:
    assert run_ranks(scheduled, 2, "epoch") == [[0.001], [0.001]]
    with pytest.raises(RankError, match=r'would give every rank another learning rate.*"interval": "epoch"'):
        run_ranks(scheduled, 2, "step")


# Nothing in between.


def log_in_round(rank: int, world_size: int, how: str) -> None:
    class Chatty(Net):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = super().training_step(batch)
            if how == "gather":
                self.all_gather(loss)
            else:
                self.log("loss", loss, on_step=how == "step", on_epoch=how == "epoch", sync_dist=True)
            return loss

    fit(rank, tma(unequal(rank)), Chatty(), devices=world_size, max_epochs=2)


def test_what_exchanges_in_a_round_is_refused() -> None:
    run_ranks(log_in_round, 2, "epoch")
    with pytest.raises(RankError, match=r"on_step=True, sync_dist=True\) exchanges inside a round: with TMAStrategy"):
        run_ranks(log_in_round, 2, "step")
    with pytest.raises(RankError, match=r"all_gather\(\) exchanges inside a round"):
        run_ranks(log_in_round, 2, "gather")


def test_a_rank_is_left_to_learn() -> None:
    with pytest.raises(ValueError, match=r"failed_ranks=\[0\] must name some of the 1 ranks, and leave one"):
        fit(0, tma(EverySeconds(1), failed_ranks=[0]), Net(), devices=1)
