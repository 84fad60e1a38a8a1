"""Ranks whose weights or optimizers differ are told so by every strategy, and by Lightning's DDP on our data."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist import PartitionedDataModule
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import every_strategy
from tests.ranks import run_ranks

STRATEGIES: dict[str, Callable[[], Any]] = every_strategy() | {"ddp": lambda: DDPStrategy(process_group_backend="gloo")}
LR = r"Rank 1 has lr=0\.02 in optimizer 0, rank 0 has 0\.01\. Ranks train one model"
WEIGHTS = r"Rank 1's weights of convs\.0\.\S+ differ from rank 0's\. Ranks train one model"


class Changes(pl.Callback):
    """Changes the weights, or the learning rate, of rank 1 in one hook."""

    def __init__(self, hook: str, what: str, epoch: int = 0) -> None:
        self.what, self.epoch = what, epoch
        setattr(self, hook, self.change)

    def change(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_rank == 0 or trainer.current_epoch != self.epoch:
            return
        if self.what == "lr":
            trainer.optimizers[0].param_groups[0]["lr"] = 0.02
        else:
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] += 1.0


CASES = [(name, "on_train_start", what) for name in STRATEGIES for what in ("lr", "weights")]
CASES += [("grappa", "on_fit_start", "weights"), ("ddp", "on_fit_start", "weights")]


def told(world_size: int, name: str, *callbacks: pl.Callback, **options: Any) -> str:
    module, data = model(lr=0.01), PartitionedDataModule(small_graph(), batch_size=30)
    options = {"callbacks": [*callbacks], "limit_val_batches": 0, "max_epochs": 3} | options
    try:
        trainer(world_size, STRATEGIES[name](), **options).fit(module, data)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def differing_at_the_start(rank: int, world_size: int) -> list[str]:
    return [told(world_size, name, Changes(hook, what)) for name, hook, what in CASES]


def test_what_a_hook_of_the_start_changes_on_one_rank_is_refused() -> None:
    for said in run_ranks(differing_at_the_start, 2):
        for message, (name, hook, what) in zip(said, CASES, strict=True):
            assert re.match(LR if what == "lr" else WEIGHTS, message), (name, hook, what, message)


def differing_later(rank: int, world_size: int, folder: Path) -> list[str]:
    saves = ModelCheckpoint(folder, every_n_train_steps=1)
    changes = Changes("on_train_epoch_start", "lr", epoch=1)
    return [
        told(world_size, "grappa", Changes("on_train_batch_end", "weights", epoch=1)),
        told(world_size, "ddp", changes),
        told(world_size, "grappa", changes, saves, enable_checkpointing=True),
        told(world_size, "grappa"),
        told(world_size, "ddp"),
    ]


def fine_tuned(rank: int, world_size: int) -> str:
    class Unfreezes(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.convs[0])

    return told(world_size, "ddp", Unfreezes())


def test_ddp_cannot_exchange_what_is_unfrozen_later() -> None:
    for message in run_ranks(fine_tuned, 2):
        assert message.startswith("Unfreezes unfreezes parameters in a fit") and "use GrappaStrategy()" in message


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_what_changes_later_on_one_rank_is_refused_where_ranks_exchange_anyway(tmp_path: Path) -> None:
    for weights, rate, saved, *alike in run_ranks(differing_later, 2, tmp_path):
        assert re.match(WEIGHTS, weights) and re.match(LR, rate) and re.match(LR, saved)
        assert alike == ["", ""]
