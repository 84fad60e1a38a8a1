"""The formulas of cost_model.py against what happens: sampling on R-MAT graphs that grow, and runs of four processes.

    python benchmarks/cost_check.py DIRECTORY            # the tables of cost_model.md; DIRECTORY as for accuracy.py

"Counted" is what a rank sends in a pass, mean of four, after the first. The formula knows the degrees, the cut and the
settings, and nothing of the run. Gradients of plain DDP are torch's to send and are left out of both.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from accuracy import SAGE, load
from cost_model import Batch, Degrees, Measured, Setting, epoch
from lightning.pytorch.strategies import DDPStrategy
from scale import rmat
from torch_geometric.utils import to_undirected

from lightning_gnn_dist import (
    EverySteps,
    Fetch,
    Graph,
    GrappaStrategy,
    Isolated,
    Launch,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    TMAStrategy,
    save_shards,
)
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.source import ShardedSource
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.collectives import traffic

RANKS, STEPS, LOCAL_STEPS, MOST_FEATURES = 4, 16, 4, 128
LIMIT = timedelta(seconds=120)
LAUNCH = Launch(timeout=LIMIT, start_method="fork")
STRATEGIES: dict[str, Callable[[], Any]] = {
    "local SGD": lambda: LocalSGDStrategy(EverySteps(LOCAL_STEPS), launch=LAUNCH),
    "TMA": lambda: TMAStrategy(EverySteps(LOCAL_STEPS), launch=LAUNCH),
    "LLCG": lambda: LLCGStrategy(EverySteps(LOCAL_STEPS), launch=LAUNCH),
    "Grappa": lambda: GrappaStrategy(launch=LAUNCH),
    "DDP, global sampling": lambda: DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=LIMIT),
}


def rmat_graph(bits: int, edges_per_node: int = 12) -> Graph:
    """An R-MAT graph with 64 float16 features; a tenth of its nodes train."""
    num_nodes = 1 << bits
    edges = torch.from_numpy(rmat(bits, edges_per_node * num_nodes, 0, 0))
    mask = torch.rand(num_nodes, generator=torch.Generator().manual_seed(0)) < 0.1
    arrays = {"x": torch.rand(num_nodes, 64).half(), "y": torch.zeros(num_nodes, dtype=torch.int64), "train_mask": mask}
    return Graph.from_edge_index(to_undirected(edges.long()), num_nodes, arrays)


def sampled(graph: Graph, fanouts: tuple[int, ...], batch_size: int) -> Batch:
    """The mean of eight batches."""
    generator, nodes, edges = torch.Generator().manual_seed(0), [], []
    for number in range(8):
        seeds = torch.randperm(graph.num_nodes, generator=generator)[:batch_size]
        (made,) = NeighborSampler(list(fanouts)).sample_bulk(graph, [seeds], [BatchKey(0, 0, number)])
        nodes.append(made.num_sampled_nodes)
        edges.append(made.num_sampled_edges)
    return Batch(tuple(np.mean(nodes, 0).tolist()), tuple(np.mean(edges, 0).tolist()))


def real_graph(directory: Path, name: str) -> Graph:
    """A graph of the folder, with some of its features: they count by their number alone."""
    data = load(directory, name, 0)
    data.x = data.x[:, :MOST_FEATURES].contiguous()
    return Graph.from_pyg(data)


def growth(most_bits: int) -> None:
    """Nodes of a batch on R-MAT graphs of growing size, and what the degrees of a graph of that size promise."""
    print("| nodes | edges stored | nodes a batch | formula | off by | edges a batch | formula | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for bits in range(14, most_bits + 1):
        graph = rmat_graph(bits)
        seen = sampled(graph, (15, 10), 1024)
        promised = Batch.around(1024, Degrees.rmat(graph.num_nodes, graph.num_edges), (15, 10))
        cells = [f"{graph.num_nodes:,}", f"{graph.num_edges:,}"]
        for real, formula in ((seen.nodes, promised.nodes), (seen.edges, promised.edges)):
            cells += [f"{sum(real):,.0f}", f"{sum(formula):,.0f}", f"{sum(formula) / sum(real) - 1:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


class Count(pl.Callback):
    """Bytes a step, without the first epoch, which is a round for strategies of rounds; a file for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, [(0, 0.0)]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append((trainer.global_step, traffic.bytes_sent))
        (first, before), (last, after) = self.seen[1], self.seen[-1]
        np.save(self.folder / f"{trainer.global_rank}.npy", (after - before) / max(last - first, 1))


