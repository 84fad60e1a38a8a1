"""Accuracy of training on parts, against training on the whole graph, on real graphs.

    python benchmarks/accuracy.py DIRECTORY --graphs cora dblp --methods full metis random --seeds 3

DIRECTORY holds ``<graph>.npz`` files and a ``read.py`` with ``to_pyg(path, split=...)``. Every method takes the same
number of local steps on each rank, the part as one batch, a two-layer model of hidden size 64 with Adam 0.01;
after every round the averaged model is evaluated on the whole graph, and the table shows the test accuracy at the
round of the best validation accuracy, mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    LLCGStrategy,
    LocalSGDStrategy,
    MetisPartitioner,
    PartitionedDataModule,
    Partitioner,
    RandomPartitioner,
    SuperNodePartitioner,
    WholePartSampler,
)
from lightning_gnn_dist.collectives import traffic

Method = tuple[Partitioner | None, Callable[[int], Strategy]]


def methods(supernodes: int) -> dict[str, Method]:
    """Name -> how the graph is cut, and how ranks meet after so many steps."""

    def averaging(steps: int) -> Strategy:
        return LocalSGDStrategy(EverySteps(steps), start_method="fork")

    def llcg(partitioner: Partitioner, **settings: Any) -> Method:
        return partitioner, lambda steps: LLCGStrategy(EverySteps(steps), start_method="fork", **settings)

    metis, dealt = MetisPartitioner(), RandomPartitioner()
    paper: dict[str, Any] = {"drift": None, "average_optimizer": False, "weights": "uniform"}
    ours: dict[str, Any] = {"average_optimizer": True, "weights": "nodes"}
    return {
        "llcg-1": llcg(metis, correction_steps=1, **paper),
        "llcg-share": llcg(metis, correction_steps=0.5, **paper),
        "drift-ranks": llcg(metis, correction_steps=0, drift="ranks", **ours),
        "drift-global": llcg(metis, correction_steps=0, drift="global", **ours),
        "drift-global-1": llcg(metis, correction_steps=1, drift="global", **ours),
        "random-llcg-1": llcg(dealt, correction_steps=1, **paper),
        "random-drift-global": llcg(dealt, correction_steps=0, drift="global", **ours),
        "random-drift-global-1": llcg(dealt, correction_steps=1, drift="global", **ours),
        "full": (None, lambda steps: SingleDeviceStrategy(torch.device("cpu"))),
        "metis": (MetisPartitioner(), averaging),
        "metis-train": (MetisPartitioner(balance="train"), averaging),
        "random": (RandomPartitioner(), averaging),
        "supernodes": (SuperNodePartitioner(supernodes), averaging),
    }


class SAGE(pl.LightningModule):
    """Two layers on blocks, full-graph inference for the curve."""

    def __init__(self, num_features: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(num_features, 64), SAGEConv(64, num_classes)])
        self.dropout = dropout

    def layers(self, x: Tensor, blocks: list[tuple[int, Any]]) -> Tensor:
        first, last = self.convs
        (num_dst, adj), (num_last, adj_last) = blocks
        x = functional.dropout(first((x, x[:num_dst]), adj).relu(), self.dropout, self.training)
        return last((x, x[:num_last]), adj_last)

    def training_step(self, batch: Any) -> Tensor:
        out = self.layers(batch.x, [(block.num_dst, block.adj) for block in batch.blocks])
        return functional.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Curve(pl.Callback):
    """After every round, on rank 0: the accuracy on all validation and test nodes of the whole graph."""

    def __init__(self, graph: Graph, every: int) -> None:
        self.graph, self.every = graph, every
        self.points: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: SAGE) -> None:  # type: ignore[override]
        if not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every:
            return
        graph, arrays = self.graph, self.graph.node_arrays
        ones = torch.ones(graph.num_edges)
        adj = torch.sparse_csr_tensor(graph.indptr, graph.indices.long(), ones, (graph.num_nodes,) * 2)
        pl_module.eval()
        with torch.no_grad():
            out = pl_module.layers(arrays["x"], [(graph.num_nodes, adj)] * 2).argmax(1)
        pl_module.train()
        right = (out == arrays["y"]).float()
        self.points.append(tuple(float(right[arrays[f"{k}_mask"]].mean()) for k in ("val", "test")))  # type: ignore[arg-type]


def run(graph: Graph, method: Method, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One training. Ranks are forked from here, and the curve comes back through a file of its own."""
    partitioner, make_strategy = method
    ranks = 1 if partitioner is None else options.parts
    pl.seed_everything(seed, verbose=False)
    # One process takes all the steps of a round as epochs of one step.
    epochs, every = (options.rounds * options.steps, options.steps) if ranks == 1 else (options.rounds, 1)
    num_classes = int(graph.node_arrays["y"].max()) + 1
    model = SAGE(graph.node_arrays["x"].shape[1], num_classes, options.dropout)
    curve = Curve(graph, every)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=make_strategy(options.steps),
        max_epochs=epochs,
        callbacks=[curve, Report(curve, Path(options.scratch))],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
    )
    data = PartitionedDataModule(
        graph,
        partitioner=partitioner,
        sampler=WholePartSampler(num_hops=2),
        batch_size=10**9,
        seed=seed,
        num_threads=0,
    )
    start = time.perf_counter()
    trainer.fit(model, data)
    outcome: dict[str, Any] = json.loads(Path(options.scratch).read_text())
    return outcome | {"seconds": time.perf_counter() - start}


