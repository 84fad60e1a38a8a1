"""A rank that dies or stops in an exchange is named, with its host, by the errors of the others."""

import os
import signal
import socket
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.ranks import start_ranks
from tests.sage import SAGE

PATIENCE_SECONDS = 15.0
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class InEvaluation(SAGE):
    def validation_step(self, batch: Any) -> None:
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().validation_step(batch)


class InTraining(pl.LightningModule):
    """Stands still on rank 1, before its third step."""

    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        loss: Tensor = super().training_step(batch)
        return loss


def stalled(rank: int, world_size: int, run: Any, *args: Any) -> str:
    try:
        run(rank, world_size, lgd.Launch(timeout=timedelta(seconds=PATIENCE_SECONDS)), *args)
    except RuntimeError as error:
        return str(error)
    return ""


def check_stalled(run: Any, *args: Any) -> None:
    """Let rank 1 of three stand still in a fit, and see whom the others name."""
    with start_ranks(stalled, 3, run, *args) as ranks:
        ranks.wait_for({0, 2})
        os.kill(ranks.pids[1], signal.SIGKILL)
        of_ranks = ranks.results(may_die={1})
    for said in (of_ranks[0], of_ranks[2]):
        assert f"ank 1 on {socket.gethostname()} did not answer. See what was said there." in said


def small_graph() -> lgd.Graph:
    return lgd.communities(600, 4, num_features=12, seed=3)


def in_evaluation(rank: int, world_size: int, launch: lgd.Launch) -> None:
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([3, 3]), "batch_size": 16}
    evaluation = lgd.Evaluation(batch_size=32)
    data = lgd.PartitionedDataModule(
        small_graph(), partitioner=lgd.RandomPartitioner(), evaluation=evaluation, **options
    )
    trainer(world_size, lgd.LocalSGDStrategy(launch=launch), max_epochs=2).fit(InEvaluation(12, 4), data)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(in_evaluation)