def run(folder: Path, strategy: str, num_features: int, num_classes: int, batch_size: int) -> tuple[float, int]:
    """Bytes that a rank sends in a pass, and the model's bytes."""
    has_rounds = strategy in ("local SGD", "TMA", "LLCG")
    data = PartitionedDataModule(
        folder / "shares",
        sampler=NeighborSampler([10, 5]),
        batch_size=batch_size,
        boundary=Fetch() if strategy.startswith("DDP") else Isolated(),
    )
    model, counted = SAGE([num_features, 32, num_classes], dropout=0.0), Count(folder)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=STRATEGIES[strategy](),
        max_epochs=1 + (STEPS // LOCAL_STEPS if has_rounds else 1),
        limit_val_batches=0,
        callbacks=[counted],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    sent = STEPS * float(np.mean([np.load(folder / f"{rank}.npy") for rank in range(RANKS)]))
    return sent, sum(parameter.nbytes for parameter in model.parameters())


def compare(name: str, graph: Graph, partitioner: Partitioner, scratch: Path) -> None:
    """A row for every strategy."""
    partition = partitioner(graph, RANKS, seed=0)
    save_shards(graph, partition, scratch / "shares")
    most = int(partition.report(graph).train_nodes.max())  # type: ignore[union-attr]
    width = sum(array[:1].nbytes for array in Shard.open(scratch / "shares", 0).rows.node_arrays.values())
    setting = Setting(
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        features=0,
        other_bytes=width,
        train_share=RANKS * most / graph.num_nodes,
        hosts=RANKS,
        cut=partition.report(graph).cut_ratio,
        fanouts=(10, 5),
        batch_size=-(-most // STEPS),
        local_steps=LOCAL_STEPS,
        round_seconds=1e-9,
    )
    degrees, classes = Degrees.of(graph.degrees().numpy()), int(graph.node_arrays["y"].max()) + 1
    for strategy in STRATEGIES:
        counted, model = run(scratch, strategy, graph.node_arrays["x"].shape[1], classes, setting.batch_size)
        model = 0 if strategy.startswith("DDP") else model
        formula = "local SGD" if strategy == "TMA" else strategy  # by steps here, so that the rounds are known
        promised = epoch(formula, replace(setting, model_bytes=model), degrees, Measured()).num_bytes
        figures = [f"{counted / 1e6:.3f}", f"{promised / 1e6:.3f}", f"{promised / counted - 1:+.1%}"]
        print(f"| {name} | {setting.cut:.0%} | {strategy} | {' | '.join(figures)} |", flush=True)


def drawing(graph: Graph, scratch: Path) -> None:
    """Nanoseconds an edge of batches made by the code that samples across shares, on one core."""
    save_shards(graph, RandomPartitioner()(graph, 1, seed=0), scratch / "one")
    whole = ShardedGraph(Shard.open(scratch / "one", 0), Channel(None, 1, 0))
    seeds = torch.randperm(graph.num_nodes)[: 16 * 1024].sort().values.view(-1, 1024)
    source = ShardedSource(whole, NeighborSampler([15, 10]), Loading())
    next(source.make([seeds[0]], [BatchKey(0, 0, 0)]))
    start, edges, nodes = time.process_time(), 0, 0
    for number, own in enumerate(seeds):
        (made,) = source.make([own], [BatchKey(0, 0, number)])
        edges, nodes = edges + sum(made.num_sampled_edges), nodes + made.num_nodes
    seconds = time.process_time() - start
    rows = nodes * Measured().gather_ns * 1e-9
    print(f"\nacross shares: {1e9 * (seconds - rows) / edges:.0f} ns an edge, beside the rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["arxiv_topology", "musae_github"])
    parser.add_argument("--bits", type=int, default=20, help="the largest R-MAT graph has so many bits")
    options = parser.parse_args()
    torch.set_num_threads(1)  # before anything is forked
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    graphs = {name: real_graph(options.directory, name) for name in options.graphs} | {"R-MAT": rmat_graph(17)}
    with tempfile.TemporaryDirectory() as scratch:
        print("| graph | edges cut | strategy | MB counted | formula | off by |\n|---|---|---|---|---|---|")
        for name, graph in graphs.items():
            for partitioner in (RandomPartitioner(), MetisPartitioner()):
                place = Path(scratch, f"{name}-{type(partitioner).__name__}")
                place.mkdir()
                compare(name, graph, partitioner, place)
        drawing(rmat_graph(18), Path(scratch))
    print()
    growth(options.bits)


if __name__ == "__main__":
    main()
