"""``AutoStrategy``: a probe leaves no trace, and the fit is that of the strategy that was chosen."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_gnn_dist import AutoStrategy, GrappaStrategy, Launch, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.strategies.auto import Kept
from lightning_gnn_dist.strategies.choosing.choices import CHOICES
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks


class Told(AutoStrategy):
    """Chooses what it is told behind its probe."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**options, **PATIENCE)
        self.name = name

    def _chosen(self, trainer: Any) -> Kept:
        return super()._chosen(trainer)._replace(name=self.name)


def data() -> PartitionedDataModule:
    return PartitionedDataModule(small_graph(), sampler=NeighborSampler([4, 4]), loading=Loading(num_threads=0), seed=1)


def weights(
    strategy: Any, world_size: int, path: str | None = None, module: Any = None, **options: Any
) -> tuple[torch.Tensor, Any]:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    module = module or model(dropout=0.5)
    torch.manual_seed(7)
    running = trainer(world_size, strategy, limit_val_batches=0, **options)
    running.fit(module, data(), ckpt_path=path)
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach(), running


def chosen_and_direct(rank: int, world_size: int, name: str, passes: int, epochs: int) -> tuple[bool, int, str]:
    choice = CHOICES[name]
    found, running = weights(Told(name), world_size, max_epochs=passes)
    direct, _ = weights(choice.strategy(**PATIENCE), world_size, max_epochs=epochs)
    return found.equal(direct), running.max_epochs - epochs, type(running.strategy).__name__


@pytest.mark.parametrize(("name", "passes", "epochs"), [("Grappa, 8 bits", 3, 3), ("LLCG, overlap", 33, 3)])
def test_a_fit_is_that_of_the_choice_to_the_bit(name: str, passes: int, epochs: int) -> None:
    assert (
        run_ranks(chosen_and_direct, 2, name, passes, epochs, timeout=60)
        == [(True, 0, CHOICES[name].method.__name__)] * 2
    )


def stopped_and_resumed(rank: int, world_size: int, folder: str) -> bool:
    whole, _ = weights(CHOICES["averaging"].strategy(**PATIENCE), world_size, max_epochs=4)
    warnings.filterwarnings("ignore", "Checkpoint directory")
    saves = {"callbacks": [ModelCheckpoint(folder, filename="half")], "enable_checkpointing": True}
    weights(Told("averaging"), world_size, max_epochs=32, **saves)
    path = f"{folder}/half.ckpt"
    resumed, running = weights(AutoStrategy(**PATIENCE), world_size, path, max_epochs=64, **saves)
    return whole.equal(resumed) and running.max_epochs == 4


def test_a_resumed_fit_keeps_the_choice(tmp_path: Path) -> None:
    assert run_ranks(stopped_and_resumed, 2, str(tmp_path), timeout=60) == [True, True]


def grappa_then_auto(rank: int, world_size: int, folder: str) -> None:
    saves = {"callbacks": [ModelCheckpoint(folder, filename="other")], "enable_checkpointing": True}
    weights(GrappaStrategy(**PATIENCE), world_size, max_epochs=1, **saves)
    weights(AutoStrategy(**PATIENCE), world_size, f"{folder}/other.ckpt", max_epochs=2)


def test_a_checkpoint_of_another_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"other\.ckpt does not say what AutoStrategy has chosen: name the strategy"):
        run_ranks(grappa_then_auto, 2, str(tmp_path), timeout=60)


def with_steps(rank: int, world_size: int) -> str:
    _, running = weights(AutoStrategy(**PATIENCE), world_size, max_steps=3, max_epochs=-1)
    assert running.global_step == 3
    return type(running.strategy).__name__


def test_what_rounds_refuse_is_trained_without_them() -> None:
    assert run_ranks(with_steps, 2, timeout=60) == ["GrappaStrategy"] * 2


def test_one_rank_needs_no_probe() -> None:
    assert run_ranks(with_steps, 1, timeout=60) == ["GrappaStrategy"]


def without_data_module(rank: int, world_size: int) -> None:
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    trainer(world_size, AutoStrategy(**PATIENCE)).fit(model(), torch.utils.data.DataLoader([1, 2]))


def test_bare_loaders_are_refused() -> None:
    with pytest.raises(RankError, match="AutoStrategy needs a data module"):
        run_ranks(without_data_module, 2, timeout=60)


def unused(rank: int, world_size: int, finds: bool) -> bool:
    def module() -> Any:
        made = model()
        made.extra = torch.nn.Linear(2, 2)  # that no step uses
        return made

    asked = {"find_unused_parameters": finds}
    found = []
    for strategy in (Told("Grappa", **asked), Told("averaging", **asked), GrappaStrategy(**asked, **PATIENCE)):
        found.append(weights(strategy, world_size, module=module())[0])
    return found[0].equal(found[2]) and not found[0].equal(found[1])


def test_parameters_that_no_step_uses_are_handled_as_by_grappa() -> None:
    assert run_ranks(unused, 2, True, timeout=60) == [True, True]
    way_out = r"extra\.weight, extra\.bias had no part .* use AutoStrategy\(find_unused_parameters=True\)"
    with pytest.raises(RankError, match=way_out):
        run_ranks(unused, 2, False, timeout=60)


def in_ranks_of_a_fit(rank: int, world_size: int, start: Any, folder: str) -> int:
    strategy = AutoStrategy(launch=Launch(start_timeout=PATIENCE["launch"].start_timeout, start_method=start))
    _, running = weights(strategy, 2, max_epochs=20)
    steps = running.global_step
    with pytest.raises(ValueError, match="The ranks that trained have ended"):
        running.save_checkpoint(f"{folder}/whole.ckpt")
    running.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    with pytest.raises(ValueError, match="make another Trainer for the next fit"):
        running.fit(model(), data())
    return steps


SLOWER = (pytest.param(each, marks=pytest.mark.slow) for each in ("spawn", "forkserver"))


@pytest.mark.parametrize("start", ["fork", *SLOWER])
def test_ranks_that_a_fit_has_started_choose(start: str, tmp_path: Path) -> None:
    assert run_ranks(in_ranks_of_a_fit, 1, start, str(tmp_path), timeout=100)[0] >= 20
