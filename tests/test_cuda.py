"""Fits on a GPU see the batches that fits on a CPU see, whoever makes them; and on a CPU the torch operators do."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist import (
    Drift,
    EverySteps,
    Holding,
    LadiesSampler,
    LinkDataModule,
    LLCGStrategy,
    Loading,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    ShadowSampler,
    communities,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.wire.collectives import leave
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.link_model import LinkSAGE
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("gpu", marks=pytest.mark.gpu)]
# Each against batches that a CPU makes for a CPU.
PLACES = [pytest.param("cpu", "device", marks=pytest.mark.slow)]
PLACES += [pytest.param("gpu", on, marks=pytest.mark.gpu) for on in ("cpu", "device")]
pytestmark = pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`:UserWarning")
STRATEGIES = {
    "single": lambda: "auto",
    "ddp": lambda: DDPStrategy(timeout=PATIENCE["launch"].timeout),
    **every_strategy(),
}


class Watched(SAGE):
    """Remembers where batches were when Lightning got them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(12, 4, **options)
        self.came_on: set[str] = set()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.came_on.add(batch.x.device.type)
        return batch


def fit(device: str, strategy: str, data: LightningDataModule, module: pl.LightningModule | None = None) -> Any:
    leave()  # the group of a fit on another device, which would take its tensors no longer
    torch.manual_seed(0)
    module = Watched() if module is None else module
    trainer(1, STRATEGIES[strategy](), accelerator=device, num_sanity_val_steps=2).fit(module, data)
    return module


def seeds_of(module: SAGE) -> list[list[int]]:
    return [seeds.tolist() for seeds in module.trained]


@cache
def on_parts(device: str, strategy: str, sample_on: Any) -> Watched:
    data = {"sampler": NeighborSampler([4, 4]), "batch_size": 16, "loading": Loading(sample_on=sample_on)}
    module: Watched = fit(device, strategy, PartitionedDataModule(small_graph(), **data))
    return module


