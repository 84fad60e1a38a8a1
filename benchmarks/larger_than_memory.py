"""Some of many chunks at a time (``Sweep``): what a step costs, and what it does to the accuracy.

    lightning-gnn-dist reorder big chunks --chunks 512 --partitioner streaming
    python benchmarks/larger_than_memory.py steps chunks --held 12       # in a control group with little memory
    python benchmarks/larger_than_memory.py steps chunks                 # all in memory
    python benchmarks/larger_than_memory.py steps chunks --held 16 --steps -1  # a sweep, beside `inspect --sweep`
    python benchmarks/larger_than_memory.py accuracy DIRECTORY/arxiv_topology.npz --held 128 --of 512 --seed 0

``steps`` trains GraphSAGE 128-256-32 with fan-out 15, 10 and 1,024 seeds on one computing thread, and prints wall time,
CPU time of all threads, and waiting, in milliseconds a step after the first 10, and the seconds of all steps.
``accuracy`` prints the test accuracy, exact and after the last step, of GraphSAGE with 64 hidden columns, dropout .3,
fan-out 10, 10, 512 seeds and Adam, whose learning rate goes from .01 to 0. Beside the file of the graph lies a
``read.py`` with ``to_pyg(path)``. Without ``--held`` all is in memory.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import load
from harness import LayeredSAGE, machine
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import Graph, Holding, Loading, NeighborSampler, PartitionedDataModule, Sweep, through_layers

FIRST = 10  # steps that are not counted
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Model(LayeredSAGE):
    """Notes what steps cost, and how many nodes of a test are right."""

    def __init__(self, widths: list[int], rate: float, dropout: float) -> None:
        super().__init__(widths)
        self.rate, self.dropout, self.costs, self.right = rate, dropout, list[list[float]](), list[Tensor]()

    def layer(self, conv: torch.nn.Module, batch: Any) -> Tensor:
        rows = super().layer(conv, batch)
        return rows if conv is self.convs[-1] else functional.dropout(rows, self.dropout, self.training)

    def on_train_start(self) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        used, data = resource.getrusage(resource.RUSAGE_SELF), self.trainer.datamodule  # type: ignore[attr-defined]
        self.figures = data.figures
        waited = self.figures["data/waited_seconds"] + self.figures.get("data/switch_waited_seconds", 0.0)
        self.costs.append([time.perf_counter(), used.ru_utime + used.ru_stime, waited])

    def test_step(self, batch: Any) -> None:
        self.right.append(through_layers(self, batch).argmax(1) == batch.y[: batch.batch_size])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def holding_of(options: argparse.Namespace) -> Holding:
    """All in memory, or so many chunks at a time."""
    return Holding() if options.held is None else Holding(Sweep(chunks=options.held, of=options.of))


def steps(options: argparse.Namespace) -> None:
    """Print what a step costs."""
    graph = Graph.open(options.graph)
    if options.held is None:
        arrays = {name: array.clone() for name, array in graph.node_arrays.items()}
        graph = Graph(graph.indptr.clone(), graph.indices.clone(), arrays)
    data = PartitionedDataModule(
        graph,
        holding=holding_of(options),
        sampler=NeighborSampler([15, 10]),
        loading=Loading(bulk_size=1),
        coverage=None,
    )
    model = Model([128, 256, max(32, int(graph.node_arrays["y"].max()) + 1)], 0.001, 0.0)
    length = {"max_epochs": 1} if options.steps < 0 else {"max_steps": options.steps}
    trainer = pl.Trainer(accelerator="cpu", devices=1, limit_val_batches=0, **length, **QUIET)
    trainer.fit(model, data)
    wall, cpu, waited = (1000 * (last - first) for first, last in zip(model.costs[FIRST], model.costs[-1], strict=True))
    count = len(model.costs) - FIRST - 1
    print(machine())
    print(f"held {options.held}: wall {wall / count:.1f}, CPU {cpu / count:.1f}, waited {waited / count:.1f} ms a step")
    print(f"{len(model.costs)} steps: {model.costs[-1][0] - model.started:.1f} s")
    print({name: figure for name, figure in model.figures.items() if name.startswith("data/sw")})


def accuracy(options: argparse.Namespace) -> None:
    """Print the accuracy of a test."""
    torch.manual_seed(options.seed)
    graph = Graph.from_pyg(load(options.graph.parent, options.graph.stem, 0))
    how: Any = {"sampler": NeighborSampler([10, 10]), "batch_size": 512, "seed": options.seed, "coverage": None}
    data = PartitionedDataModule(graph, holding=holding_of(options), **how)
    model = Model([graph.node_arrays["x"].shape[1], 64, int(graph.node_arrays["y"].max()) + 1], 0.01, 0.3)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=options.epochs, limit_val_batches=0, **QUIET)
    trainer.fit(model, data)
    trainer.test(model, PartitionedDataModule(graph, **how), verbose=False)
    print(f"held {options.held} of {options.of}, seed {options.seed}: {torch.cat(model.right).float().mean():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "accuracy"))
    parser.add_argument("graph", type=Path)
    parser.add_argument("--held", type=int, help="chunks at a time (default: all in memory)")
    parser.add_argument("--of", type=int, help="chunks in all (default: those of the saved graph, or 512)")
    parser.add_argument("--steps", type=int, default=200, help="-1: a whole sweep")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    (steps if options.what == "steps" else accuracy)(options)


if __name__ == "__main__":
    main()
