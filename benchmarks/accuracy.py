"""Accuracy of training on parts, against training on the whole graph, on real graphs.

    python benchmarks/accuracy.py DIRECTORY --graphs cora dblp --methods full metis random --seeds 3

DIRECTORY holds ``<graph>.npz`` files and a ``read.py`` with ``to_pyg(path, split=...)``. Every method takes the same
number of local steps on each rank, the part as one batch, a two-layer model of hidden size 64 with Adam 0.01;
after every round the averaged model is evaluated on the whole graph, and the table shows the test accuracy at the
round of the best validation accuracy, mean and standard deviation over seeds, with the gradients that a rank computed.
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
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import keep
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.transforms import GCNNorm

from lightning_gnn_dist import (
    Correction,
    Coverage,
    Drift,
    EverySteps,
    Exchange,
    Fetch,
    Graph,
    GrappaStrategy,
    Halo,
    History,
    Holding,
    Isolated,
    Launch,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    Outer,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    Rotate,
    Rounded,
    SuperNodePartitioner,
    WholePartSampler,
    coverage_mean,
    through_layers,
)
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.wire.collectives import traffic

NO_KEY = BatchKey(0, 0, 0)  # nothing is drawn
SLOWMO = Outer(momentum=0.5)

MEANS: dict[str, dict[str, Any]] = {
    "slowmo": {"outer": SLOWMO},
    "outer": {"outer": Outer.diloco()},
    "outer-8": {"outer": Outer.diloco(), "reducer": Rounded(8)},
    "moments": {"average_optimizer": True},
    "slowmo-moments": {"outer": SLOWMO, "average_optimizer": True},
    "outer-moments": {"outer": Outer.diloco(), "average_optimizer": True},
}


@dataclass(frozen=True)
class Method:
    """How the graph is cut, and how ranks meet after so many steps."""

    strategy: Callable[[int], Strategy]
    partitioner: Partitioner | None = None  # None: one process, the whole graph
    every_step: bool = False  # gradients are exchanged at every step, so that an epoch is a step and not a round
    data: dict[str, Any] = field(default_factory=dict)


def methods(supernodes: int) -> dict[str, Method]:
    """What the names on the command line mean. ``metis``, ``random`` and ``supernodes`` alone are averaging."""
    paper: dict[str, Any] = {"drift": None, "average_optimizer": False, "outer": None, "weights": "uniform"}
    corrections: dict[str, dict[str, Any]] = {
        **{f"llcg-{n}": {"correction": Correction.as_published(s), **paper} for n, s in (("1", 1), ("share", 0.5))},
        "drift-ranks": {"correction": None, "drift": Drift("ranks")},
        "drift-ranks-1": {"correction": Correction(1), "drift": Drift("ranks")},
        "drift-global": {"correction": None, "drift": Drift("global")},
        "default": {},
        "drift-share": {"correction": Correction(0.5, lr="local")},
    }
    rotated = {"holding": Holding(Rotate())}
    gradients: dict[str, dict[str, Any]] = {
        "grappa": {},
        "grappa-halo": {"boundary": Halo()},
        "grappa-halo2": {"boundary": Halo(2)},
        "grappa-exchange": {"boundary": Exchange()},
        "grappa-exchange-share": {"boundary": Exchange(share=0.1)},
        "grappa-exchange-every": {"boundary": Exchange(every=5)},
        "grappa-exchange-overlap": {"boundary": Exchange(overlap=True)},
        "grappa-exchange-all": {"boundary": Exchange(every=2, overlap=True, share=0.5)},
        "grappa-rotate": rotated,
        "grappa-rotate-batch": {**rotated, "coverage": Coverage(level="batch")},
        "grappa-rotate-node": {**rotated, "coverage": Coverage()},
        "grappa-rotate-halo": {**rotated, "boundary": Halo()},
        "grappa-node": {"coverage": Coverage()},
    }
    cuts = {
        "metis": MetisPartitioner(),
        "random": RandomPartitioner(),
        "supernodes": SuperNodePartitioner(supernodes),
    }
    boundaries: dict[str, dict[str, Any]] = {"halo": {"boundary": Halo()}, "history": {"boundary": History()}}
    found = {
        "full": Method(lambda _: SingleDeviceStrategy(torch.device("cpu")), every_step=True),
        "ggs": Method(
            lambda _: DDPStrategy(start_method="fork"), cuts["metis"], every_step=True, data={"boundary": Fetch()}
        ),
        "subgraph": Method(averaging, cuts["metis"], data={"holding": Holding(extra_nodes=0.1, extra_of="graph")}),
    }
    for cut, partitioner in cuts.items():
        found[cut] = Method(averaging, partitioner)
        for name, settings in MEANS.items():
            found[f"{cut}-{name}"] = Method(partial(averaging, **settings), partitioner)
        for name, settings in corrections.items():
            found[f"{cut}-{name}"] = Method(partial(llcg, settings), partitioner)
        for name, data in boundaries.items():
            found[f"{cut}-{name}"] = Method(averaging, partitioner, data=data)
            found[f"{cut}-default-{name}"] = Method(partial(llcg, {}), partitioner, data=data)
        for name, data in gradients.items():
            found[f"{cut}-{name}"] = Method(grappa, partitioner, every_step=True, data=data)
    return found


def averaging(steps: int, **settings: Any) -> Strategy:
    return LocalSGDStrategy(EverySteps(steps), launch=Launch(start_method="fork"), **settings)


def grappa(_: int, **settings: Any) -> Strategy:
    return GrappaStrategy(launch=Launch(start_method="fork"), **settings)


def llcg(settings: dict[str, Any], steps: int) -> Strategy:
    return LLCGStrategy(EverySteps(steps), launch=Launch(start_method="fork"), **settings)


class Model(pl.LightningModule):
    """Two or more layers of one kind, full-graph inference for the curve."""

    convs: torch.nn.ModuleList

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout, self.gradients = dropout, 0

    def activate(self, x: Tensor) -> Tensor:
        return functional.dropout(x.relu(), self.dropout, self.training)

    def layer(self, index: int, batch: Any) -> Tensor:
        """Return the rows of one layer, without what comes behind it."""
        raise NotImplementedError

    def layers(self) -> list[Callable[[Any], Tensor]]:
        def rows(index: int, batch: Any) -> Tensor:
            x = self.layer(index, batch)
            return self.activate(x) if index + 1 < len(self.convs) else x

        return [partial(rows, index) for index in range(len(self.convs))]

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)

    def training_step(self, batch: Any) -> Tensor:
        self.gradients, seeds = self.gradients + 1, slice(batch.batch_size)
        return coverage_mean(functional.cross_entropy(self(batch)[seeds], batch.y[seeds], reduction="none"), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SAGE(Model):
    """On blocks."""

    def __init__(self, sizes: list[int], dropout: float, norm: Callable[[int], torch.nn.Module] | None = None) -> None:
        super().__init__(dropout)
        self.convs = torch.nn.ModuleList(SAGEConv(*pair) for pair in pairwise(sizes))
        self.norms = torch.nn.ModuleList(norm(size) if norm else torch.nn.Identity() for size in sizes[1:-1])

    def layer(self, index: int, batch: Any) -> Tensor:
        (block,) = batch.blocks
        x = self.convs[index]((batch.x, batch.x[: block.num_dst]), block.adj)
        return self.norms[index](x) if index + 1 < len(self.convs) else x


class GCN(Model):
    """On edges, whose weights are normalised by the degrees of the whole graph."""

    def __init__(self, sizes: list[int], dropout: float) -> None:
        super().__init__(dropout)
        self.convs = torch.nn.ModuleList(GCNConv(*pair, normalize=False) for pair in pairwise(sizes))

    def layer(self, index: int, batch: Any) -> Tensor:
        return self.convs[index](batch.x, batch.edge_index, batch.edge_weight)[: batch.batch_size]


MODELS: dict[str, Callable[[list[int], float], Model]] = {
    "sage": SAGE,
    "sage-batchnorm": partial(SAGE, norm=torch.nn.BatchNorm1d),
    "gcn": GCN,
}


class Curve(pl.Callback):
    """After every round, on rank 0: the accuracy on all validation and test nodes of the whole graph."""

    def __init__(self, graph: Graph, every: int) -> None:
        self.graph, self.every = graph, every
        self.points: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or (trainer.current_epoch + 1) % self.every:
            return
        everyone = torch.arange(self.graph.num_nodes)
        (sample,) = WholePartSampler(num_hops=len(pl_module.convs)).sample_bulk(self.graph, [everyone], [NO_KEY])
        batch = assemble(self.graph, sample)
        pl_module.eval()
        with torch.no_grad():
            right = (pl_module(batch).argmax(1) == batch.y).float()
        pl_module.train()
        self.points.append(tuple(float(right[batch[f"{k}_mask"]].mean()) for k in ("val", "test")))  # type: ignore[arg-type]


def run(graph: Graph, method: Method, options: argparse.Namespace, seed: int, *others: pl.Callback) -> dict[str, Any]:
    """One training. Ranks are forked from here, and the curve comes back through a file of its own."""
    ranks = 1 if method.partitioner is None else options.parts
    pl.seed_everything(seed, verbose=False)
    every = options.steps if method.every_step else 1
    num_classes = int(graph.node_arrays["y"].max()) + 1
    hidden = [64] * (options.layers - 1)
    model = MODELS[options.model]([graph.node_arrays["x"].shape[1], *hidden, num_classes], options.dropout)
    curve = Curve(graph, every)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=method.strategy(options.steps),
        max_epochs=options.rounds * every,
        callbacks=[curve, Report(curve, Path(options.scratch)), *others],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
    )
    on_graph = method.data.get("boundary") == Fetch()
    sampler = NeighborSampler([-1] * options.layers) if on_graph else WholePartSampler(num_hops=options.layers)
    data = PartitionedDataModule(
        graph,
        partitioner=method.partitioner,
        sampler=NeighborSampler(options.fanout) if options.fanout else sampler,
        batch_size=options.batch_size if ranks > 1 else options.batch_size * options.parts,
        seed=seed,
        loading=Loading(num_threads=0),
        **({"coverage": None, "boundary": Isolated()} | method.data),
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
            if type(trainer.strategy) is DDPStrategy:
                sent += ddp_bytes(trainer, pl_module) * trainer.world_size
            more = {"last": self.curve.points[-1][1], "gradients": pl_module.gradients, "bytes": sent}
            self.file.write_text(json.dumps({"val": val, "test": test, "round": best + 1} | more))


def ddp_bytes(trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
    """What a rank sends in the ring that sums gradients, which is torch's own and not counted by the package."""
    values = sum(parameter.numel() for parameter in pl_module.parameters())
    return 2 * 4 * values * (trainer.world_size - 1) / trainer.world_size * trainer.global_step


