"""Fits of ranks that die, stand still and come back."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gnn_dist import Elastic, EverySeconds, TMAStrategy
from lightning_gnn_dist.extensions.elastic.membership import Membership
from lightning_gnn_dist.wire.launching.processes import LEFT_BY_SIGTERM
from tests.strategies.fitting import Net, State, fit, state_of

HEARTBEAT_SECONDS = 3.0
TIMEOUT_SECONDS = 20  # of an exchange with a rank that says nothing
TWO = "two"  # a file that is there once the other two have met without the one that died
AWAITED = "awaited"  # a file that is there until the rank that comes back is about to begin


class Outcome(NamedTuple):
    rounds: int
    members: list[int]
    state: State
    steps: int
    seconds: list[float]


class Fate(NamedTuple):
    """What happens to a rank in its third round: in a step, at validation, at the meeting."""

    rank: int = -1
    where: str = "step"
    signal: int = signal.SIGKILL


class Watched(Net):
    """Takes its time, and notes how many took part in every round and how long it lasted."""

    def __init__(self, rank: int, folder: str, fate: Fate) -> None:
        super().__init__(optimizer="Adam", dropout=0.2)
        self.rank, self.folder, self.fate = rank, Path(folder), fate
        self.members: list[int] = []
        self.ends: list[float] = [time.monotonic()]

    def meet_fate(self, where: str) -> None:
        if self.fate.rank == self.rank and self.fate.where == where and self.current_epoch == 2:
            fate, self.fate = self.fate, Fate()
            (self.folder / "died").touch()
            if fate.signal == signal.SIGSTOP:
                others = f"[ ! -e '{self.folder / TWO}' ]"
                os.system(f"(while {others}; do sleep 0.1; done; kill -CONT {os.getpid()}) &")
            os.kill(os.getpid(), fate.signal)
            (self.folder / AWAITED).unlink(missing_ok=True)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.trainer.training:
            time.sleep(0.02 * (1 + self.rank))
            self.meet_fate("step")
            while self.current_epoch >= 8 and (self.folder / AWAITED).exists():
                time.sleep(0.05)
        return super().training_step(batch)

    def on_validation_start(self) -> None:
        self.meet_fate("validation")

    def on_train_epoch_end(self) -> None:
        self.members.append(len(self.trainer.strategy.state.batches_of_ranks))  # type: ignore[attr-defined]
        if self.members[-1] == 2 and (self.folder / "died").exists():
            (self.folder / TWO).touch()
        self.ends.append(time.monotonic())


def train(
    rank: int,
    world_size: int,
    folder: str,
    rounds: int,
    fate: Fate = Fate(),  # noqa: B008
    ckpt_path: str | None = None,
    means: dict[str, Any] | None = None,
) -> Outcome:
    torch.manual_seed(rank)  # replicas that start unequal, to be made equal
    module = Watched(rank, folder, fate)
    if fate.where == "meeting":
        mean = Membership._reduce_

        def mean_or_die(member: Membership, flats: list[Tensor]) -> None:
            module.meet_fate("meeting")
            mean(member, flats)

        Membership._reduce_ = mean_or_die  # type: ignore[method-assign]
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, enable_version_counter=False)
    elastic = Elastic(patience=60, timeout=TIMEOUT_SECONDS, ranks=world_size)
    strategy = TMAStrategy(EverySeconds(0.4), peers=elastic, **means or {})
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "validate": True}
    with told_to_leave():
        fit(rank, strategy, module, devices=1, max_epochs=rounds, ckpt_path=ckpt_path, **options)
    trainer = module.trainer
    seconds = [after - before for before, after in pairwise(module.ends)]
    return Outcome(trainer.current_epoch, module.members, state_of(module), trainer.global_step, seconds)


@contextmanager
def told_to_leave() -> Iterator[None]:
    """Lightning's own way out after SIGTERM, with an exit code that says so."""
    try:
        yield
    except SystemExit as left:
        if left.code != LEFT_BY_SIGTERM:
            raise RuntimeError(f"It ends with exit code {left.code}.") from left


def come_back(
    rank: int, world_size: int, name: int, folder: str, rounds: int, ckpt_path: str | None, means: dict[str, Any] | None
) -> Outcome:
    os.environ["LIGHTNING_GNN_DIST_RANK"] = str(name)
    Path(folder, AWAITED).unlink()
    return train(name, world_size, folder, rounds, ckpt_path=ckpt_path, means=means)
