"""Replicas of Grappa: equal wherever a run ends, and the same when it was stopped and resumed."""

import os
import signal
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnn_dist import EverySteps, Holding, LocalSGDStrategy, NeighborSampler, Rotate
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.weighted_fitting import Model, data_of, grappa, trainer_of


def validated(rank: int, world_size: int, buffers: str) -> list[State]:
    module = Model(batch_norm=True, dropout=0.5)
    torch.manual_seed(rank)
    options = {"limit_val_batches": 1.0, "val_check_interval": 2}
    data = data_of(batch_size=20, sampler=NeighborSampler([4, 4]))
    trainer_of(world_size, grappa(buffers=buffers), **options).fit(module, data)
    return module.validated


def test_replicas_are_equal_at_every_validation() -> None:
    first, second = run_ranks(validated, 2, "average")
    assert len(first) == 4
    assert all(differs(a, b) == 0.0 for a, b in zip(first, second, strict=True))


def ended_early(rank: int, world_size: int, options: dict[str, Any]) -> tuple[State, set[str]]:
    """A fit that ends in the middle of an epoch: its weights, and the names of its figures."""
    module = Model(batch_norm=True)
    strategy, data = grappa(), data_of(batch_size=20, sampler=NeighborSampler([4, 4]))
    if options.pop("leave", False):
        module.on_train_batch_start = lambda batch, idx: -1 if idx == 3 else None  # type: ignore[assignment]
    trainer = trainer_of(world_size, strategy, **options)
    trainer.fit(module, data)
    return state_of(module), set(trainer.logged_metrics)


@pytest.mark.parametrize("options", [{"max_steps": 3, "max_epochs": -1}, {"leave": True}], ids=["max_steps", "a hook"])
def test_replicas_are_equal_where_a_run_ends_in_the_middle_of_an_epoch(options: dict[str, Any]) -> None:
    (first, figures), (second, _) = run_ranks(ended_early, 2, options)
    assert differs(first, second) == 0.0
    assert {"comm/bytes_sent", "data/waited_seconds"} <= figures


def test_local_buffers_stay_local() -> None:
    first, second = run_ranks(validated, 2, "local")
    assert differs(first[-1], second[-1]) > 0
    parameters = [{k: v for k, v in state.items() if "norm" not in k} for state in (first[-1], second[-1])]
    assert differs(*parameters) == 0.0


def stopped_and_resumed(
    rank: int, world_size: int, folder: str, stop_at: int, limits: dict[str, Any]
) -> tuple[State, State, list[Any]]:
    """Six epochs in super-epochs of two; a second run goes on from the checkpoint of a step in the middle."""
    settings = {"holding": Holding(Rotate()), "batch_size": 30, "sampler": NeighborSampler([4, 4])}
    states, seen = [], []
    for ckpt_path in (None, f"{folder}/step={stop_at}.ckpt"):
        module = Model(dropout=0.5, batch_norm=True)
        torch.manual_seed(rank)
        if ckpt_path is not None:
            torch.rand(rank + 1)  # another state than the first run had
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=stop_at, save_top_k=-1)
        options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 6} | limits
        warnings.filterwarnings("ignore", "Checkpoint directory")
        trainer = trainer_of(world_size, grappa(), **options)
        trainer.fit(module, data_of(**settings), ckpt_path=ckpt_path)
        states.append(state_of(module))
        seen.append([ids.tolist() for ids, _ in module.seen])
    return states[0], states[1], seen


@pytest.mark.parametrize(
    ("stop_at", "limits"),
    [
        pytest.param(8, {}, marks=pytest.mark.slow),
        (5, {}),
        pytest.param(4, {"limit_train_batches": 2}, marks=pytest.mark.slow),
    ],
    ids=["between epochs", "in an epoch", "at the end of a shortened epoch"],
)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop_at: int, limits: dict[str, Any]) -> None:
    for whole, resumed, (all_seen, later_seen) in run_ranks(stopped_and_resumed, 3, str(tmp_path), stop_at, limits):
        assert later_seen == all_seen[stop_at:]
        assert differs(whole, resumed) == 0.0  # DDP deals gradients out before the first step, in one order for good