class Report(pl.Callback):
    """Hands rank 0's results to the process that forked it."""

    def __init__(self, curve: Curve, file: Path) -> None:
        self.curve, self.file = curve, file

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            best = max(range(len(self.curve.points)), key=lambda i: self.curve.points[i][0])
            val, test = self.curve.points[best]
            sent = traffic.bytes_sent * trainer.world_size
            self.file.write_text(json.dumps({"val": val, "test": test, "round": best + 1, "bytes": sent}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--methods", nargs="+", default=["full", "metis", "random"])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--supernodes", type=int, default=400)
    parser.add_argument("--scratch", default="accuracy.tmp.json", help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print(f"{'graph':18} {'method':14} {'test accuracy':16} round     MB  seconds")
    for name in options.graphs:
        for method in options.methods:
            outcomes = [one(options, name, method, seed) for seed in range(options.seeds)]
            show(name, method, outcomes)
    Path(options.scratch).unlink(missing_ok=True)


def one(options: argparse.Namespace, name: str, method: str, seed: int) -> dict[str, Any]:
    graph = Graph.from_pyg(load(options.directory, name, seed))
    outcome = run(graph, methods(options.supernodes)[method], options, seed)
    if options.out:
        settings = {
            "graph": name,
            "method": method,
            "seed": seed,
            "parts": options.parts,
            "steps": options.steps,
        }
        with options.out.open("a") as file:
            file.write(json.dumps(settings | outcome) + "\n")
    return outcome


def load(directory: Path, name: str, seed: int) -> Any:
    """Another split for every seed, where the file has several."""
    spec = importlib.util.spec_from_file_location("read", directory / "read.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{directory} has no read.py with to_pyg(path, split=...).")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    masks = reader.read(directory / f"{name}.npz").get("split_train")
    data = reader.to_pyg(directory / f"{name}.npz", split=seed % (1 if masks is None else len(masks)))
    for key in [key for key in data.to_dict() if key not in ("x", "y", "edge_index") and not key.endswith("_mask")]:
        del data[key]
    return data


def show(name: str, method: str, outcomes: list[dict[str, Any]]) -> None:
    def mean(key: str) -> float:
        return statistics.mean(outcome[key] for outcome in outcomes)

    spread = statistics.stdev(outcome["test"] for outcome in outcomes) if len(outcomes) > 1 else 0.0
    accuracy = f"{mean('test'):.3f} +- {spread:.3f}"
    figures = f"{mean('round'):5.1f} {mean('bytes') / 1e6:6.1f} {mean('seconds'):8.1f}"
    print(f"{name:18} {method:14} {accuracy:16} {figures}", flush=True)


if __name__ == "__main__":
    main()
