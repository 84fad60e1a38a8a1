"""Ranks of local SGD leave together: rounds, fits and runs end on all of them after the same step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist import EveryPass, EverySteps
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, batches, fit
from tests.strategies.round_fitting import local_sgd
from tests.strategies.weighted_fitting import grappa


def stop_alone(rank: int, world_size: int, where: str) -> tuple[int, int]:
    class StopHere(Net):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            if where == "step" and rank == 1 and self.global_step == 5:
                self.trainer.should_stop = True
            return super().training_step(batch)

        def on_train_batch_end(self, *args: Any) -> None:
            if where == "hook" and rank == 1 and self.global_step == 5:
                self.trainer.should_stop = True

    trainer = fit(rank, local_sgd(EverySteps(4)), StopHere(), devices=world_size, max_epochs=9, validate=True)
    return trainer.current_epoch, trainer.global_step


@pytest.mark.parametrize("where", ["step", "hook"])
def test_one_rank_that_stops_in_mid_round_stops_all_at_its_end(where: str) -> None:
    assert run_ranks(stop_alone, 2, where) == [(2, 8), (2, 8)]


def stop_early(rank: int, world_size: int) -> int:
    stopper = EarlyStopping("val_loss", patience=1, min_delta=1e9)
    return fit(
        rank, local_sgd(EverySteps(2)), Net(), devices=world_size, max_epochs=9, validate=True, callbacks=[stopper]
    ).current_epoch


def test_early_stopping_stops_all_ranks_after_the_same_round() -> None:
    assert run_ranks(stop_early, 2) == [2, 2]


def preempted(rank: int, world_size: int, folder: str) -> tuple[int, Any]:
    class Preempt(Net):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            if rank == 1 and self.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch)

    module = Preempt()
    saver = ModelCheckpoint(folder, filename="{epoch}", save_on_exception=True)
    strategy = local_sgd(EverySteps(4))
    try:
        fit(rank, strategy, module, devices=world_size, max_epochs=9, callbacks=[saver], enable_checkpointing=True)
    except SystemExit as left:
        return module.trainer.global_step, left.code
    return module.trainer.global_step, None


def test_sigterm_on_one_rank_ends_all_at_the_meeting(tmp_path: Path) -> None:
    results = run_ranks(preempted, 2, str(tmp_path))
    assert results == [(8, 128 + signal.SIGTERM)] * 2
    assert list(tmp_path.glob("*.ckpt"))


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


def fit_twice_then_test(rank: int, world_size: int) -> tuple[int, list[float]]:
    class Tested(Net):
        def test_step(self, batch: list[Tensor]) -> None:
            self.log("test_loss", self.training_step(batch), sync_dist=True, batch_size=5)

    module, strategy = Tested(), local_sgd(EverySteps(3))
    trainer = fit(rank, strategy, module, devices=world_size)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, batches(rank))
    companions = [callback for callback in trainer.callbacks if type(callback).__name__ == "MeetingCallback"]
    assert len(companions) == 1
    loss = trainer.test(module, batches(rank), verbose=False)[0]["test_loss"]
    return trainer.global_step, [loss]


def test_one_trainer_fits_twice_and_tests() -> None:
    first, second = run_ranks(fit_twice_then_test, 2)
    assert first == second and first[0] == 15


def skipped_epoch(rank: int, world_size: int) -> None:
    class Skip(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if rank == 1 and batch_idx == 2 else None

    fit(rank, local_sgd(EverySteps(4)), Skip(), devices=world_size)


def test_an_epoch_that_is_left_without_a_meeting_is_an_error() -> None:
    with pytest.raises(RankError, match="ended without a meeting"):
        run_ranks(skipped_epoch, 2, grace=1)


def handlers(rank: int, world_size: int) -> bool:
    trainer = fit(rank, local_sgd(), Net(), devices=world_size)
    loop = trainer.fit_loop.epoch_loop
    return "_sigterm_notifier_fn" in vars(trainer._signal_connector) or "_broadcast_sigterm_tensor" in vars(loop)


def test_after_a_fit_sigterm_is_lightnings_again() -> None:
    assert run_ranks(handlers, 2) == [False, False]


def passes(rank: int, world_size: int, clock: Any, accumulate: int) -> int:
    return fit(rank, local_sgd(clock), Net(), devices=world_size, accumulate_grad_batches=accumulate).global_step


def test_a_pass_is_one_walk_over_the_loader() -> None:
    assert run_ranks(passes, 2, None, 1) == [18, 18]
    assert run_ranks(passes, 2, EveryPass(2), 4) == [3 * 2 * 2] * 2