def saved(rank: int, world_size: int, folder: str) -> dict[str, tuple[State, State]]:
    """The buffers of checkpoints that are written in an epoch, and those of this rank then."""
    own: dict[str, State] = {}

    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                before = state_of(module)
                trainer.save_checkpoint(f"{folder}/by_hand.ckpt")
                trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
                assert differs(before, state_of(module)) == 0.0  # the run goes on as if nothing had been
                own["norm"] = {name: value.float() for name, value in before.items() if "running" in name}

    saves = [
        ModelCheckpoint(folder, filename="full", every_n_train_steps=3, save_top_k=-1),
        ModelCheckpoint(folder, filename="time-{step}", train_time_interval=timedelta(0), save_top_k=-1),
    ]
    trainer = trainer_of(world_size, grappa(), callbacks=[Keeps(), *saves], enable_checkpointing=True, max_epochs=1)
    trainer.fit(Model(batch_norm=True), data_of(batch_size=20, sampler=NeighborSampler([4, 4])))
    files = {"by_hand": "by_hand", "full": "full", "weights": "weights", "time": "time-step=3"}
    states = {name: torch.load(f"{folder}/{file}.ckpt", weights_only=True) for name, file in files.items()}
    return {name: (state["state_dict"], own["norm"]) for name, state in states.items()}


def test_a_checkpoint_in_an_epoch_holds_the_mean_of_buffers(tmp_path: Path) -> None:
    first, second = run_ranks(saved, 2, str(tmp_path))
    for (state, own), (_, other) in zip(first.values(), second.values(), strict=True):
        mean = {name: (own[name] + other[name]) / 2 for name in own}
        assert differs(own, other) > 0.01
        assert differs({name: state[name] for name in mean}, mean) < 1e-6


class Fails(Model):
    def training_step(self, batch: Any) -> Any:
        if len(self.seen) == 3 and self.global_rank == 0:
            raise ZeroDivisionError("on one rank")
        return super().training_step(batch)


def fit_from(rank: int, world_size: int, folder: str, ckpt_path: str | None) -> None:
    for message in ("This checkpoint is written after an exception", "Checkpoint directory"):
        warnings.filterwarnings("ignore", message)
    saves = ModelCheckpoint(folder, filename="last", save_on_exception=True, enable_version_counter=False)
    trainer = trainer_of(world_size, grappa(), callbacks=[saves], enable_checkpointing=True)
    module = Fails(batch_norm=True) if ckpt_path is None else Model(batch_norm=True)
    trainer.fit(module, data_of(batch_size=20, sampler=NeighborSampler([4, 4])), ckpt_path=ckpt_path)


def test_a_checkpoint_of_one_rank_after_an_exception_has_weights_and_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="on one rank"):
        run_ranks(fit_from, 2, str(tmp_path), None)
    (path,) = tmp_path.glob("*.ckpt")
    assert torch.load(path, weights_only=True)["state_dict"].keys() == Model(batch_norm=True).state_dict().keys()
    with pytest.raises(RankError, match="after an exception, by one rank"):
        run_ranks(fit_from, 2, str(tmp_path), str(path))


class Slow(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.seen) == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(rank: int, world_size: int) -> int:
    module = Slow()
    trainer = trainer_of(world_size, grappa(), max_epochs=50)
    with pytest.raises(SystemExit):
        trainer.fit(module, data_of(batch_size=10, sampler=NeighborSampler([4, 4])))
    return len(module.seen)


def test_sigterm_on_one_rank_ends_all_after_the_same_step() -> None:
    first, second = run_ranks(terminated, 2)
    assert first == second == 4


def resumed_with_another_buffer(rank: int, world_size: int, folder: str) -> list[float]:
    for path in (None, f"{folder}/one.ckpt"):
        module = Model(batch_norm=True)
        if path is not None:
            module.register_buffer("added", torch.full((2,), 7.0), persistent=False)
        trainer = trainer_of(world_size, grappa(), max_epochs=1 if path is None else 2)
        trainer.fit(module, data_of(), ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
    return module.added.tolist()  # type: ignore[no-any-return]


def test_a_buffer_that_is_new_since_the_checkpoint_keeps_its_value(tmp_path: Path) -> None:
    assert run_ranks(resumed_with_another_buffer, 2, str(tmp_path)) == [[7.0, 7.0]] * 2


def resume_from_rounds(rank: int, world_size: int, folder: str) -> None:
    path = f"{folder}/rounds.ckpt"
    trainer = trainer_of(world_size, LocalSGDStrategy(EverySteps(2), **PATIENCE))
    trainer.fit(Model(), data_of())
    trainer.save_checkpoint(path)
    trainer_of(world_size, grappa()).fit(Model(), data_of(), ckpt_path=path)


def test_a_checkpoint_of_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="strategy of rounds"):
        run_ranks(resume_from_rounds, 2, str(tmp_path))
