"""``lightning-gnn-dist demo``: train on parts of a built-in graph with a few processes, and on all of it with one."""

from __future__ import annotations

import argparse
import logging
import warnings
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist.boundary.boundary import Halo, Isolated
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.rounds.clock import EverySteps
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.strategies.correction import Correction
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.memory import memory_bytes

ADVICE = """Grappa where the bytes of a step travel in less time than the step takes: on one host, or at 10 Gbit/s. Else
local SGD, whose ranks meet once a round, and LLCG where its accuracy falls short."""


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    if options.ranks < 2:
        raise SystemExit("--ranks must be at least 2: the demo compares several processes with one.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    graph = communities(options.nodes)
    outcomes = run_demo(graph, ranks=options.ranks, rounds=options.rounds, steps=options.steps)
    if outcomes is None:
        return
    print(f"\n{graph}")
    for partitioner in (default_partitioner(graph.num_edges, memory_bytes()), RandomPartitioner()):
        print(f"\n{partitioner}\n{partitioner(graph, options.ranks, 0).report(graph)}")
    print(f"\n{as_table(outcomes)}\n\n{ADVICE}")


class SAGE(pl.LightningModule):
    """An ordinary module that knows nothing of ranks, with one convolution per block of the batch."""

    def __init__(self, num_features: int, num_classes: int, hidden: int = 64, lr: float = 0.01) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, hidden), SAGEConv(hidden, num_classes)])
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.lr = lr

    def forward(self, batch: Data) -> Tensor:
        x: Tensor = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), block.adj)
            if layer + 1 < len(self.convs):
                x = functional.dropout(x.relu(), training=self.training)
        return x

    def training_step(self, batch: Data) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def test_step(self, batch: Data) -> None:
        self.accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@dataclass(frozen=True)
class Outcome:
    """A line of the table at the end: a method, its test accuracy, and its cost."""

    method: str
    accuracy: float
    bytes_sent: float
    seconds: float


def run_demo(graph: Graph, *, ranks: int, rounds: int, steps: int, seed: int = 0) -> list[Outcome] | None:
    """Train on the whole graph in one process, then on parts of two kinds. Returns None on ranks other than 0.

    Every method takes the same number of local steps on each rank, and the single process as many as one rank.
    """
    warnings.filterwarnings("ignore", "You passed in a `val_dataloader`")
    torch.set_num_threads(1)  # the same for all methods; batches are small
    outcomes = []
    if LightningEnvironment().local_rank() == 0:  # first, because a process stays in a group that it has joined
        alone = SingleDeviceStrategy(torch.device("cpu"))
        outcomes.append(_train("one process, whole graph", graph, None, alone, 1, rounds * steps, seed))
    clock, half = EverySteps(steps), Correction(0.5, lr="local")
    cutter = default_partitioner(graph.num_edges, memory_bytes())
    cut = type(cutter).__name__.removesuffix("Partitioner").replace("Metis", "METIS")
    methods: list[tuple[str, Partitioner, Strategy]] = [
        (f"Grappa, {{}} ranks, {cut} parts, halo", cutter, GrappaStrategy()),
        (f"local SGD, {{}} ranks, {cut} parts", cutter, LocalSGDStrategy(clock)),
        ("local SGD, {} ranks, random parts", RandomPartitioner(), LocalSGDStrategy(clock)),
        (f"LLCG, {{}} ranks, {cut} parts", cutter, LLCGStrategy(clock, correction=half)),
        ("LLCG, {} ranks, random parts", RandomPartitioner(), LLCGStrategy(clock, correction=half)),
    ]
    for name, partitioner, strategy in methods:
        length = rounds if isinstance(strategy, RoundStrategy) else rounds * steps
        outcomes.append(_train(name.format(ranks), graph, partitioner, strategy, ranks, length, seed))
    return outcomes if collectives.rank() == 0 else None


def _train(
    method: str,
    graph: Graph,
    partitioner: Partitioner | None,
    strategy: Strategy,
    ranks: int,
    length: int,
    seed: int,
) -> Outcome:
    """Train for so many rounds or, where nobody meets in rounds, steps; then test."""
    pl.seed_everything(seed, verbose=False)
    in_rounds = isinstance(strategy, RoundStrategy)
    data = PartitionedDataModule(
        graph,
        partitioner=partitioner,
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
        boundary=Halo() if isinstance(strategy, GrappaStrategy) else Isolated(),
        seed=seed,
    )
    timer = Timer(interval="epoch")  # times the training alone: starting processes takes longer
    model = SAGE(graph.node_arrays["x"].shape[1], int(graph.node_arrays["y"].max()) + 1)
    trainer = pl.Trainer(
        max_epochs=length if in_rounds else -1,
        max_steps=-1 if in_rounds else length,
        callbacks=[timer],
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sent = collectives.traffic.bytes_sent
    trainer.fit(model, data)
    sent = collectives.traffic.bytes_sent - sent
    accuracy = trainer.test(model, data, verbose=False)[0]["accuracy"]
    return Outcome(method, accuracy, sent * ranks, timer.time_elapsed("train"))


def as_table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table, a line each."""
    width = max(len(outcome.method) for outcome in outcomes)
    lines = [f"{'method':{width}}  test accuracy   bytes sent   seconds"]
    lines += [
        f"{o.method:{width}}  {o.accuracy:13.3f}  {o.bytes_sent / 1e6:8.2f} MB  {o.seconds:8.1f}" for o in outcomes
    ]
    return "\n".join(lines)
