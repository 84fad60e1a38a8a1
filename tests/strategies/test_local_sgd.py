"""Laws of local SGD, on several gloo ranks: what a meeting computes, what it sends, and what is refused."""

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, Timer, WeightAveraging
from torch import Tensor

from lightning_gnn_dist import EverySteps, LocalSGDStrategy
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import plain_ddp
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import (
    Net,
    State,
    batches,
    before_and_after,
    differs,
    fit,
    local_sgd,
    same_start,
    state_of,
)

# Law 2: averaging after every SGD step is DDP.


def ddp_and_local(rank: int, world_size: int) -> tuple[State, State]:
    states, options = [], {"accumulate_grad_batches": 2}
    # With one step a round there are three rounds where DDP has one epoch.
    for strategy, epochs in ((plain_ddp(), 3), (local_sgd(EverySteps(1)), 3 * 3)):
        module = same_start()
        fit(rank, strategy, module, devices=world_size, max_epochs=epochs, **options)
        states.append(state_of(module))
    return states[0], states[1]


def test_sgd_averaged_after_every_step_is_ddp() -> None:
    for ddp, local in run_ranks(ddp_and_local, 2):
        assert differs(ddp, local) < 1e-6


# Law 4: replicas are equal after every meeting, whatever the model and the optimisation.


def replicas(rank: int, world_size: int, buffers: str) -> tuple[State, int]:
    module = same_start(batch_norm=True, dropout=0.2)
    torch.manual_seed(rank)
    trainer = fit(rank, local_sgd(EverySteps(3), buffers=buffers), module, devices=world_size)
    return state_of(module), trainer.global_step


def test_local_buffers_stay_local() -> None:
    (first, steps), (second, _) = run_ranks(replicas, 2, "local")
    means = "layers.1.running_mean"
    assert not torch.equal(first.pop(means), second.pop(means)) and steps == 9
    first.pop("layers.1.running_var"), second.pop("layers.1.running_var")
    assert differs(first, second) == 0.0


# What a meeting computes.


def weighted(rank: int, world_size: int, weights: str) -> tuple[State, State]:
    class Sized(list[Any]):
        num_seeds = 10 + 20 * rank

    return before_and_after(rank, world_size, LocalSGDStrategy, EverySteps(5), Sized(batches(rank)), weights=weights)


@pytest.mark.parametrize(("weights", "share"), [("uniform", 0.5), ("nodes", 0.25)])
def test_the_average_weighs_replicas_as_asked(weights: str, share: float) -> None:
    (first, average), (second, _) = run_ranks(weighted, 2, weights)
    expected = {name: share * first[name] + (1 - share) * second[name] for name in first}
    assert differs(first, second) > 0.01
    assert differs(average, expected) < 1e-6


def moments(rank: int, world_size: int, kinds: list[Any]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for kind in kinds:
        module = same_start(optimizer="Adam")
        trainer = fit(rank, local_sgd(EverySteps(3), average_optimizer=kind), module, devices=world_size, max_epochs=1)
        state = trainer.optimizers[0].state[module.layers[0].weight]
        found.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
    return found


def test_optimizer_moments_are_averaged_when_asked() -> None:
    first, second = run_ranks(moments, 2, [False, True, "momentum", "variance"])
    expected = [(mine + theirs) / 2 for mine, theirs in zip(first[0], second[0], strict=True)]
    asked = [(False, False), (True, True), (True, False), (False, True)]
    for mine, theirs, averaged in zip(first, second, asked, strict=True):
        for left, right, mean, own, is_mean in zip(mine, theirs, expected, first[0], averaged, strict=True):
            assert torch.equal(left, right) == is_mean
            assert torch.allclose(left, mean if is_mean else own, rtol=1e-6, atol=0)


# Law 8: nothing crosses the wire between meetings.


def spy(rank: int, world_size: int) -> tuple[list[int], float, int]:
    calls, per_batch = list[Any](), list[int]()

    def counted(call: Any) -> Any:
        return lambda *args, **options: (calls.append(call), call(*args, **options))[1]

    of_tensors = ("broadcast", "all_reduce", "all_gather", "barrier", "reduce")
    for name in (*of_tensors, "all_gather_object", "broadcast_object_list"):
        setattr(dist, name, counted(getattr(dist, name)))

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
            per_batch.append(len(calls))

    module = same_start()
    fit(rank, local_sgd(EverySteps(5)), module, devices=world_size, callbacks=[Watch()])
    num_bytes = sum(parameter.numel() * 4 for parameter in module.parameters())
    return per_batch, collectives.traffic.bytes_sent, num_bytes


def test_nothing_is_sent_between_meetings() -> None:
    for per_batch, sent, num_bytes in run_ranks(spy, 2):
        assert len(per_batch) == 15
        for start in (0, 5, 10):
            assert len(set(per_batch[start : start + 5])) == 1
        # One model at the start (half of it from each rank's view of a broadcast), then one average a round.
        # Beside it a few numbers: votes, sizes, checksums, and once what ranks must have alike.
        assert num_bytes * (0.5 + 3) < sent < num_bytes * (0.5 + 3) + 3 * 110


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train_batches": 20}, "limit_train_batches=20 cuts rounds short"),
        ({"max_steps": 5}, "max_steps=5 ends the fit inside a round: use max_epochs"),
        ({"val_check_interval": 0.5}, "use check_val_every_n_epoch"),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, "use check_val_every_n_epoch"),
        ({"val_check_interval": "00:00:00:01"}, "use check_val_every_n_epoch"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True talks to the other ranks"),
        ({"callbacks": [ModelCheckpoint(every_n_train_steps=2)], "enable_checkpointing": True}, "use every_n_epochs"),
        ({"callbacks": [Timer(timedelta(hours=1), interval="step")]}, 'interval="epoch"'),
        ({"max_time": "00:01:00:00"}, 'interval="epoch"'),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"callbacks": [EMAWeightAveraging()]}, "EMAWeightAveraging by steps averages another model on every rank"),
        ({"callbacks": [WeightAveraging()]}, " WeightAveraging by steps averages another model on every rank"),
    ],
)
def test_what_acts_in_mid_round_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(0, local_sgd(EverySteps(2)), Net(batch_norm=True), devices=1, validate=True, **options)


def weigh_plain_loader(rank: int, world_size: int) -> None:
    fit(rank, local_sgd(weights="nodes"), Net(), devices=world_size)


def test_weights_by_nodes_need_a_loader_that_knows_them() -> None:
    with pytest.raises(RankError, match='use weights="uniform"'):
        run_ranks(weigh_plain_loader, 2)


def test_a_copy_of_a_strategy_trains() -> None:
    assert fit(0, copy.deepcopy(LocalSGDStrategy(EverySteps(2))), Net(), devices=1).global_step == 6


def stopped_and_resumed(rank: int, world_size: int, folder: Path, steps: int) -> float:
    found = []
    for name, epochs, path in (("whole", 4, None), ("half", 2, None), ("half", 4, folder / "half" / "last.ckpt")):
        module = same_start(dropout=0.5)
        torch.manual_seed(10 + rank)
        saver = ModelCheckpoint(folder / name, save_last=True, enable_version_counter=False)
        options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "ckpt_path": path}
        fit(rank, LocalSGDStrategy(EverySteps(steps)), module, devices=world_size, max_epochs=epochs, **options)
        found.append(state_of(module))
    return differs(found[0], found[2])


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_over_a_plain_loader_is_resumed_to_the_bit_in_a_pass_and_at_its_end(steps: int, tmp_path: Path) -> None:
    assert run_ranks(stopped_and_resumed, 2, tmp_path, steps) == [0.0, 0.0]
