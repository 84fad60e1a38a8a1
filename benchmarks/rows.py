"""Graphs whose features are taken away, with learned rows: accuracy and bytes of sparse, dense and owned tables.

    python benchmarks/rows.py DIRECTORY --graphs cora dblp --ranks 4 --seeds 3 --passes 30 --batch-size 256

DIRECTORY is that of ``accuracy.py``. A two-layer GraphSAGE of hidden size 64 with dropout 0.5, on rows of 64 numbers;
fan-out 10 and 10, batches of so many nodes for all ranks together, a round of one pass. Sparse tables are trained with
LazyAdam, as are those of GrappaStrategy whose rows live with one rank each; dense ones with Adam; all with rate 0.01.
The accuracy is that of the weights of the best of 15 validations, on all test nodes of the whole graph. Megabytes are
those that rank 0 sends in a pass, and seconds those of its CPU, with a share of the validations.

    python benchmarks/rows.py --memory 1000000 --ranks 4

Without a graph: the most memory that rank 0 takes in a fit with a table of so many rows, beyond what it had before,
and the bytes that it sends in a round. A round touches 50 batches of 4000 rows, nine of ten in the rank's part.
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
from functools import partial
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import load
from harness import keep
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torch_geometric.data import Data
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
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
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
    trainer = pl.Trainer(
        devices=ranks,
        strategy=STRATEGIES[arm](),
        max_epochs=options.passes,
        check_val_every_n_epoch=max(1, options.passes // VALIDATIONS),
        callbacks=[Outcome(options.scratch)],
        **QUIET,
    )
    size = options.batch_size // ranks
    trainer.fit(module, PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=size, seed=seed))
    outcome = torch.load(options.scratch)
    module.load_state_dict(outcome["weights"])
    alone = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256)
    (metrics,) = pl.Trainer(devices=1, **QUIET).test(module, alone, verbose=False)
    return {"test": metrics["accuracy"], "bytes": outcome["bytes"], "seconds": outcome["seconds"]}


class Large(pl.LightningModule):
    """Regression on rows of ids that are drawn."""

    def __init__(self, num_rows: int, table: str) -> None:
        super().__init__()
        self.num_rows, self.table = num_rows, table
        self.rows: Any = None
        self.head = torch.nn.Linear(64, 1)

    def configure_model(self) -> None:  # on the rank that trains it
        if self.rows is None:
            whole = {"owned": OwnedEmbedding, "sparse": partial(torch.nn.Embedding, sparse=True)}
            self.rows = whole[self.table](self.num_rows, 64)

    def train_dataloader(self) -> Any:
        rank, size = self.trainer.global_rank, self.trainer.world_size
        chance = torch.Generator().manual_seed(rank)
        own = [torch.randint(self.num_rows // size, (3600,), generator=chance) * size + rank for _ in range(50)]
        anywhere = torch.randint(self.num_rows, (50, 400), generator=chance)
        batches = [Data(ids=torch.cat(pair), batch_size=4000) for pair in zip(own, anywhere, strict=True)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Any) -> Tensor:
        return (self.head(self.rows(batch.ids)) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LazyAdam(self.parameters(), lr=0.01)


class Memory(pl.Callback):
    """Looks how much memory of its own the rank has while it trains, and hands the most to the process that forked."""

    def __init__(self, file: Path) -> None:
        self.file, self.most, self.before = file, 0, 0
        self.has_ended = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.before = own_bytes()
        Thread(target=self.look, daemon=True).start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_ended = True
        if trainer.is_global_zero:
            sent = collectives.traffic.bytes_sent / trainer.current_epoch
            self.file.write_text(json.dumps([self.most / 1e6, sent / 1e6]))

    def look(self) -> None:
        while not self.has_ended:
            self.most = max(self.most, own_bytes() - self.before)
            time.sleep(0.01)


def own_bytes() -> int:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def show_memory(arm: str, table: str, options: argparse.Namespace) -> None:
    """Train two rounds, and print a line."""
    trainer = pl.Trainer(
        devices=options.ranks,
        strategy=STRATEGIES[arm](),
        max_epochs=2,
        callbacks=[Memory(options.scratch)],
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(Large(options.memory, table))
    most, sent = json.loads(options.scratch.read_text())
    print(f"| {arm} | {table} | {most:.0f} | {sent:.0f} |", flush=True)


def is_pair(arm: str, table: str) -> bool:
    return table != "owned" or arm == "GrappaStrategy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--arms", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=30, help="over the training nodes")
    parser.add_argument("--batch-size", type=int, default=256, help="seeds of a batch on all ranks together")
    parser.add_argument("--memory", type=int, help="the rows of a table without a graph, whose memory is measured")
    parser.add_argument("--scratch", type=Path, default=Path("rows.tmp.pt"), help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    if options.memory:
        print("| strategy | table | MB of a rank | MB that it sends in a round |\n| --- | --- | --- | --- |")
        for arm, table in product([*STRATEGIES][1:], ["sparse", "owned"]):
            if arm in options.arms and arm != "LLCGStrategy" and is_pair(arm, table):  # LLCG needs a graph
                show_memory(arm, table, options)
        return
    if options.directory is None:
        parser.error("give the directory of the graphs, or --memory")
    print(
        "| graph | strategy | table | accuracy | MB a pass | s of CPU a pass |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in options.graphs:
        for arm in options.arms:
            for table in options.tables:
                if is_pair(arm, table):
                    show(name, arm, table, options)


def show(name: str, arm: str, table: str, options: argparse.Namespace) -> None:
    """Train with each seed, and print a line of the table."""
    found = []
    for seed in range(options.seeds):
        data = load(options.directory, name, seed)
        del data.x
        ranks = 1 if arm == "one process" else options.ranks
        found.append(run(Graph.from_pyg(data), arm, table, ranks, seed, options))
        settings = {"graph": name, "arm": arm, "table": table, "seed": seed, "passes": options.passes}
        keep(options.out, settings | found[-1])
    tests = [each["test"] for each in found]
    spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
    accuracy = f"{statistics.mean(tests):.3f} ± {spread:.3f}"
    megabytes = statistics.mean(each["bytes"] for each in found) / 1e6
    seconds = statistics.mean(each["seconds"] for each in found)
    print(f"| {name} | {arm} | {table} | {accuracy} | {megabytes:.2f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
