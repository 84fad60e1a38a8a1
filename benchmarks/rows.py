"""Graphs whose features are taken away, with learned rows: accuracy and bytes of sparse, dense and owned tables.

    python benchmarks/rows.py DIRECTORY --graphs cora dblp --ranks 4 --seeds 3 --passes 30 --batch-size 256

DIRECTORY is that of ``accuracy.py``. A two-layer GraphSAGE of hidden size 64 with dropout 0.5, on rows of 64 numbers;
fan-out 10 and 10, batches of so many nodes for all ranks together, a round of one pass. Sparse tables are trained with
LazyAdam, as are owned ones, whose rows live with one rank each; dense ones with Adam; all with rate 0.01. The accuracy
is that of the weights of the best of 15 validations, on all test nodes of the whole graph. Megabytes are those that
rank 0 sends in a pass, and seconds those of its CPU, with a share of the validations.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import load
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    Launch,
    LazyAdam,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    OwnedEmbedding,
    PartitionedDataModule,
)
from lightning_gnn_dist.wire import collectives

VALIDATIONS = 15
TABLES = ["sparse", "dense", "owned"]
FORK = Launch(start_method="fork")
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one process": lambda: SingleDeviceStrategy(torch.device("cpu")),
    "LocalSGDStrategy": lambda: LocalSGDStrategy(launch=FORK),
    "LLCGStrategy": lambda: LLCGStrategy(launch=FORK),
    "GrappaStrategy": lambda: GrappaStrategy(launch=FORK),
}


class Rows(pl.LightningModule):
    """GraphSAGE on learned rows."""

    def __init__(self, num_nodes: int, num_classes: int, table: str) -> None:
        super().__init__()
        if table == "owned":
            self.rows: Any = OwnedEmbedding(num_nodes, 64, std=0.1)
        else:
            self.rows = torch.nn.Embedding(num_nodes, 64, sparse=table == "sparse")
            torch.nn.init.normal_(self.rows.weight, std=0.1)
        self.convs = torch.nn.ModuleList([SAGEConv(64, 64), SAGEConv(64, num_classes)])
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch: Any) -> Tensor:
        first, last = batch.blocks
        x = functional.dropout(self.rows(batch.n_id), 0.5, self.training)
        x = self.convs[0]((x, x[: first.num_dst]), first.adj).relu()
        x = functional.dropout(x, 0.5, self.training)
        out: Tensor = self.convs[1]((x, x[: last.num_dst]), last.adj)
        return out

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        self.accuracy(self(batch), batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        make: Any = LazyAdam if self.rows.sparse else torch.optim.Adam
        return make(self.parameters(), lr=0.01)


class Outcome(pl.Callback):
    """Keeps the weights of the best validation, and hands them to the process that forked rank 0."""

    def __init__(self, file: Path) -> None:
        self.file, self.best, self.before, self.start = file, -1.0, 0.0, 0.0
        self.weights: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before, self.start = collectives.traffic.bytes_sent, time.process_time()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and (found := float(trainer.callback_metrics["accuracy"])) > self.best:
            self.best, self.weights = found, copy.deepcopy(pl_module.state_dict())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            sent = (collectives.traffic.bytes_sent - self.before) / trainer.current_epoch
            seconds = (time.process_time() - self.start) / trainer.current_epoch
            torch.save({"weights": self.weights, "bytes": sent, "seconds": seconds}, self.file)


def run(graph: Graph, arm: str, table: str, ranks: int, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One training."""
    pl.seed_everything(seed, verbose=False)
    module = Rows(graph.num_nodes, int(graph.node_arrays["y"].max()) + 1, table)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    trainer = pl.Trainer(
        devices=ranks,
        strategy=STRATEGIES[arm](),
        max_epochs=options.passes,
        check_val_every_n_epoch=max(1, options.passes // VALIDATIONS),
        callbacks=[Outcome(options.scratch)],
        **quiet,
    )
    size = options.batch_size // ranks
    trainer.fit(module, PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=size, seed=seed))
    outcome = torch.load(options.scratch)
    module.load_state_dict(outcome["weights"])
    alone = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256)
    (metrics,) = pl.Trainer(devices=1, **quiet).test(module, alone, verbose=False)
    return {"test": metrics["accuracy"], "bytes": outcome["bytes"], "seconds": outcome["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--arms", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=30, help="over the training nodes")
    parser.add_argument("--batch-size", type=int, default=256, help="seeds of a batch on all ranks together")
    parser.add_argument("--scratch", type=Path, default=Path("rows.tmp.pt"), help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print(
        "| graph | strategy | table | accuracy | MB a pass | s of CPU a pass |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in options.graphs:
        for arm in options.arms:
            for table in options.tables:
                if table != "owned" or arm == "GrappaStrategy":
                    show(name, arm, table, options)


def show(name: str, arm: str, table: str, options: argparse.Namespace) -> None:
    """Train with each seed, and print a line of the table."""
    found = []
    for seed in range(options.seeds):
        data = load(options.directory, name, seed)
        del data.x
        ranks = 1 if arm == "one process" else options.ranks
        found.append(run(Graph.from_pyg(data), arm, table, ranks, seed, options))
        if options.out:
            settings = {"graph": name, "arm": arm, "table": table, "seed": seed, "passes": options.passes}
            with options.out.open("a") as file:
                file.write(json.dumps(settings | found[-1]) + "\n")
    tests = [each["test"] for each in found]
    spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
    accuracy = f"{statistics.mean(tests):.3f} ± {spread:.3f}"
    megabytes = statistics.mean(each["bytes"] for each in found) / 1e6
    seconds = statistics.mean(each["seconds"] for each in found)
    print(f"| {name} | {arm} | {table} | {accuracy} | {megabytes:.2f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
