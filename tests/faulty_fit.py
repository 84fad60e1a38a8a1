"""A fit in which rank 1 meets a fault: the script of ``test_nothing_stays``.

python -m tests.faulty_fit popen stop      # method and fault
LATE=1 ...                                 # in a step, rather than before the start
"""

import tests.no_garbage  # noqa: F401

# isort: split
import gc
import os
import resource
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.demo import SAGE
from tests.extensions import brought

SECONDS = 6


def meet_fault(fault: str) -> None:
    Path("met").touch()  # so that a fit that never came here is not taken for one that left nothing
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.startswith("exit"):
        os._exit(int(fault[-1]))
    elif fault == "exception":
        raise KeyError("a fault")


class Faulty(pl.Callback):
    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.rank = fault, rank

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.fault == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            Path("met").touch()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        elif self.rank == 1 and trainer.global_step >= 6:
            meet_fault(self.fault)


class LeavesEarly(lgd.LocalSGDStrategy):
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self.global_rank == 1:
            meet_fault("exit0")


def main(method: str, fault: str) -> None:
    gc.enable()
    torch.set_num_threads(1)
    ours = method in ("popen", "fork", "torchrun")
    other = None if ours else {more.METHOD: more for more in brought("faults")}[method]
    own = {"start_method": method} if ours and method != "torchrun" else {}
    waits = {"launch": lgd.Launch(timedelta(seconds=SECONDS), start_timeout=timedelta(seconds=120), **own)}
    if other is not None:
        strategy: Any = other.strategy(SECONDS)
    else:
        strategy = (LeavesEarly if fault == "early" else lgd.LocalSGDStrategy)(lgd.EverySteps(4), **waits)
    data = lgd.PartitionedDataModule(
        lgd.communities(500, 4, num_features=8),
        partitioner=lgd.RandomPartitioner(),
        sampler=lgd.NeighborSampler([5, 5]),
        batch_size=32,
        loading=lgd.Loading(num_threads=1),
    )
    place = os.environ.get("LOCAL_RANK" if other is None else other.RANK, "0")
    saver = ModelCheckpoint(Path("checkpoints").absolute(), save_last=True, enable_version_counter=False)
    callbacks: list[Any] = [Faulty(fault, int(place)), saver]
    if method == "fork":
        callbacks[0] = FaultyByRank(fault, 0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if other is None else 1,
        strategy=strategy,
        max_epochs=20,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=callbacks,
    )
    trainer.fit(SAGE(8, 4), data)


class FaultyByRank(Faulty):
    """Where ranks are made out of one process, which makes the callback before them."""

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rank = trainer.global_rank


if __name__ == "__main__":
    main(*sys.argv[1:])
