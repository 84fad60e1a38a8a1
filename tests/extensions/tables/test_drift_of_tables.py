"""Tables of a model of one's own in rounds: a step touches some rows, and moves them as far as one process would."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import EverySteps, LazyAdam, LocalSGDStrategy, WholePartSampler
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.graph_fitting import data_module, fit, small_graph

# Rows that one rank alone trains.


class Rows(pl.LightningModule):
    """A class for each row."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.head = torch.nn.Embedding(400, 4, sparse=sparse), torch.nn.Linear(4, 4)
        torch.nn.init.zeros_(self.rows.weight)

    def training_step(self, batch: Any) -> Tensor:
        seeds = slice(batch.batch_size)
        return functional.cross_entropy(self.head(self.rows(batch.n_id[seeds])), batch.y[seeds])

    def configure_optimizers(self) -> Any:
        return LazyAdam(self.parameters(), lr=0.01)


def moved(rank: int, world_size: int, sparse: bool) -> float:
    data, module = data_module(sampler=WholePartSampler(2), batch_size=10**6), Rows(sparse=sparse)
    strategy: Any = LocalSGDStrategy(EverySteps(1), **PATIENCE)
    fit(strategy, module, data, world_size, max_epochs=5, limit_val_batches=0)
    return float(module.rows.weight.detach()[small_graph().split("train")].abs().mean())


@pytest.mark.filterwarnings("ignore:.*validation_step", "ignore:rows has a row for each of 400 nodes")
@pytest.mark.slow
def test_a_row_of_one_rank_moves_as_far_as_alone_if_gradients_are_sparse() -> None:
    alone, dense, sparse = moved(0, 1, True), run_ranks(moved, 2, False)[0], run_ranks(moved, 2, True)[0]
    assert dense == pytest.approx(alone / 2, rel=0.02) and sparse == pytest.approx(alone, rel=0.02)
