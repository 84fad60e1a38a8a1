"""Ranks that die, stand still and come back. The others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_gnn_dist.elastic import LIGHTHOUSE, Elastic, Membership
from lightning_gnn_dist.rounds import EverySeconds
from lightning_gnn_dist.strategies.tma import TMAStrategy
from tests.ranks import run_ranks, start_ranks
from tests.strategies.fitting import Net, State, differs, fit, state_of

torchft = pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")

HEARTBEAT_SECONDS = 1.5


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=60_000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_SECONDS),
    )
    monkeypatch.setenv(LIGHTHOUSE, server.address())
    monkeypatch.setenv("RUST_LOG", "error")
    yield
    server.shutdown()


class Outcome(NamedTuple):
    rounds: int
    members: list[int]
    state: State
    steps: int
    seconds: list[float]


class Fate(NamedTuple):
    """What happens to a rank in its third round."""

    rank: int = -1
    where: str = "step"
    signal: int = signal.SIGKILL


class Watched(Net):
    """Takes its time, and notes how many took part in every round and how long it lasted."""

    def __init__(self, rank: int, fate: Fate) -> None:
        super().__init__(optimizer="Adam", dropout=0.2)
        self.rank, self.fate = rank, fate
        self.members: list[int] = []
        self.ends: list[float] = [time.monotonic()]

    def meet_fate(self, where: str) -> None:
        if self.fate.rank == self.rank and self.fate.where == where and self.current_epoch == 2:
            fate, self.fate = self.fate, Fate()
            os.kill(os.getpid(), fate.signal)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if self.trainer.training:
            time.sleep(0.02 * (1 + self.rank))
            self.meet_fate("step")
        return super().training_step(batch)

    def on_validation_start(self) -> None:
        self.meet_fate("validation")

    def on_train_epoch_end(self) -> None:
        self.members.append(len(self.trainer.strategy.batches_of_ranks))
        self.ends.append(time.monotonic())


def train(rank: int, world_size: int, folder: str, rounds: int, fate: Fate = Fate()) -> Outcome:  # noqa: B008
    torch.manual_seed(rank)  # replicas that start unequal, to be made equal
    module = Watched(rank, fate)
    if fate.where == "meeting":
        mean = Membership._mean_

        def mean_or_die(member: Membership, flats: list[Tensor]) -> None:
            module.meet_fate("meeting")
            mean(member, flats)

        Membership._mean_ = mean_or_die  # type: ignore[method-assign]
    saver = ModelCheckpoint(f"{folder}/saved", save_last=True, enable_version_counter=False)
    trainer = fit(
        rank,
        TMAStrategy(EverySeconds(0.4), elastic=Elastic(patience=60, timeout=8)),
        module,
        devices=1,
        max_epochs=rounds,
        validate=True,
        callbacks=[saver],
        enable_checkpointing=True,
    )
    seconds = [after - before for before, after in pairwise(module.ends)]
    return Outcome(trainer.current_epoch, module.members, state_of(module), trainer.global_step, seconds)


@pytest.mark.usefixtures("lighthouse")
def test_ranks_meet_without_a_process_group(tmp_path: Path) -> None:
    first, second, third = run_ranks(train, 3, str(tmp_path), 4)
    assert differs(first.state, second.state) == differs(first.state, third.state) == 0.0
    assert first.rounds == second.rounds == third.rounds == 4
    assert first.steps == second.steps == third.steps
    assert first.members[-1] == 3
    assert len(list((tmp_path / "saved").glob("*.ckpt"))) == 2


@pytest.mark.usefixtures("lighthouse")
@pytest.mark.parametrize(
    "fate",
    [Fate(0, "step"), Fate(1, "step"), Fate(2, "validation"), Fate(0, "meeting"), Fate(2, "meeting")],
    ids=lambda fate: f"{fate.rank}-{fate.where}",
)
def test_when_a_rank_is_killed_the_others_go_on(tmp_path: Path, fate: Fate) -> None:
    with start_ranks(train, 3, str(tmp_path), 6, fate) as ranks:
        results = ranks.results(may_die={fate.rank})
    assert results[fate.rank] is None
    one, two = (result for result in results if result is not None)
    assert differs(one.state, two.state) == 0.0
    assert one.rounds == two.rounds == 6 and one.steps == two.steps
    assert one.members[0] == two.members[0] == 3 and one.members[-1] == two.members[-1] == 2
    assert max(one.seconds[2:] + two.seconds[2:]) < 0.4 + HEARTBEAT_SECONDS + 4  # one round, the silence, a new group
    assert (tmp_path / "saved" / "last.ckpt").is_file()


@pytest.mark.usefixtures("lighthouse")
def test_a_rank_that_stood_still_catches_up(tmp_path: Path) -> None:
    with start_ranks(train, 3, str(tmp_path), 14, Fate(1, "step", signal.SIGSTOP)) as ranks:
        threading.Timer(18, os.kill, [ranks.pids[1], signal.SIGCONT]).start()
        first, second, third = ranks.results()
    assert differs(first.state, second.state) == differs(first.state, third.state) == 0.0
    assert 2 in first.members and first.members[-1] == second.members[-1] == 3
    assert first.rounds == second.rounds == 14 and len(second.members) < 14  # it missed some
