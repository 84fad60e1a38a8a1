"""Passes over a saved graph on two hosts by a strategy of this package: run it by two_hosts.sh, as run.py does.

GraphSAGE of 128-256-classes, [15, 10] neighbours, batches of 1024, Adam at .003, METIS parts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EveryPass,
    Graph,
    GrappaStrategy,
    Halo,
    Isolated,
    LLCGStrategy,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    Rounded,
)

WAYS: dict[str, Any] = {
    "grappa": (GrappaStrategy, Isolated()),
    "grappa-halo": (GrappaStrategy, Halo(2)),
    "local_sgd": (lambda: LocalSGDStrategy(EveryPass(1)), Isolated()),
    "llcg": (lambda: LLCGStrategy(EveryPass(1), reducer=Rounded(8)), Isolated()),
}


class Net(pl.LightningModule):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(width, 256), SAGEConv(256, classes)])
        self.clocks = 0.0, 0.0

    def training_step(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x.relu() if layer == 0 else x
        return functional.cross_entropy(x, batch.y[: batch.batch_size])

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch:
            self.tell()
        self.clocks = time.perf_counter(), time.process_time()

    def on_train_end(self) -> None:
        self.tell()

    def tell(self) -> None:
        if self.global_rank == 0:
            seconds, cpu = time.perf_counter() - self.clocks[0], time.process_time() - self.clocks[1]
            print(f"pass: {seconds:.2f} s, {cpu:.2f} CPU-s", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.003)


def trainer_on_two_hosts(strategy: Strategy, passes: int) -> pl.Trainer:
    """A trainer of one rank on each host that does nothing beside the training."""
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        max_epochs=passes,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--way", choices=WAYS, default="grappa")
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    graph = Graph.open(options.graph)
    strategy, boundary = WAYS[options.way]
    sampling: dict[str, Any] = {"sampler": NeighborSampler([15, 10]), "batch_size": 1024, "boundary": boundary}
    data = PartitionedDataModule(graph, partitioner=MetisPartitioner(), **sampling)
    trainer = trainer_on_two_hosts(strategy(), options.passes)
    pl.seed_everything(0, verbose=False)
    trainer.fit(Net(graph.node_arrays["x"].shape[1], max(int(graph.node_arrays["y"].max()) + 1, 32)), data)


if __name__ == "__main__":
    main()
