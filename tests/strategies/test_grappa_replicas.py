"""Replicas of Grappa: equal wherever a run ends, and the same when it was stopped and resumed."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnn_dist.residency import Rotate
from lightning_gnn_dist.rounds import EverySteps
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.weighted_fitting import PATIENCE, Model, data_of, grappa, trainer_of


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
    settings = {"residency": Rotate(), "batch_size": 30, "sampler": NeighborSampler([4, 4])}
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
    [(8, {}), (5, {}), (4, {"limit_train_batches": 2})],
    ids=["between epochs", "in an epoch", "at the end of a shortened epoch"],
)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop_at: int, limits: dict[str, Any]) -> None:
    for whole, resumed, (all_seen, later_seen) in run_ranks(stopped_and_resumed, 3, str(tmp_path), stop_at, limits):
        assert later_seen == all_seen[stop_at:]
        # To rounding: after its first step DDP puts gradients in another order, and three terms are summed in another.
        assert differs(whole, resumed) < 1e-5


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
    assert first == second
    assert 3 < first < 8


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
