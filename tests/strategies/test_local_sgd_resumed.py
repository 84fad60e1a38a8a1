"""Law 7: a run of local SGD that was stopped at a meeting and resumed ends where the other ends."""

import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gnn_dist import EverySteps
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, fit, local_sgd, same_start


def save_then(rank: int, world_size: int, path: str) -> None:
    trainer = fit(rank, local_sgd(EverySteps(2)), same_start(), devices=world_size, max_epochs=1)
    trainer.save_checkpoint(path)


def resume(rank: int, world_size: int, path: str) -> None:
    fit(rank, local_sgd(EverySteps(2)), same_start(), devices=world_size, ckpt_path=path)


def test_another_number_of_ranks_or_another_kind_of_checkpoint_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    run_ranks(save_then, 2, path)
    with pytest.raises(RankError, match="written by 2 ranks, and this fit has 1"):
        run_ranks(resume, 1, path)
    content = torch.load(path, weights_only=True)
    torch.save({key: value for key, value in content.items() if key != "lightning_gnn_dist"}, path)
    with pytest.raises(RankError, match="not written by a strategy of rounds"):
        run_ranks(resume, 2, path)


def fail_in_round(rank: int, world_size: int, path: str) -> None:
    class Broken(Net):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            if self.global_step == 3:
                raise RuntimeError("out of luck")
            return super().training_step(batch)

    warnings.filterwarnings("ignore", "This checkpoint is written after an exception")
    saver = ModelCheckpoint(path, save_on_exception=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(rank, local_sgd(EverySteps(2)), Broken(), devices=world_size, callbacks=[saver], enable_checkpointing=True)


def test_a_checkpoint_written_inside_a_round_is_not_resumed(tmp_path: Path) -> None:
    run_ranks(fail_in_round, 2, str(tmp_path))
    (path,) = tmp_path.glob("*step=3.ckpt")
    with pytest.raises(RankError, match=r"written after an exception, by one rank, .* Resume from another"):
        run_ranks(resume, 2, str(path))
