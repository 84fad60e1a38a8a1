"""Layers that exchange rows do not make the host wait for its device: a step waits once, as without an exchange."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Exchange, GrappaStrategy, PartitionedDataModule, WholePartSampler, communities
from tests.boundary.models import Model
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import NUM_CLASSES, NUM_FEATURES
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
FIRST, LAST = 2, 6  # steps, each of a pass, in which waits are counted
THREE_LAYERS = 3


class Counts(pl.Callback):
    """Keeps where the host waited within some steps, but for Lightning's own waits."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.waits = notes, Counter[str]()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.notes.clear()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if FIRST <= trainer.current_epoch < LAST:
            for (kind, what, place), times in self.notes.items():
                if kind == "sync" and "site-packages" not in place and "launchers.py" not in place:
                    self.waits[f"{what} at {place}"] += times


def waits(rank: int, world_size: int, exchange: Exchange) -> Counter[str]:
    from pretend import notes

    graph = communities(400, NUM_CLASSES, num_features=NUM_FEATURES, train_share=0.6)
    data = PartitionedDataModule(graph, sampler=WholePartSampler(THREE_LAYERS), boundary=exchange)
    counts = Counts(notes)
    options: dict[str, Any] = {"callbacks": [counts], "limit_val_batches": 0, "accelerator": "gpu", "max_epochs": LAST}
    trainer(world_size, GrappaStrategy(**PATIENCE), **options).fit(Model(SAGEConv, THREE_LAYERS), data)
    return counts.waits


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap=True), Exchange(share=0.5)], ids=repr)
def test_a_step_waits_once(exchange: Exchange) -> None:
    if find_spec("pretend") is None:
        pytest.skip("only pretended devices count how often the host waits")
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    for found in run_ranks(waits, 2, exchange):
        assert found.total() <= LAST - FIRST, "\n".join(f"{times} x {place}" for place, times in found.items())
