"""Batches are on the GPU when Lightning gets them, and they are those of a CPU, whoever makes them."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.wire.collectives import leave
from tests.boundary.models import Model
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, every_strategy, plain_ddp
from tests.gpu.needs import need_devices
from tests.layers.models import NUM_CLASSES, NUM_FEATURES
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import differs, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`:UserWarning"),
]
FAR = 2e-2  # weights after a few steps in float32, by kernels that sum in another order
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": plain_ddp,
    "llcg": every_strategy()["llcg"],
}


class Watched(SAGE):
    """Remembers where batches were when Lightning got them."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.came_on: set[str] = set()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.came_on.add(batch.x.device.type)
        return batch


@cache
def fitted(accelerator: str, strategy: str, sample_on: Any) -> Watched:
    leave()  # the group of a fit on another device, which would take its tensors no longer
    torch.manual_seed(0)
    module, loading = Watched(), lgd.Loading(sample_on=sample_on)
    data = lgd.PartitionedDataModule(small_graph(), sampler=lgd.NeighborSampler([4, 4]), batch_size=16, loading=loading)
    trainer(1, STRATEGIES[strategy](), accelerator=accelerator, num_sanity_val_steps=2).fit(module, data)
    return module


@pytest.mark.parametrize("sample_on", ["cpu", "device"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_sees_the_batches_of_a_cpu(strategy: str, sample_on: str) -> None:
    plain, other = fitted("cpu", strategy, "cpu"), fitted("gpu", strategy, sample_on)
    assert (plain.came_on, other.came_on) == ({"cpu"}, {"cuda"})
    assert [seeds.tolist() for seeds in other.trained] == [seeds.tolist() for seeds in plain.trained]
    assert differs(state_of(plain), {name: array.cpu() for name, array in state_of(other).items()}) < FAR


def test_the_memory_of_a_copy_comes_back() -> None:
    graph = lgd.communities(20_000, 4, num_features=256, train_share=0.05, seed=3)
    loading = lgd.Loading(sample_on="device")
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([4, 4]), batch_size=500, loading=loading)
    running, module = trainer(1, accelerator="gpu"), SAGE(256, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    running.validate(module, data, verbose=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < graph.num_bytes / 2


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
