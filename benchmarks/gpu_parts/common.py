"""What the measured parts share: sizes, a graph, its batches, a model and clocks that wait for the device."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from lightning_gnn_dist import Graph, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.homes.settings import SampleOn

DEVICE = torch.device("cuda", 0)
CLASSES = 32
NUM_NEIGHBORS = [15, 10, 5]
IS_PRETENDED = bool(os.environ.get("PRETEND_CUDA"))  # as the sources of pretended devices are told to be there


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        num_nodes: Nodes of the graph.
        num_edges: Edges that are drawn; those drawn twice are merged.
        num_features: Floats of a node.
        hidden: Width of the model.
        batch_size: Seeds of a batch.
        pass_batches: Batches of a pass of which only the time of a batch is asked.
        epoch_batches: Batches of an epoch.
        repeats: How often a figure is taken; the least counts.
        seconds: What a pass may take, beyond which the rest is reckoned.
    """

    num_nodes: int = 2_000_000
    num_edges: int = 40_000_000
    num_features: int = 128
    hidden: int = 256
    batch_size: int = 1024
    pass_batches: int = 32
    epoch_batches: int = 196  # a tenth of the nodes are seeds
    repeats: int = 3
    seconds: float = 8.0


SCALES = {"full": Scale(), "small": Scale(4000, 40_000, 16, 32, 64, 6, 8, 1, 2.0)}


def made_graph(scale: Scale, num_batches: int) -> Graph:
    """A graph in RAM whose ends of edges have a heavy tail, with seeds for so many batches. It is drawn on the device.

    The end of an edge is the node of rank ``N u ** 2.5``, so the largest degree of 2 M nodes is some 100,000.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    n, options = scale.num_nodes, {"generator": generator, "device": DEVICE}

    def ends() -> Tensor:
        drawn = torch.rand(scale.num_edges, dtype=torch.float64, **options)
        return mixed[(drawn**2.5 * n).long()]

    mixed = torch.randperm(n, **options)
    edges = (ends() * n + ends()).unique()  # in the order of receivers
    receivers = edges // n
    indptr = torch.zeros(n + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(receivers, minlength=n).cumsum(0).cpu()
    train_mask = torch.zeros(n, dtype=torch.bool)
    train_mask[torch.randperm(n, **options)[: num_batches * scale.batch_size].cpu()] = True
    arrays = {
        "x": torch.randn(n, scale.num_features, **options).cpu(),
        "y": torch.randint(CLASSES, (n,), **options).cpu(),
        "train_mask": train_mask,
        "val_mask": ~train_mask & (torch.arange(n) % 64 == 0),
    }
    return Graph(indptr, (edges % n).int().cpu(), arrays)


def places() -> dict[str, Loading]:
    """Where batches can be made, as :class:`Loading` offers it, with the settings that suit each."""
    names = [name for name in get_args(SampleOn) if name not in ("auto", "cpu")]
    made = {f'sample_on="{name}", bulks of {size}': _on(name, size) for name in names for size in (1, 4, 16)}
    threads = {f'sample_on="cpu", {number} threads': Loading(num_threads=number) for number in (1, 8)}
    return made | threads


IN_RAM = Loading(num_threads=8)


def best_places() -> dict[str, Loading]:
    """One for each place."""
    names = [name for name in get_args(SampleOn) if name not in ("auto", "cpu")]
    return {f'sample_on="{name}"': _on(name, 16) for name in names} | {'sample_on="cpu"': IN_RAM}


def _on(name: Any, bulk_size: int) -> Loading:
    return Loading(sample_on=name, bulk_size=bulk_size)


def trainer_on(accelerator: str = "gpu", strategy: Any = "auto", **options: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    more = {"devices": 1, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    return pl.Trainer(accelerator=accelerator, strategy=strategy, **quiet, **more, **options)


def data_of(graph: Graph, scale: Scale, loading: Loading) -> PartitionedDataModule:
    sampler = NeighborSampler(NUM_NEIGHBORS)
    return PartitionedDataModule(graph, sampler=sampler, batch_size=scale.batch_size, loading=loading)


def attached(data: PartitionedDataModule, accelerator: str = "gpu") -> Any:
    """A data module as a trainer would have it; returns its loader, whose batches are on the device of the trainer."""
    data.trainer = trainer_on(accelerator)
    data.setup("fit")
    return data.train_dataloader()


class Net(nn.Module):
    """GraphSAGE of three layers, on blocks or on a whole batch."""

    def __init__(self, scale: Scale, form: str = "adj") -> None:
        super().__init__()
        widths = [scale.num_features, scale.hidden, scale.hidden, CLASSES]
        torch.manual_seed(0)
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))
        self.form = form

    def forward(self, batch: Any) -> Tensor:
        x, last = batch.x, len(self.convs) - 1
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), getattr(block, self.form))
            x = x if layer == last else x.relu()
        return x


class TrimmedNet(Net):
    """The same on ``edge_index``, as PyG's loaders have it."""

    def forward(self, batch: Any) -> Tensor:
        x, edge_index, last = batch.x, batch.edge_index, len(self.convs) - 1
        for layer, conv in enumerate(self.convs):
            x, edge_index, _ = trim_to_layer(layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
            x = conv(x, edge_index)
            x = x if layer == last else x.relu()
        return x[: batch.batch_size]


class Training:
    """A model on the device, and its steps."""

    def __init__(self, net: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.net, self._dtype = net.to(DEVICE), dtype
        self._optimizer = torch.optim.Adam(self.net.parameters(), lr=0.003)

    def step(self, batch: Any) -> Tensor:
        self._optimizer.zero_grad()
        with nullcontext() if self._dtype is None else torch.autocast("cuda", self._dtype):
            loss = loss_of(self.net(batch), batch)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def loss_of(out: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(out, batch.y[: batch.batch_size])


class Module(pl.LightningModule):
    """The same step under a trainer."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.net = Net(scale)

    def training_step(self, batch: Any) -> Tensor:
        return loss_of(self.net(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


def now() -> float:
    torch.cuda.synchronize(DEVICE)
    return time.perf_counter()


def least_seconds(function: Callable[[], object], repeats: int) -> float:
    """The least wall time of a call, after one that does not count."""
    function()
    times = []
    for _ in range(repeats):
        start = now()
        function()
        times.append(now() - start)
    return min(times)


def seconds_a_batch(batches: Iterable[Any], use: Callable[[Any], object], most: float) -> float:
    """Seconds of a batch and its use, in a pass that ends when ``most`` seconds are over."""
    start, taken = now(), 0
    for batch in batches:
        use(batch)
        taken += 1
        if time.perf_counter() - start > most:
            break
    return (now() - start) / taken


def on_device(batches: Iterable[Any]) -> Iterator[Any]:
    return (batch.to(DEVICE) for batch in batches)


def peak_since_last() -> str:
    """The most memory of the device that was held since this was last asked."""
    peak = torch.cuda.max_memory_allocated(DEVICE) / 1e6
    torch.cuda.reset_peak_memory_stats(DEVICE)
    return f"at most {peak:,.0f} MB of the device held"


def notes_of_pretending() -> Counter[tuple[str, str, str]]:
    from pretend import notes

    return notes
