"""The average of rounds is that of a loop by hand: in validations, in what is kept, and where a fit goes on."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import EverySteps
from lightning_gnn_dist.callbacks.averaged_rounds import AveragedRounds
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, local_sgd, state_of

DECAY = 0.75


class Watched(Net):
    """Remembers the model of every round, and what is validated after it; keeps a checkpoint after two rounds."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.rounds: list[State] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step([each.double() for each in batch])

    def on_train_epoch_end(self) -> None:
        self.rounds.append(state_of(self))
        if len(self.rounds) == 2:
            self.trainer.save_checkpoint(self.path)

    def on_validation_start(self) -> None:
        """Averages come after it."""

    def on_validation_epoch_start(self) -> None:
        self.validated.append(state_of(self))


def train(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Train on parts of unequal size, and once more from the checkpoint in the middle."""
    found: dict[str, Any] = {}
    for name, start in {"end": None, "resumed": path}.items():
        torch.manual_seed(0)
        module = Watched(path if start is None else f"{path}.more").double()
        options: dict[str, Any] = {"max_epochs": 4, "validate": True, "train": batches(rank, size=5 + rank, count=3)}
        average = AveragedRounds(decay=DECAY)
        strategy = local_sgd(EverySteps(3))
        fit(rank, strategy, module, devices=world_size, callbacks=[average], ckpt_path=start, **options)
        found = {"rounds": module.rounds, "validated": module.validated} | found | {name: state_of(module)}
    return found | {"kept": torch.load(path, weights_only=True)["state_dict"]}


def test_it_is_the_average_by_hand(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, str(tmp_path / "half.ckpt"))

    def mean(average: State, model: State) -> State:
        return {name: DECAY * average[name] + (1 - DECAY) * model[name] for name in model}

    expected = list(accumulate(first["rounds"], mean))
    assert differs(expected[-1], first["rounds"][-1]) > 1e-3
    for found, by_hand in zip(first["validated"], expected, strict=True):
        assert differs(found, by_hand) < 1e-15
    for name, rounds in {"end": 4, "resumed": 4, "kept": 2}.items():
        assert differs(first[name], expected[rounds - 1]) < 1e-15
        assert differs(first[name], second[name]) == 0.0


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), "half"])
def test_a_decay_that_averages_nothing_is_refused(decay: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"decay must be .*between 0 and 0\.99"):
        AveragedRounds(decay)
