"""A rank that dies or stops in an exchange is named, with its host, by the errors of the others."""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor

from lightning_gnn_dist import (
    Evaluation,
    GrappaStrategy,
    Launch,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
    save_shards,
)
from tests.data_fitting import trainer
from tests.extensions.tables.test_owned_embedding import Owned
from tests.extensions.tables.test_table_gradients import Loader
from tests.graph.parted import some_partition
from tests.ranks import start_ranks
from tests.sage import SAGE
from tests.strategies.fitting import fit

PATIENCE_SECONDS = 15.0
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class InTraining(SAGE):
    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch)


class InEvaluation(SAGE):
    def validation_step(self, batch: Any) -> None:
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().validation_step(batch)


class AtOwnedRows(Owned):
    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch)


def stalled(rank: int, world_size: int, where: str, folder: str) -> str:
    launch = Launch(timeout=timedelta(seconds=PATIENCE_SECONDS))
    try:
        run(rank, world_size, where, folder, launch)
    except RuntimeError as error:
        return str(error)
    return ""


def run(rank: int, world_size: int, where: str, folder: str, launch: Launch) -> None:
    if where == "rows":
        fit(rank, GrappaStrategy(launch=launch), AtOwnedRows(), devices=world_size, train=Loader(rank), max_epochs=2)
        return
    graph = communities(600, 4, num_features=12, seed=3)
    options: dict[str, Any] = {"sampler": NeighborSampler([3, 3]), "batch_size": 16}
    if where == "evaluation":
        data = PartitionedDataModule(
            graph, partitioner=RandomPartitioner(), evaluation=Evaluation(batch_size=32), **options
        )
        trainer(world_size, LocalSGDStrategy(launch=launch), max_epochs=2).fit(InEvaluation(12, 4), data)
    else:
        data = PartitionedDataModule(folder, **options)
        strategy = GrappaStrategy(launch=launch)
        trainer(world_size, strategy, max_epochs=2, limit_val_batches=0).fit(InTraining(12, 4), data)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["shards", "rows", "evaluation"])
def test_a_rank_that_stands_still_is_named(where: str, tmp_path: Any) -> None:
    if where == "shards":
        graph = communities(600, 4, num_features=12, seed=3)
        save_shards(graph, some_partition(graph, 3), tmp_path / "shards")
    with start_ranks(stalled, 3, where, str(tmp_path / "shards")) as ranks:
        ranks.wait_for({0, 2})
        os.kill(ranks.pids[1], signal.SIGKILL)
        of_ranks = ranks.results(may_die={1})
    for said in (of_ranks[0], of_ranks[2]):
        assert f"ank 1 on {socket.gethostname()} did not answer. See what was said there." in said
