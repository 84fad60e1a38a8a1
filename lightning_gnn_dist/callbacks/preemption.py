"""A checkpoint when a SIGTERM stops all ranks."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.checks import check_folder
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.grappa import GrappaStrategy

FILE_NAME = "preempted.ckpt"


class PreemptionCheckpoint(Callback):
    """Writes ``preempted.ckpt`` when a SIGTERM on any rank has stopped all ranks.

        trainer = pl.Trainer(..., callbacks=[PreemptionCheckpoint()])
        trainer.fit(model, data, ckpt_path="checkpoints/preempted.ckpt")  # the next time

    Strategies of rounds stop at the next meeting, ``GrappaStrategy`` after the step; a run that goes on from the file
    continues as if it had not stopped. Elastic ranks leave one by one and write none. The process ends with exit code
    143 (128 + 15) under strategies of this package and the command line, with 0 in scripts with Lightning's own ones.

    Args:
        dirpath: The folder to write to. Default: that of the fit's checkpoints, otherwise that of its logs.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = None if dirpath is None else check_folder("dirpath", dirpath)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, SIGTERMException) or not _stops_together(trainer):
            return
        path = self._folder(trainer) / FILE_NAME
        trainer.save_checkpoint(path)
        rank_zero_info(f"To go on from here: ckpt_path={path}")

    def _folder(self, trainer: Trainer) -> Path:
        if self.dirpath is not None:
            return self.dirpath
        checkpoints = trainer.checkpoint_callback
        if isinstance(checkpoints, ModelCheckpoint) and checkpoints.dirpath:
            return Path(checkpoints.dirpath)
        return Path(trainer.log_dir or trainer.default_root_dir)


def _stops_together(trainer: Trainer) -> bool:
    """Whether all ranks stop together, as all of them must take part in writing a checkpoint."""
    strategy = trainer.strategy
    if isinstance(strategy, RoundStrategy):
        return not strategy.peers.may_change
    return isinstance(strategy, GrappaStrategy) or trainer.world_size == 1
