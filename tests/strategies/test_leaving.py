"""Ranks leave together, whatever makes one of them want to leave."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist import EverySteps, NeighborSampler
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, fit, local_sgd
from tests.strategies.weighted_fitting import Model, data_of, grappa, trainer_of

STEPS = 4  # of an epoch


class Stops(pl.Callback):
    """Sets ``should_stop`` in one hook, on some ranks."""

    def __init__(self, hook: str, ranks: list[int], *, epoch: int = 1, step: int = STEPS + 1) -> None:
        self.hook, self.ranks, self.epoch, self.step = hook, ranks, epoch, step
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *args: Any) -> None:
        by_step = self.hook == "on_train_batch_end"
        here = trainer.global_step == self.step if by_step else trainer.current_epoch == self.epoch
        if here and trainer.global_rank in self.ranks and not trainer.sanity_checking:
            trainer.should_stop = True


def settings(source: Any = None) -> Any:
    return data_of(source, batch_size=30, sampler=NeighborSampler([2, 2]))


def stopped(rank: int, world_size: int, cases: dict[str, tuple[Stops, dict[str, Any]]]) -> dict[str, tuple[int, int]]:
    """After how many steps and epochs each fit ends."""
    ends = {}
    for name, (stops, options) in cases.items():
        trainer = trainer_of(world_size, grappa(), callbacks=[stops], **({"max_epochs": 4} | options))
        trainer.fit(Model(), settings())
        ends[name] = trainer.global_step, trainer.current_epoch
    return ends


VALIDATES = {"limit_val_batches": 1.0}
CASES: dict[str, tuple[Stops, dict[str, Any]]] = {
    "in an epoch": (Stops("on_train_batch_end", [1]), {}),
    "with validation": (Stops("on_train_batch_end", [1]), VALIDATES),
    "on all": (Stops("on_train_batch_end", [0, 1]), VALIDATES),
    "at the last step": (Stops("on_train_batch_end", [1], step=STEPS), {}),
    "at the start": (Stops("on_train_start", [1], epoch=0), {}),
    "at an epoch's start": (Stops("on_train_epoch_start", [1]), {}),
    "at an epoch's end": (Stops("on_train_epoch_end", [1]), {}),
    "after a validation": (Stops("on_validation_end", [1]), VALIDATES | {"val_check_interval": 1}),
    "too early": (Stops("on_train_batch_end", [1]), {"min_epochs": 3}),
}


def test_a_stop_on_one_rank_ends_all_after_the_same_step() -> None:
    first, second = run_ranks(stopped, 2, CASES)
    assert first == second
    assert {name: steps for name, (steps, _) in first.items()} == {
        "in an epoch": STEPS + 2,
        "with validation": STEPS + 2,
        "on all": STEPS + 2,
        "at the last step": STEPS,
        "at the start": 0,
        "at an epoch's start": STEPS + 1,
        "at an epoch's end": 2 * STEPS,
        "after a validation": STEPS + 1,
        "too early": 3 * STEPS,
    }


class Leaves(Model):
    """Leaves an epoch early, or fails, on some ranks."""

    def __init__(self, how: str, ranks: list[int]) -> None:
        super().__init__()
        self.how, self.ranks = how, ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self._is_due("skip", batch_idx) else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        if self._is_due("raise", batch_idx):
            raise ZeroDivisionError("of this rank alone")
        if self._is_due("end", batch_idx):
            raise StopIteration
        return super().training_step(batch)

    def _is_due(self, how: str, batch_idx: int) -> bool:
        return how == self.how and batch_idx == 2 and self.global_rank in self.ranks


def left(rank: int, world_size: int, how: str, ranks: list[int], folder: str) -> int:
    warnings.filterwarnings("ignore", "This checkpoint is written after an exception")
    saves = ModelCheckpoint(folder, filename=f"of-{rank}", save_on_exception=True, enable_version_counter=False)
    trainer = trainer_of(world_size, grappa(), callbacks=[saves], enable_checkpointing=True)
    trainer.fit(Leaves(how, ranks), settings())
    return trainer.global_step


def by_clock(rank: int, world_size: int) -> None:
    trainer_of(world_size, grappa(), val_check_interval="00:00:00:01").fit(Model(), settings())


def test_validation_by_the_clock_of_each_rank_is_refused() -> None:
    with pytest.raises(RankError, match="validate by its own clock") as error:
        run_ranks(by_clock, 2)
    assert sorted(error.value.failures) == [0, 1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("skip", "returned -1.* on 1 of 2 ranks"),
        ("end", "StopIteration was raised while a batch was used"),
        ("raise", "of this rank alone"),
    ],
)
def test_what_one_rank_does_alone_ends_all_with_its_reason(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(left, 2, how, [1], str(tmp_path), grace=1)  # a hang ends with another message


def stop_alone(rank: int, world_size: int) -> tuple[int, int]:
    class StopHere(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            if rank == 1 and self.global_step == 5:
                self.trainer.should_stop = True

    trainer = fit(rank, local_sgd(EverySteps(4)), StopHere(), devices=world_size, max_epochs=9, validate=True)
    return trainer.current_epoch, trainer.global_step


def test_one_rank_that_stops_in_mid_round_stops_all_at_its_end() -> None:
    assert run_ranks(stop_alone, 2) == [(2, 8), (2, 8)]


def preempted_at_the_end(rank: int, world_size: int, strategy: Any) -> Any:
    class Preempt(Net):
        def on_train_end(self) -> None:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SIGTERMException) as left:
        fit(rank, strategy, Preempt(), devices=world_size)
    return left.value.code


@pytest.mark.parametrize("strategy", [local_sgd(EverySteps(4)), grappa()], ids=["rounds", "gradients"])
def test_sigterm_after_the_last_vote_ends_all_after_the_fit(strategy: Any) -> None:
    assert run_ranks(preempted_at_the_end, 2, strategy) == [128 + signal.SIGTERM] * 2


def skipped_epoch(rank: int, world_size: int) -> None:
    class Skip(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if rank == 1 and batch_idx == 2 else None

    fit(rank, local_sgd(EverySteps(4)), Skip(), devices=world_size)


def test_an_epoch_that_is_left_without_a_meeting_is_an_error() -> None:
    with pytest.raises(RankError, match="ended without a meeting"):
        run_ranks(skipped_epoch, 2, grace=1)
