"""A training step of ranks whose torch takes memory in pages of 2 MB, and in pages of 4 kB, in turns in one run.

    python benchmarks/large_pages.py                        # two ranks, 500,000 nodes, 10 M edges: minutes

GraphSAGE 128-256-32 on [15, 10] neighbours of the whole graph, batches of 1024, LocalSGDStrategy with ranks that the
strategy starts as fresh processes. Each pair of fits is one of THP_MEM_ALLOC_ENABLE=0 and one where it is not set.
Prints CPU milliseconds of a step of rank 0, batches included: the median of all but the first steps, and what they are
of one another.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from harness import machine
from sampling import power_law_communities
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import EverySteps, Fetch, Graph, LocalSGDStrategy, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.rounds.launching.launch import Launch
from lightning_gnn_dist.wire.launching.processes import LARGE_PAGES

QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(128, 256), SAGEConv(256, 32)])
        self.seconds: list[float] = []

    def training_step(self, batch: Any) -> Tensor:
        self.seconds.append(time.process_time())
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj).relu()
        return functional.cross_entropy(x, batch.y[: batch.batch_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(num_nodes: int, num_edges: int, steps: int) -> float:
    """Milliseconds of a step of rank 0."""
    graph = power_law_communities(num_nodes, num_edges)
    arrays = {"x": torch.randn(num_nodes, 128), "y": torch.arange(num_nodes) % 32}
    arrays |= {"train_mask": torch.ones(num_nodes, dtype=torch.bool)}
    graph, model = Graph(graph.indptr, graph.indices, arrays), Net()
    sampling: dict[str, Any] = {"sampler": NeighborSampler([15, 10]), "batch_size": 1024, "boundary": Fetch()}
    data = PartitionedDataModule(graph, partitioner=RandomPartitioner(), **sampling)
    strategy = LocalSGDStrategy(EverySteps(steps), launch=Launch(start_method="forkserver"))
    pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, enable_progress_bar=False, **QUIET).fit(
        model, data
    )
    seconds = torch.tensor(model.seconds).double().diff()[5:]
    return 1e3 * float(seconds.median())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-nodes", type=int, default=500_000)
    parser.add_argument("--num-edges", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--one", action="store_true", help="a single fit, as the environment says")
    options = parser.parse_args()
    if options.one:
        print(fit(options.num_nodes, options.num_edges, options.steps))
        return
    print(machine())
    found: dict[str, list[float]] = {"4 kB": [], "2 MB": []}
    for _ in range(options.pairs):
        for name, times in found.items():
            variables = {key: value for key, value in os.environ.items() if key != LARGE_PAGES}
            variables |= {"OMP_NUM_THREADS": "1"} | ({LARGE_PAGES: "0"} if name == "4 kB" else {})
            ran = subprocess.run([sys.executable, *sys.argv, "--one"], env=variables, capture_output=True, text=True)
            if ran.returncode:
                sys.exit(ran.stderr)
            times.append(float(ran.stdout.split()[-1]))
    ratios = [large / small for large, small in zip(found["2 MB"], found["4 kB"], strict=True)]
    for name, times in found.items():
        print(f"pages of {name}: {statistics.median(times):.1f} CPU-ms a step ({min(times):.1f} to {max(times):.1f})")
    print(f"2 MB / 4 kB: {statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
