"""Layers that exchange rows do not make the host wait for its device: a step waits once, as without an exchange."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from torch import Tensor
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from tests.boundary.models import Model
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.gpu.needs import need_counts, need_devices
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


def waits(rank: int, world_size: int, exchange: lgd.Exchange) -> Counter[str]:
    from pretend import notes

    graph = lgd.communities(400, NUM_CLASSES, num_features=NUM_FEATURES, train_share=0.6)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.WholePartSampler(THREE_LAYERS), boundary=exchange)
    counts = Counts(notes)
    options: dict[str, Any] = {"callbacks": [counts], "limit_val_batches": 0, "accelerator": "gpu", "max_epochs": LAST}
    trainer(world_size, lgd.GrappaStrategy(**PATIENCE), **options).fit(Model(SAGEConv, THREE_LAYERS), data)
    return counts.waits


@pytest.mark.parametrize("exchange", [lgd.Exchange(), lgd.Exchange(overlap=True), lgd.Exchange(share=0.5)], ids=repr)
def test_a_step_waits_once(exchange: lgd.Exchange) -> None:
    need_counts(), need_devices(2)
    for found in run_ranks(waits, 2, exchange):
        assert found.total() <= LAST - FIRST, "\n".join(f"{times} x {place}" for place, times in found.items())


def bytes_by_device(rank: int, world_size: int) -> Counter[str]:
    """What a fit that refreshes rows at meetings gives to ranks, by the device that it lies on."""
    given, send = Counter[str](), dist.all_to_all_single

    def heard(received: Tensor, sent: Tensor, *args: Any, **named: Any) -> Any:
        given[sent.device.type] += sent.nbytes
        return send(received, sent, *args, **named)

    dist.all_to_all_single = heard
    graph = lgd.communities(400, NUM_CLASSES, num_features=NUM_FEATURES, train_share=0.6)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([4, 4]), boundary=lgd.History())
    options: dict[str, Any] = {"limit_val_batches": 0, "accelerator": "gpu", "precision": "64-true"}
    trainer(world_size, lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE), **options).fit(Model(SAGEConv, 2), data)
    dist.all_to_all_single = send
    return given


def test_rows_of_meetings_are_sent_from_the_device() -> None:
    need_devices(2)
    for given in run_ranks(bytes_by_device, 2):
        bytes_of_row = 5 * 8
        assert given["cuda"] > 0 and given["cuda"] % bytes_of_row == 0
