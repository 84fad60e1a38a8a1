"""The last step in the memory of every host, for ranks that torchrun starts again, as many as are left."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_gnn_dist.checks import check_at_least, check_folder
from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.wire.launching.joining import joined_by_torchrun
from lightning_gnn_dist.wire.newest import bring_newest

MEMORY = Path("/dev/shm")
_HOLDS = ".ckpt"


class LastStep(Callback):
    """Keeps the state after the last step on every host, so that a host that dies costs one step.

        last = LastStep()
        trainer = pl.Trainer(..., num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), callbacks=[last])
        trainer.fit(model, data, ckpt_path=last.newest())
        last.clear()

    torchrun starts all ranks again when one has died or a host has come, on the hosts that are there. They go on from
    the newest state that one of them has; with ``Holding(AsRanks(n))`` along the same curve, on any number of them.
    Under ``GrappaStrategy`` the state is that after a step, under strategies of rounds, whose number of ranks must
    stay, that after a round.

    Args:
        folder: Where the state lies on each host. Default: a folder of the run (``torchrun --rdzv-id``) in the host's
            memory, ``/dev/shm``, or in its folder of temporary files where it has no such.
        every_n_steps: How many steps a death may cost.
    """

    def __init__(self, folder: str | Path | None = None, every_n_steps: int = 1) -> None:
        check_at_least(1, every_n_steps=every_n_steps)
        self.folder = _folder_of_run() if folder is None else check_folder("folder", folder)
        self.every_n_steps = every_n_steps
        self._kept = 0  # the step whose state was kept last

    def newest(self) -> Path | None:
        """Return the newest state that a host of this run has, on all hosts; None at the first start.

        To be called before the fit; under torchrun by all ranks, together.
        """
        _check_own(self.folder)
        here = max(self._steps(), default=None)
        with joined_by_torchrun():
            step = bring_newest(here, self._path, writes=int(os.environ.get("LOCAL_RANK", 0)) == 0)
        if step is None:
            return None
        rank_zero_info(f"Going on behind step {step}, whose state lies in {self.folder}.")
        return self._path(step)

    def clear(self) -> None:
        """Remove what is kept on this host: the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, PartitionedStrategy):
            raise ValueError(
                f"LastStep() keeps the state of ranks that step or meet together, got {type(strategy).__name__}: use "
                "GrappaStrategy(), also on one rank, or a strategy of rounds."
            )
        if getattr(getattr(strategy, "peers", None), "may_change", False):
            raise ValueError(
                f"LastStep() keeps the state of ranks that meet together, and those of {type(strategy).__name__}"
                "(peers=Elastic()) bring each other up to date: leave one of the two out."
            )
        if strategy.tables is not None and strategy.num_nodes > 1:
            raise ValueError(
                "LastStep() keeps the whole state on each host, and rows of an OwnedEmbedding are gathered on rank 0 "
                "alone: use a ModelCheckpoint in a folder that all hosts share."
            )
        _check_own(self.folder)
        self._kept = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not isinstance(trainer.strategy, RoundStrategy) and trainer.global_step - self._kept >= self.every_n_steps:
            self._keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, RoundStrategy):  # whose epochs are rounds
            self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        """Write the state on each host, and only then remove the one before. Collective."""
        strategy = trainer.strategy
        assert isinstance(strategy, PartitionedStrategy)
        being_written, step = self.folder / "being-written", trainer.global_step
        with strategy.saving_on_each_host():
            trainer.save_checkpoint(being_written)
        if strategy.local_rank == 0:
            being_written.replace(self._path(step))
            for older in self._steps() - {step}:
                self._path(older).unlink()
        self._kept = step

    def _steps(self) -> set[int]:
        return {int(path.stem) for path in self.folder.glob(f"*{_HOLDS}") if path.stem.isdecimal()}

    def _path(self, step: int) -> Path:
        return self.folder / f"{step}{_HOLDS}"


def _folder_of_run() -> Path:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":  # torchrun's, where it is given no name
        raise ValueError(
            "LastStep() keeps the state of a run in a folder of its name, and this run has none: name it, "
            "torchrun --rdzv-id=NAME, another for each run, or give a folder, LastStep(folder=...)."
        )
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in run)
    return (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"lightning-gnn-dist-{os.getuid()}-{name}"


def _check_own(folder: Path) -> None:
    """Make the folder, or refuse one into which others may write: what lies there is loaded."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"Others may write into {folder}, and a fit would load what they write: give another folder.")
