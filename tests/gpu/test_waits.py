"""The host runs ahead of a device: within an epoch it waits for it once a step under Grappa, and never in a round.

Batches are made in the background without a wait in RAM, and with one a bulk on the device.
"""

import threading
from collections import Counter
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batches import THREAD_NAME
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.homes.settings import SampleOn
from tests.boundary.models import Model
from tests.data_fitting import trainer
from tests.every_strategy import every_strategy
from tests.gpu.needs import COUNTS_WAITS, need_devices
from tests.layers.models import NUM_CLASSES, NUM_FEATURES
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning"),
    pytest.mark.skipif(find_spec("pretend") is None, reason=COUNTS_WAITS),
]
FIRST, LAST = 3, 11  # batches of one epoch or round of 16, after which waits are counted, and until which
PASSED_THROUGH = ("launchers.py", "loops.py")  # their frames lie around Lightning's own waits
STRATEGIES = every_strategy(16)


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


class Waits:
    """Where the package waits: the thread that trains, or those that make batches. Counts page-locked memory, too."""

    def __init__(self) -> None:
        import pretend

        where, self._pretend = pretend._where, pretend
        pretend._where = lambda: f"{where()} in {threading.current_thread().name}"

    def of(self, *, makers: bool) -> Counter[str]:
        with self._pretend._lock:
            noted = self._pretend.notes.copy()
        found = Counter[str]()
        for (kind, what, place), times in noted.items():
            in_thread = f" in {THREAD_NAME}" in place if makers else " in lightning_gnn_dist." not in place
            around = any(file in place for file in PASSED_THROUGH)
            if kind == "sync" and "lightning_gnn_dist/" in place and in_thread and not around:
                found[f"{what} at {place}"] += times
        return found

    @property
    def num_locked(self) -> int:
        """How often the system was asked for page-locked memory."""
        return int(self._pretend.lib.counts(False).get("pinned allocations", 0))


class Steps(pl.Callback):
    """Keeps where the thread that trains waited, and how often memory was locked."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.before, self.found = waits, Counter[str](), list[str]()
        self.num_locked = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == FIRST:
            self.before, self.num_locked = self.waits.of(makers=False), self.waits.num_locked
        if trainer.current_epoch == 1 and batch_idx == LAST:
            self.found = list((self.waits.of(makers=False) - self.before).elements())
            self.num_locked = self.waits.num_locked - self.num_locked


def kept_of_bulks(waits: Waits) -> list[list[str]]:
    """From now on, where the thread that makes a bulk waited."""
    make, found = GraphSource.make, list[list[str]]()

    def noted(self: GraphSource, *asked: Any) -> Any:
        before = waits.of(makers=True)
        made = make(self, *asked)
        if threading.current_thread().name.startswith(THREAD_NAME):
            found.append(list((waits.of(makers=True) - before).elements()))
        return made

    GraphSource.make = noted  # type: ignore[method-assign]
    return found


class WithRows(Net):
    """With a learned row for each node."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def training_step(self, batch: Any) -> Tensor:
        batch.x = batch.x + self.rows(batch.n_id)
        return super().training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return lgd.LazyAdam(self.parameters(), lr=0.01)


def fit(steps: Steps, loading: lgd.Loading, num_ranks: int, name: str, module: Net) -> None:
    graph = lgd.communities(4000, 4, num_features=16, train_share=0.6)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([5, 5]), batch_size=64, loading=loading)
    options: dict[str, Any] = {"callbacks": [steps], "limit_val_batches": 0, "accelerator": "gpu"}
    trainer(num_ranks, STRATEGIES[name](), **options).fit(module, data)


def waits(rank: int, world_size: int, name: str, sample_on: SampleOn) -> tuple[list[str], list[list[str]]]:
    waits = Waits()
    steps, bulks = Steps(waits), kept_of_bulks(waits)
    fit(steps, lgd.Loading(sample_on=sample_on), world_size, name, Net())
    return steps.found, bulks


def num_locked(rank: int, world_size: int, sample_on: SampleOn) -> int:
    steps = Steps(Waits())
    loading = lgd.Loading(sample_on=sample_on, num_threads=0)  # as many batches are ahead in each step
    fit(steps, loading, world_size, "grappa", Net())
    return steps.num_locked


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "sample_on"), [*((name, "cpu") for name in STRATEGIES), ("grappa", "device"), ("llcg", "device")]
)
def test_waits_of_a_step(name: str, sample_on: SampleOn, num_ranks: int) -> None:
    need_devices(num_ranks)
    for of_steps, of_bulks in run_ranks(waits, num_ranks, name, sample_on):
        assert len(of_steps) <= (LAST - FIRST if name == "grappa" else 0), "\n".join(of_steps)
        assert len(of_bulks) > 4
        for found in of_bulks[1:]:  # the first one copies the graph
            assert len(found) == (sample_on == "device"), "\n".join(found)


@pytest.mark.parametrize("sample_on", ["cpu", "device"])
def test_no_memory_is_locked_in_a_step(sample_on: SampleOn) -> None:
    assert run_ranks(num_locked, 1, sample_on) == [0]


def waits_with_rows(rank: int, world_size: int, name: str, is_owned: bool) -> list[str]:
    steps = Steps(Waits())
    rows = lgd.OwnedEmbedding(4000, 16) if is_owned else nn.Embedding(4000, 16, sparse=True)
    fit(steps, lgd.Loading(), world_size, name, WithRows(rows))
    return steps.found


@pytest.mark.parametrize(("name", "is_owned", "most"), [("grappa", False, 7), ("grappa", True, 9), ("tma", False, 1)])
def test_waits_of_a_step_with_learned_rows(name: str, is_owned: bool, most: int) -> None:
    need_devices(2)
    for found in run_ranks(waits_with_rows, 2, name, is_owned):
        assert len(found) <= most * (LAST - FIRST), "\n".join(found)


# Layers that exchange rows do not make the host wait: a step waits once, as without an exchange.


class Counts(pl.Callback):
    """Keeps where the host waited within some steps, but for Lightning's own waits."""

    def __init__(self, notes: Any) -> None:
        self.notes, self.waits = notes, Counter[str]()

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.notes.clear()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if 2 <= trainer.current_epoch < 6:
            for (kind, what, place), times in self.notes.items():
                if kind == "sync" and "site-packages" not in place and "launchers.py" not in place:
                    self.waits[f"{what} at {place}"] += times


def waits_of_exchange(rank: int, world_size: int, exchange: lgd.Exchange) -> Counter[str]:
    from pretend import notes

    graph = lgd.communities(400, NUM_CLASSES, num_features=NUM_FEATURES, train_share=0.6)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.WholePartSampler(3), boundary=exchange)
    counts = Counts(notes)
    options: dict[str, Any] = {"callbacks": [counts], "limit_val_batches": 0, "accelerator": "gpu", "max_epochs": 6}
    trainer(world_size, STRATEGIES["grappa"](), **options).fit(Model(SAGEConv, 3), data)
    return counts.waits


@pytest.mark.parametrize("exchange", [lgd.Exchange(), lgd.Exchange(overlap=True), lgd.Exchange(share=0.5)], ids=repr)
def test_a_step_that_exchanges_rows_waits_once(exchange: lgd.Exchange) -> None:
    need_devices(2)
    for found in run_ranks(waits_of_exchange, 2, exchange):
        assert found.total() <= 4, "\n".join(f"{times} x {place}" for place, times in found.items())
