"""A rank that dies, stops, raises or does something else between two exchanges: all end, and say which rank it was."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Exchange,
    GrappaStrategy,
    Launch,
    PartitionedDataModule,
    RandomPartitioner,
    WholePartSampler,
    through_layers,
)
from tests.boundary.models import Model, weighted_data
from tests.data_fitting import trainer
from tests.layers.models import graph_of
from tests.ranks import run_ranks, start_ranks

PATIENCE_SECONDS, STANDS_SECONDS = 6.0, 40.0
HOST = socket.gethostname()


class Faulty(Model):
    """A model that rank 1 runs in another way from its third step on."""

    def __init__(self, fault: str) -> None:
        super().__init__(SAGEConv, 3)
        self.fault, self.steps, self.raised = fault, 0, 0.0

    def _meets(self, fault: str) -> bool:
        return self.fault == fault and self.global_rank == 1 and self.steps == 3

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        if conv is self.convs[1]:
            if self._meets("raise"):
                raise KeyError("a fault")
            if self._meets("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._meets("stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._meets("sleep"):
                time.sleep(STANDS_SECONDS)
            if self.fault == "sleep" and self.global_rank == 0 and self.steps == 3:
                self.raised = time.monotonic()
                raise KeyError("of rank 0")
        return super()._layer(conv, batch)

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self._meets("twice"):
            through_layers(self, batch)
        if self.fault == "again":
            rows = checkpoint(self, batch, use_reentrant=False)
            return cross_entropy(rows, batch.y)
        loss = super().training_step(batch)
        return None if self._meets("no loss") else loss


def fit(
    rank: int,
    world_size: int,
    fault: str,
    exchange: Exchange = Exchange(),  # noqa: B008
    patience: float = PATIENCE_SECONDS,
) -> tuple[str, float, str]:
    module = Faulty(fault)
    data = PartitionedDataModule(
        graph_of(weighted_data()),
        partitioner=RandomPartitioner(),
        sampler=WholePartSampler(3),
        boundary=exchange,
    )
    strategy = GrappaStrategy(launch=Launch(timeout=timedelta(seconds=patience)))
    running = trainer(world_size, strategy, max_epochs=8, limit_val_batches=0, precision="64-true")
    start = time.monotonic()
    try:
        running.fit(module, data)
    except (RuntimeError, KeyError) as error:
        return str(error), time.monotonic() - (module.raised or start), str(error.__cause__)
    return "", 0.0, ""


@pytest.mark.slow
def test_a_rank_that_raises_is_named() -> None:
    of_ranks = run_ranks(fit, 3, "raise")
    assert of_ranks[1][0] == "'a fault'"
    for said, seconds, _ in (of_ranks[0], of_ranks[2]):
        assert said.startswith("Rank ") and "in step 3, behind layer 1 (forward), and rank 1 on " in said
        assert seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_is_gone_is_named(fault: str) -> None:
    with start_ranks(fit, 3, fault) as ranks:
        if fault == "stop":
            time.sleep(25)  # the others have waited for PATIENCE_SECONDS
            os.kill(ranks.pids[1], signal.SIGKILL)
        of_ranks = ranks.results(may_die={1})
    for said, seconds, _ in (of_ranks[0], of_ranks[2]):
        assert f"and rank 1 on {HOST} did not answer" in said
        assert seconds < PATIENCE_SECONDS + 20


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill", "stop"])
def test_ranks_end_though_rows_are_under_way(fault: str) -> None:
    with start_ranks(fit, 3, fault, Exchange(overlap=True)) as ranks:
        if fault == "stop":
            time.sleep(25)
            os.kill(ranks.pids[1], signal.SIGKILL)
        of_ranks = ranks.results(may_die={1} if fault != "raise" else set())
    for said, seconds, _ in (of_ranks[0], of_ranks[2]):
        assert f"ank 1 on {HOST} did not answer" in said and seconds < PATIENCE_SECONDS + 20


@pytest.mark.slow
def test_a_rank_that_raises_does_not_wait_for_one_that_stands_still() -> None:
    said, seconds, _ = run_ranks(fit, 3, "sleep", Exchange(overlap=True), 60.0)[0]
    assert said == "'of rank 0'" and seconds < STANDS_SECONDS - 15


def test_ranks_that_do_different_things_are_told_so() -> None:
    for error, _, _ in run_ranks(fit, 2, "twice"):
        assert "rank 0 is in step 3, forward 1, behind layer 1 (backward, rows of 5 float64)" in error
        assert "rank 1 is in step 3, forward 2, behind layer 0 (forward, rows of 5 float64)" in error
        assert "Every rank must run the same layers on every batch" in error


@pytest.mark.slow
def test_a_rank_that_skips_a_step_is_named() -> None:
    (said, _, _), (of_lightning, _, _) = run_ranks(fit, 2, "no loss")
    assert f"in step 3, behind layer 1 (backward), and rank 1 on {HOST} did not answer" in said
    assert "returning None in distributed training is not supported" in of_lightning


def test_a_model_that_is_run_again_in_the_backward_is_refused() -> None:
    for error, _, _ in run_ranks(fit, 2, "again"):
        assert "was run again in the backward (torch.utils.checkpoint)" in error
