"""Law 7: a run of LLCG that was stopped and resumed ends where the other ends."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

from lightning_gnn_dist import Correction, Drift, EverySteps, LLCGStrategy
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of
from tests.strategies.graph_fitting import Remembering, data_module, fit, model

PLAIN: dict[str, Any] = {"drift": None, "average_optimizer": False, "outer": None}


def resumed(rank: int, world_size: int, folder: str, kind: type[SAGE], options: dict[str, Any]) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(kind, dropout=0.5)
        torch.manual_seed(rank)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        strategy = LLCGStrategy(EverySteps(4, growth=1.5, limit=8), **options, **PATIENCE)
        settings = {"enable_checkpointing": True, "callbacks": [saver], "max_epochs": 4, "limit_val_batches": 0}
        fit(strategy, module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(SAGE, PLAIN | {"correction": Correction.as_published(2)}, marks=pytest.mark.slow),
        pytest.param(SAGE, {"drift": Drift("ranks"), "correction": None}, marks=pytest.mark.slow),
        (SAGE, {"drift": Drift("global"), "correction": Correction(0.5, lr="local")}),
        pytest.param(SAGE, {"correction": Correction(optimizer="persistent")}, marks=pytest.mark.slow),
        pytest.param(Remembering, {}, marks=pytest.mark.slow),
    ],
    ids=["paper", "ranks", "global", "persistent", "buffers"],
)
def test_a_resumed_run_ends_with_the_same_weights(kind: type[SAGE], options: dict[str, Any], tmp_path: Path) -> None:
    for whole, again in run_ranks(resumed, 2, str(tmp_path), kind, options):
        assert differs(whole, again) == 0.0


class Unfreeze(BaseFinetuning):
    """Trains the first layer from the second round on, and ``again`` when a run is resumed."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.convs[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.convs[0], optimizer, lr=0.001)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if self.again and trainer.current_epoch > 1:
            self.make_trainable(module.convs[0])


class TrainsWhatIsNotFrozen(SAGE):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def resumed_after_unfreezing(rank: int, world_size: int, folder: str, again: bool) -> tuple[State, State]:
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        module = model(TrainsWhatIsNotFrozen)
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
        settings = {"enable_checkpointing": True, "callbacks": [saver, Unfreeze(again)]}
        fit(LLCGStrategy(EverySteps(2), **PATIENCE), module, data_module(), world_size, path, **settings)
        states.append(state_of(module))
    return states[0], states[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_resuming_needs_what_was_unfrozen(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"shifts 6 parameters .* trains 3 .* at the latest in on_train_start"):
        run_ranks(resumed_after_unfreezing, 2, str(tmp_path), False)
    for whole, again in run_ranks(resumed_after_unfreezing, 2, str(tmp_path), True):
        assert differs(whole, again) == 0.0
