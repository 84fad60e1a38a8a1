"""The host runs ahead of a device: within an epoch it waits for it once a step under Grappa, and never in a round."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    GrappaStrategy,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    TMAStrategy,
    communities,
)
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
FIRST, LAST = 3, 11  # batches of one epoch or round of 16, after which waits are counted, and until which
PASSED_THROUGH = ("launchers.py", "loops.py")  # their frames lie around Lightning's own waits
STRATEGIES: dict[str, tuple[Callable[[], Any], float]] = {
    "grappa": (lambda: GrappaStrategy(**PATIENCE), 1.0),
    "local_sgd": (lambda: LocalSGDStrategy(EverySteps(16), **PATIENCE), 0.0),
    "tma": (lambda: TMAStrategy(EverySteps(16), **PATIENCE), 0.0),
    "llcg": (lambda: LLCGStrategy(EverySteps(16), **PATIENCE), 0.0),
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(16, 16), SAGEConv(16, 4)])

    def training_step(self, batch: Any) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj).relu()
        return functional.cross_entropy(x, batch.y[: batch.batch_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Counts(pl.Callback):
    """Keeps where the package waited."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.waits = notes, list[str]()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch != 1:
            return
        if batch_idx == FIRST:
            self.notes.clear()
        if batch_idx == LAST:
            for (kind, what, place), times in self.notes.items():
                if kind == "sync" and "lightning_gnn_dist/" in place and not any(f in place for f in PASSED_THROUGH):
                    self.waits += [f"{what} at {place}"] * times


def waits(rank: int, world_size: int, name: str) -> list[str]:
    from pretend import notes

    graph = communities(4000, 4, num_features=16, train_share=0.6)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), batch_size=64)
    counts = Counts(notes)
    options: dict[str, Any] = {"callbacks": [counts], "limit_val_batches": 0, "accelerator": "gpu"}
    trainer(world_size, STRATEGIES[name][0](), **options).fit(Net(), data)
    return counts.waits


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_waits_of_a_step(name: str, num_ranks: int) -> None:
    if find_spec("pretend") is None:
        pytest.skip("only pretended devices count how often the host waits")
    if num_ranks > torch.cuda.device_count():
        pytest.skip("fewer than two CUDA devices")
    for found in run_ranks(waits, num_ranks, name):
        assert len(found) <= STRATEGIES[name][1] * (LAST - FIRST), "\n".join(found)
