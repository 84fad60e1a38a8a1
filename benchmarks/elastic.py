"""What the death of a rank costs: test accuracy of elastic TMA on real graphs, with a rank killed and without.

    python benchmarks/elastic.py DIRECTORY --graphs cora dblp --seeds 3 --out FILE

Three ranks average in 20 rounds of 16 steps. In half of the runs the last is killed before round 5, and nobody starts
it again. The others average without it, and the parts are dealt anew among them. DIRECTORY is that of ``accuracy.py``.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import load
from harness import keep, machine
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Elastic,
    EverySteps,
    Graph,
    NeighborSampler,
    PartitionedDataModule,
    SuperNodePartitioner,
    TMAStrategy,
)

RANKS, ROUNDS = 3, 20


class SAGE(pl.LightningModule):
    """Two layers, 64 wide."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(width, 64), SAGEConv(64, num_classes)])
        self.right = self.seen = 0

    def forward(self, batch: Any) -> torch.Tensor:
        first, second = self.convs
        hidden = functional.dropout(first(batch.x, batch.edge_index).relu(), training=self.training)
        rows: torch.Tensor = second(hidden, batch.edge_index)[: batch.batch_size]
        return rows

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self(batch), batch.y)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.right += int((self(batch).argmax(1) == batch.y).sum())
        self.seen += batch.batch_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Killed(pl.Callback):
    """Kills the last rank when a round begins."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.at and os.environ["LIGHTNING_GNN_DIST_RANK"] == str(RANKS - 1):
            os.kill(os.getpid(), signal.SIGKILL)


def be_rank(options: argparse.Namespace) -> None:
    """Train, test, and write the accuracy, which every living rank has of all test nodes."""
    warnings.filterwarnings("ignore")
    seed = options.seeds
    graph = Graph.from_pyg(load(options.directory, options.graphs[0], seed))
    pl.seed_everything(seed)
    data = PartitionedDataModule(
        graph, partitioner=SuperNodePartitioner(), sampler=NeighborSampler([15, 10]), batch_size=256, seed=seed
    )
    model = SAGE(graph.node_arrays["x"].shape[1], int(graph.node_arrays["y"].max()) + 1)
    strategy, quiet = TMAStrategy(EverySteps(16), peers=Elastic()), {"logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=ROUNDS,
        callbacks=[] if options.kill is None else [Killed(options.kill)],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
    )
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    options.rank.with_name(os.environ["LIGHTNING_GNN_DIST_RANK"]).write_text(str(model.right / model.seen))


def accuracy(options: argparse.Namespace, graph: str, seed: int, kill: int | None) -> float:
    """Start all ranks, and return what those that lived have written, which is one number."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "lightning_gnn_dist", "elastic", "--ranks", str(RANKS), "--", sys.executable, __file__]
        command += [str(options.directory), "--graphs", graph, "--seeds", str(seed), "--rank", f"{folder}/rank"]
        command += [] if kill is None else ["--kill", str(kill)]
        subprocess.run([sys.executable, *command], check=kill is None, stdout=subprocess.DEVNULL)
        found = {float(file.read_text()) for file in Path(folder).iterdir()}
    (number,) = found
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora", "dblp"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    for name, kind in (("--rank", Path), ("--kill", int)):  # of the ranks that this starts
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
        return
    print(machine())
    for graph in options.graphs:
        for kill in (None, 5):
            found = [accuracy(options, graph, seed, kill) for seed in range(options.seeds)]
            keep(options.out, {"graph": graph, "kill": kill, "accuracy": found})
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            who = "nobody killed" if kill is None else f"the last rank killed before round {kill}"
            print(f"{graph}, {who}: {statistics.mean(found):.3f} ± {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
