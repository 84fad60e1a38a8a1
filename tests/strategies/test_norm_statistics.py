"""Statistics of batch normalisation: those of the whole graph, and those that stay as they are."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Drift, EverySteps, GlobalBatching, LLCGStrategy, MetisPartitioner, NeighborSampler
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.graph_fitting import Batched, data_module, fit, model, small_graph


def statistics(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, float | None]]:
    found = []
    for buffers in ("global", "average"):
        module = model(Batched, dropout=0.5)
        strategy = LLCGStrategy(EverySteps(3), buffers=buffers, drift=Drift("global", anchor_steps=1), **PATIENCE)  # type: ignore[arg-type]
        everything = GlobalBatching(batch_size=10**6, sampler=NeighborSampler([-1, -1]))
        data = data_module(partitioner=MetisPartitioner(), global_batching=everything)
        fit(strategy, module, data, world_size)
        found.append((module.norm.running_mean, module.norm.running_var, module.norm.momentum))
    return found


def test_global_statistics_are_those_of_the_whole_graph() -> None:
    x = small_graph().node_arrays["x"]
    for (mean, var, momentum), (average, *_) in run_ranks(statistics, 2):
        # Every node with an edge is in the neighbourhood of a training node, on one rank or on both.
        assert (mean - x.mean(0)).abs().max() < 0.5 * (average - x.mean(0)).abs().max()
        assert (var / x.var(0) - 1).abs().max() < 0.3
        assert momentum == 0.1


def statistics_of_one_seed(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    module = model(Batched)
    strategy = LLCGStrategy.as_published(EverySteps(2), buffers="global", correction=None, **PATIENCE)
    data = data_module(global_batching=GlobalBatching(batch_size=1))
    fit(strategy, module, data, world_size, max_epochs=1, limit_val_batches=0)
    seen = torch.stack([batch.x.mean(0) for batch in data.correction_batches(0, sliced=False, stop=4)])
    return module.norm.running_mean, seen.mean(0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_without_seeds_adds_nothing_to_the_statistics() -> None:
    for mean, expected in run_ranks(statistics_of_one_seed, 2):
        assert (mean - expected).abs().max() < 1e-5


class FrozenNorm(pl.Callback):
    """Keeps the statistics as they came, which is how a pretrained layer is frozen."""

    def __init__(self) -> None:
        self.stayed: list[bool] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.norm.eval()

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.stayed.append(not module.norm.training and module.convs.training)


def frozen_statistics(rank: int, world_size: int) -> tuple[list[bool], Tensor]:
    module = model(Batched)
    strategy = LLCGStrategy(EverySteps(3), buffers="global", **PATIENCE)
    fit(strategy, module, data_module(), world_size, callbacks=[frozen := FrozenNorm()], limit_val_batches=0)
    return frozen.stayed, module.norm.running_mean


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_frozen_layer_keeps_its_statistics() -> None:
    for stayed, mean in run_ranks(frozen_statistics, 2):
        assert stayed == [True] * 3
        assert not mean.any()
