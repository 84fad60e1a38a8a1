"""Batches are on the GPU when Lightning gets them, and they are those of a CPU, whoever makes them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from lightning_gnn_dist import (
    Drift,
    EverySteps,
    Holding,
    LLCGStrategy,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    communities,
)
from lightning_gnn_dist.wire.collectives import leave
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`:UserWarning"),
]
FAR = 2e-2  # weights after a few steps in float32, by kernels that sum in another order
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": plain_ddp,
    "llcg": lambda: LLCGStrategy(EverySteps(3), **PATIENCE),
}


class Watched(SAGE):
    """Remembers where batches were when Lightning got them, and takes corrections and anchors when training is over."""

    def __init__(self) -> None:
        super().__init__(12, 4)
        self.came_on: set[str] = set()
        self.taken: list[tuple[Any, ...]] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.came_on.add(batch.x.device.type)
        return batch

    def on_train_end(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        batches = [*data.correction_batches(5, stop=3), *data.anchor_batches(5)]
        self.taken = [(batch.n_id, batch.x, batch.edge_index) for batch in batches]


@cache
def fitted(accelerator: str, strategy: str, sample_on: Any) -> Watched:
    leave()  # the group of a fit on another device, which would take its tensors no longer
    torch.manual_seed(0)
    module, loading = Watched(), Loading(sample_on=sample_on)
    data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([4, 4]), batch_size=16, loading=loading)
    trainer(1, STRATEGIES[strategy](), accelerator=accelerator, num_sanity_val_steps=2).fit(module, data)
    return module


@pytest.mark.parametrize("sample_on", ["cpu", "device"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_sees_the_batches_of_a_cpu(strategy: str, sample_on: str) -> None:
    plain, other = fitted("cpu", strategy, "cpu"), fitted("gpu", strategy, sample_on)
    assert (plain.came_on, other.came_on) == ({"cpu"}, {"cuda"})
    assert [seeds.tolist() for seeds in other.trained] == [seeds.tolist() for seeds in plain.trained]
    assert differs(state_of(plain), {name: array.cpu() for name, array in state_of(other).items()}) < FAR


@pytest.mark.parametrize("sample_on", ["cpu", "device"])
def test_corrections_and_anchors(sample_on: str) -> None:
    plain, other = fitted("cpu", "llcg", "cpu"), fitted("gpu", "llcg", sample_on)
    assert len(plain.taken) > 3
    for batch, same in zip(plain.taken, other.taken, strict=True):
        assert all(mine.equal(theirs.cpu()) for mine, theirs in zip(batch, same, strict=True))
        assert {array.device.type for array in same} == {"cuda"}


@pytest.mark.parametrize("sample_on", ["auto", "cpu", "device"])
def test_evaluation(sample_on: str) -> None:
    found: list[list[tuple[Any, Any]]] = []
    for accelerator, on in (("cpu", "cpu"), ("gpu", sample_on)):
        torch.manual_seed(0)
        module, loading = Watched(), Loading(sample_on=on)  # type: ignore[arg-type]
        data, running = (
            PartitionedDataModule(small_graph(), batch_size=70, loading=loading),
            trainer(1, accelerator=accelerator),
        )
        running.validate(module, data, verbose=False)
        running.test(module, data, verbose=False)
        found.append([*module.evaluated, *running.predict(module, data)])
        assert module.came_on == {"cuda" if accelerator == "gpu" else "cpu"}
    for (nodes, rows), (same, others) in zip(*found, strict=True):
        assert nodes.equal(same.cpu())
        assert torch.allclose(rows, others.cpu(), atol=1e-4)


def test_the_memory_of_a_copy_comes_back() -> None:
    graph = communities(20_000, 4, num_features=256, train_share=0.05, seed=3)
    loading = Loading(sample_on="device")
    data = PartitionedDataModule(graph, sampler=NeighborSampler([4, 4]), batch_size=500, loading=loading)
    running, module = trainer(1, accelerator="gpu"), SAGE(256, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    running.validate(module, data, verbose=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < graph.num_bytes / 2


def fit_parts(rank: int, world_size: int, sample_on: Any, accelerator: str) -> tuple[State, list[int]]:
    """On parts that change, with batches that only fill passes up, and anchors of all ranks."""
    data = PartitionedDataModule(
        small_graph(),
        partitioner=RandomPartitioner(),
        holding=Holding(Redeal(12), every=1),
        sampler=NeighborSampler([4, 4]),
        batch_size=5,
        loading=Loading(sample_on=sample_on),
    )
    torch.manual_seed(0)
    module, strategy = SAGE(12, 4), LLCGStrategy(EverySteps(3), drift=Drift("ranks"), **PATIENCE)
    trainer(world_size, strategy, accelerator=accelerator, max_epochs=4).fit(module, data)
    return state_of(module), torch.cat(module.trained).tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_parts_that_change_on_two_devices() -> None:
    plain, other = run_ranks(fit_parts, 2, "cpu", "cpu"), run_ranks(fit_parts, 2, "auto", "gpu")
    for (state, seeds), (same, seeds_again) in zip(plain, other, strict=True):
        assert seeds == seeds_again
        assert differs(state, same) < FAR