@pytest.mark.parametrize(("device", "sample_on"), PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_under_every_strategy(device: str, sample_on: Any, strategy: str) -> None:
    plain, other = on_parts("cpu", strategy, "cpu"), on_parts(device, strategy, sample_on)
    assert other.came_on == {"cuda" if device == "gpu" else "cpu"}
    assert seeds_of(other) == seeds_of(plain)
    if device == "cpu":
        assert differs(state_of(plain), state_of(other)) == 0.0
    else:
        assert differs(state_of(plain), {name: array.cpu() for name, array in state_of(other).items()}) < 2e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampler", [LadiesSampler([30, 30]), ShadowSampler([3, 3], num_hops=2)], ids=repr)
def test_other_samplers(device: str, sampler: Any) -> None:
    def data() -> PartitionedDataModule:
        return PartitionedDataModule(small_graph(), sampler=sampler, batch_size=16)

    modules = [fit(where, "local_sgd", data(), Watched(blocks=False)) for where in ("cpu", device)]
    assert seeds_of(modules[0]) == seeds_of(modules[1])
    assert modules[1].came_on == {"cuda" if device == "gpu" else "cpu"}


@pytest.mark.parametrize(("device", "sample_on"), PLACES)
@pytest.mark.parametrize("strategy", ["local_sgd", "llcg"])
def test_links(device: str, sample_on: Any, strategy: str) -> None:
    split = split_edges(small_graph(), val=0.1, negatives=5)
    modules = [
        fit(
            where,
            strategy,
            LinkDataModule(split, sampler=NeighborSampler([4, 4]), batch_size=64, loading=Loading(sample_on=on)),
            module,
        )
        for where, on, module in (("cpu", "cpu", link_model()), (device, sample_on, link_model()))
    ]
    assert modules[0].asked
    assert (modules[0].asked, modules[0].judged) == (modules[1].asked, modules[1].judged)
    states = [{name: array.cpu() for name, array in state_of(module).items()} for module in modules]
    assert differs(*states) <= (0.0 if device == "cpu" else 2e-2)


def link_model() -> LinkSAGE:
    torch.manual_seed(0)
    return LinkSAGE(12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample_on", ["auto", "cpu", "device"])
def test_evaluation(device: str, sample_on: Any) -> None:
    found: list[list[tuple[Any, Any]]] = []
    for where, on in (("cpu", "cpu"), (device, sample_on)):
        torch.manual_seed(0)
        module, data = Watched(), PartitionedDataModule(small_graph(), batch_size=70, loading=Loading(sample_on=on))
        running = trainer(1, accelerator=where)
        running.validate(module, data, verbose=False)
        running.test(module, data, verbose=False)
        found.append([*module.evaluated, *running.predict(module, data)])
        assert module.came_on == {"cuda" if where == "gpu" else "cpu"}
    for (nodes, rows), (same, others) in zip(*found, strict=True):
        assert nodes.equal(same.cpu())
        assert rows.equal(others) if device == "cpu" else torch.allclose(rows, others.cpu(), atol=1e-4)


class Asking(Watched):
    """Takes corrections and anchors when training is over."""

    def on_train_end(self) -> None:
        data = self.trainer.datamodule
        taken = [*data.correction_batches(5, stop=3), *data.anchor_batches(5)]
        self.taken = [(batch.n_id, batch.x, batch.edge_index) for batch in taken]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sample_on", ["auto", "cpu", "device"])
def test_corrections_and_anchors(device: str, sample_on: Any) -> None:
    options: dict[str, Any] = {"sampler": NeighborSampler([4, 4]), "batch_size": 16}
    plain, other = (
        fit(where, "llcg", PartitionedDataModule(small_graph(), loading=Loading(sample_on=on), **options), Asking())
        for where, on in (("cpu", "cpu"), (device, sample_on))
    )
    for batch, same in zip(plain.taken, other.taken, strict=True):
        assert all(mine.equal(theirs.cpu()) for mine, theirs in zip(batch, same, strict=True))
        assert {array.device.type for array in same} == {"cuda" if device == "gpu" else "cpu"}


@pytest.mark.gpu
def test_the_memory_of_a_copy_comes_back() -> None:
    graph = communities(20_000, 4, num_features=256, train_share=0.05, seed=3)
    data = PartitionedDataModule(
        graph, sampler=NeighborSampler([4, 4]), batch_size=500, loading=Loading(sample_on="device")
    )
    running, module = trainer(1, accelerator="gpu"), SAGE(256, 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    running.validate(module, data, verbose=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < graph.num_bytes / 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_sharded_graph(device: str, tmp_path: Path) -> None:
    graph = small_graph()
    save_shards(graph, Partition(torch.zeros(600, dtype=torch.int32), 1), tmp_path / "shares")
    options: dict[str, Any] = {"sampler": NeighborSampler([4, 4]), "batch_size": 16}
    plain, other = (fit(on, "llcg", PartitionedDataModule(tmp_path / "shares", **options)) for on in ("cpu", device))
    assert seeds_of(other) == seeds_of(plain)
    assert other.came_on == {"cuda" if device == "gpu" else "cpu"}


def fit_parts(
    rank: int, world_size: int, sample_on: Any, name: str = "drift", device: str = "cpu"
) -> tuple[State, list[int]]:
    """On parts that change, with batches that only fill passes up."""
    residency, partitioner = Redeal(12), RandomPartitioner()
    data = PartitionedDataModule(
        small_graph(),
        partitioner=partitioner,
        holding=Holding(residency, every=1),
        sampler=NeighborSampler([4, 4]),
        batch_size=5,
        loading=Loading(sample_on=sample_on),
    )
    module = Watched()
    torch.manual_seed(0)
    strategy = {**every_strategy(), "drift": drifting}[name]()
    trainer(world_size, strategy, accelerator=device, max_epochs=4).fit(module, data)
    return state_of(module), torch.cat(module.trained).tolist()


def drifting() -> LLCGStrategy:
    return LLCGStrategy(EverySteps(3), drift=Drift("ranks"), **PATIENCE)


@pytest.mark.slow
def test_parts_that_change() -> None:
    plain, other = run_ranks(fit_parts, 2, "cpu"), run_ranks(fit_parts, 2, "device")
    for (state, seeds), (same, seeds_again) in zip(plain, other, strict=True):
        assert seeds == seeds_again
        assert differs(state, same) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize("name", ["drift", *every_strategy()])
def test_ranks_on_two_gpus(name: str) -> None:
    plain, other = run_ranks(fit_parts, 2, "cpu", name), run_ranks(fit_parts, 2, "auto", name, "gpu")
    for (state, seeds), (same, seeds_again) in zip(plain, other, strict=True):
        assert seeds == seeds_again
        assert differs(state, same) < 2e-2


@pytest.mark.slow
def test_the_benchmark_runs_without_a_gpu() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "sampling_cuda.py"
    small = ["--device", "cpu", "--num-nodes", "2000", "--num-edges", "20000", "--batch-size", "64", "--repeats", "1"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as in RAM: yes") == 5
    for part in ("evaluation, ", "corrections, ", "links, "):
        assert f"\n{part}" in done.stdout