def remote_bytes(graph: Graph, partition: Partition, hops: int) -> float:
    """What fetching remote features would move in one step: of all nodes within reach of the training nodes of a part
    and outside it, for all parts."""
    width = graph.node_arrays["x"].shape[1] * graph.node_arrays["x"].element_size()
    train, rows = graph.split("train"), 0
    for part in range(partition.num_parts):
        reach = train[partition.assignment[train] == part]
        for _ in range(hops):
            reach = torch.cat([reach, graph.halo(reach)])
        rows += int((partition.assignment[reach] != part).sum())
    return float(rows * width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--methods", nargs="+", default=["full", "metis", "random"])
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fanout", type=int, nargs="+", help="draw neighbours, rather than take all")
    parser.add_argument("--batch-size", type=int, default=10**9)
    parser.add_argument("--supernodes", type=int, default=400)
    parser.add_argument("--scratch", default="accuracy.tmp.json", help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print(f"{'graph':18} {'method':14} {'test accuracy':16} round gradients     MB  seconds")
    for name in options.graphs:
        for method in options.methods:
            outcomes = [one(options, name, method, seed) for seed in range(options.seeds)]
            show(name, method, outcomes)
    Path(options.scratch).unlink(missing_ok=True)


def one(options: argparse.Namespace, name: str, method: str, seed: int) -> dict[str, Any]:
    data = load(options.directory, name, seed)
    graph = Graph.from_pyg(GCNNorm()(data) if options.model == "gcn" else data)
    chosen = methods(options.supernodes)[method]
    outcome = run(graph, chosen, options, seed)
    if options.out:
        if chosen.partitioner is not None:
            partition = chosen.partitioner(graph, options.parts, seed)
            outcome["remote_bytes_per_step"] = remote_bytes(graph, partition, options.layers)
        settings = {
            "graph": name,
            "method": method,
            "seed": seed,
            "parts": options.parts,
            "supernodes": options.supernodes,
            "steps": options.steps,
            "rounds": options.rounds,
            "model": options.model,
            "layers": options.layers,
        }
        keep(options.out, settings | outcome)
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

    spread = statistics.stdev([outcome["test"] for outcome in outcomes]) if len(outcomes) > 1 else 0.0
    figures = f"{mean('round'):5.1f} {mean('gradients'):9.1f} {mean('bytes') / 1e6:6.1f} {mean('seconds'):8.1f}"
    print(f"{name:18} {method:14} {mean('test'):.3f} +- {spread:.3f}   {figures}", flush=True)


if __name__ == "__main__":
    main()
