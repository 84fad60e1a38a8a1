"""Some of many chunks at a time (``Sweep``): what a step costs, and what it does to the accuracy.

    lightning-gnn-dist reorder big chunks --chunks 512 --partitioner streaming
    python benchmarks/larger_than_memory.py steps chunks --held 12       # in a control group with little memory
    python benchmarks/larger_than_memory.py steps chunks                 # all in memory
    python benchmarks/larger_than_memory.py steps chunks --held 16 --steps -1  # a whole sweep
    python benchmarks/larger_than_memory.py accuracy DIRECTORY/arxiv_topology.npz --held 128 --of 512 --seed 0
    sudo python benchmarks/larger_than_memory.py world big --share 16  # one like ogbn-papers100M, from files to a test

``steps`` trains GraphSAGE 128-256-32 with fan-out 15, 10 and 1,024 seeds on one computing thread, and prints wall time,
CPU time of all threads, and waiting, in milliseconds a step after the first 10, and the seconds of all steps.
``accuracy`` prints the test accuracy, exact and after the last step, of GraphSAGE with 64 hidden columns, dropout .3,
fan-out 10, 10, 512 seeds and Adam, whose learning rate goes from .01 to 0. Beside the file of the graph lies a
``read.py`` with ``to_pyg(path)``. Without ``--held`` all is in memory.

``world`` takes a share of a graph with the numbers of ogbn-papers100M (111,059,956 nodes, 1,615,685,872 edges, 128
features, 172 classes, 1,207,179 nodes to train on) through all stages, on a host with the same share of 24 GB: it
writes files of edges and of int8 features, prepares them, cuts the graph into 512 chunks, puts it in their order,
trains for a sweep, and tests on batches that read rows from the files. Each stage is a process of its own in a control
group, appends its figures to ``stages.jsonl`` and removes the files of the stage before. After a kill the same command
goes on with the stage that was killed. Nodes are in communities of 2,000, each of a class, and seven edges in ten stay
inside.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from accuracy import load
from harness import LayeredSAGE, Peak, held, keep, machine
from on_disk import bytes_of_disk, group_of, let_go
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import (
    Evaluation,
    Graph,
    Holding,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    StreamingPartitioner,
    Sweep,
    prepare_graph,
    through_layers,
)
from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph
from lightning_gnn_dist.partition.cache import cached_partition

FIRST = 10  # steps that are not counted
RATE = 0.01  # of learning, at first
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class Model(LayeredSAGE):
    """Notes what steps cost, and how many nodes of a test are right."""

    def __init__(self, widths: list[int], rate: float, dropout: float) -> None:
        super().__init__(widths)
        self.rate, self.dropout, self.costs, self.right = rate, dropout, list[list[float]](), list[Tensor]()

    def layer(self, conv: torch.nn.Module, batch: Any) -> Tensor:
        if batch.x.dtype == torch.int8:
            batch.x = batch.x.float() / 64
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
        self.figures = self.trainer.datamodule.figures  # type: ignore[attr-defined]
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
    model = Model([graph.node_arrays["x"].shape[1], 64, int(graph.node_arrays["y"].max()) + 1], RATE, 0.3)
    alone: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, **QUIET}
    pl.Trainer(max_epochs=options.epochs - options.exact, **alone).fit(model, data)
    if options.exact:
        model.rate = 0.3 * RATE
        pl.Trainer(max_epochs=options.exact, **alone).fit(model, PartitionedDataModule(graph, **how))
    pl.Trainer(**alone).test(model, PartitionedDataModule(graph, **how), verbose=False)
    recipe = f"held {options.held} of {options.of}, the last {options.exact} epochs exact, seed {options.seed}"
    print(f"{recipe}: {torch.cat(model.right).float().mean():.4f}")


NODES, EDGES, SEEDS = 111_059_956, 1_615_685_872, {"train": 1_207_179, "val": 125_265, "test": 214_338}
FEATURES, FIELDS, COMMUNITY, CHUNKS, INSIDE = 128, 172, 2000, 512, 0.7
SCATTER = 2_654_435_761  # a prime beyond all ids: ids say nothing about communities
EDGES_PER_FILE, NODES_PER_FILE = 1 << 22, 1 << 20
HOST = 24e9  # bytes of a whole one


def generate(options: argparse.Namespace, out: Path) -> None:
    """Write the files, piece by piece; a piece is a function of its number."""
    for name in ("edge_index", "x"):
        (out / name).mkdir(parents=True)
    num_communities = NODES // options.share // COMMUNITY
    num_nodes = num_communities * COMMUNITY
    for piece, first in enumerate(range(0, EDGES // options.share, EDGES_PER_FILE)):
        draw = np.random.Generator(np.random.Philox(key=[0, piece]))
        count = min(EDGES_PER_FILE, EDGES // options.share - first)
        community = draw.integers(num_communities, size=(2, count))
        community[0] = np.where(draw.random(count) < INSIDE, community[1], community[0])
        place = (draw.random((2, count)) ** 3 * COMMUNITY).astype(np.int64)  # some have many edges
        ends = (community * COMMUNITY + place) * SCATTER % num_nodes
        np.save(out / "edge_index" / f"{piece:05}.npy", ends.astype(np.int32))
    back, centres = pow(SCATTER, -1, num_nodes), np.random.default_rng(0).integers(-20, 21, (FIELDS, FEATURES), np.int8)
    labels = np.lib.format.open_memmap(out / "y.npy", "w+", np.int64, (num_nodes,))
    for piece, first in enumerate(range(0, num_nodes, NODES_PER_FILE)):
        ids = np.arange(first, min(first + NODES_PER_FILE, num_nodes))
        labels[ids] = ids * back % num_nodes // COMMUNITY % FIELDS
        noise = np.random.Generator(np.random.Philox(key=[1, piece])).integers(-100, 101, (len(ids), FEATURES), np.int8)
        np.save(out / "x" / f"{piece:05}.npy", centres[labels[ids]] + noise)
    chosen = np.random.default_rng(1).permutation(num_nodes)
    for name, count in SEEDS.items():
        some, chosen = np.split(chosen, [count // options.share])
        np.save(out / f"{name}_idx.npy", np.sort(some))


def prepare(options: argparse.Namespace, out: Path) -> None:
    prepare_graph(options.graph / "generate", out, memory_bytes=round(options.limit / 6))


def cut(options: argparse.Namespace, out: Path) -> None:
    """The partition is kept beside the graph."""
    made = cached_partition(Graph.open(options.graph / "prepare"), StreamingPartitioner(), CHUNKS, 0)
    np.save(out, made.assignment.numpy())


def order(options: argparse.Namespace, out: Path) -> None:
    graph = Graph.open(options.graph / "prepare")
    made = cached_partition(graph, StreamingPartitioner(), CHUNKS, 0)
    reorder_graph(graph, made, out, memory_bytes=round(options.limit / 4))


def of_world(options: argparse.Namespace, **more: Any) -> tuple[Model, PartitionedDataModule, dict[str, Any]]:
    """The model, a data module of the graph in the order of chunks, and what trainers take."""
    data = PartitionedDataModule(
        options.graph / "order", sampler=NeighborSampler([15, 10]), batch_size=1024, coverage=None, **more
    )
    length = {"max_epochs": 1} if options.steps < 0 else {"max_steps": options.steps}
    return Model([FEATURES, 256, FIELDS], 0.003, 0.0), data, {"accelerator": "cpu", "devices": 1, **length, **QUIET}


def train(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """A sweep over all chunks, or some steps of it."""
    sweep = Holding(Sweep(bytes=round(options.limit / 4)))
    model, data, length = of_world(options, holding=sweep, loading=Loading(bulk_size=1))
    trainer = pl.Trainer(limit_val_batches=0, **length)
    trainer.fit(model, data)
    trainer.save_checkpoint(out)
    waited = model.costs[-1][2]
    return {"steps": trainer.global_step, "chunks": data.holding.residency.chunks, "waited": waited}  # type: ignore[attr-defined]


def evaluate(options: argparse.Namespace, out: Path) -> dict[str, float]:
    """An estimate of the accuracy, of batches that are drawn as in training, from the whole graph."""
    loading = Loading(bulk_size=1, cache_bytes=round(options.limit / 8), ahead_bytes=round(options.limit / 16))
    how = Evaluation(batch_size=1024, sampler=NeighborSampler([15, 10]))
    model, data, length = of_world(options, loading=loading, evaluation=how)
    model.load_state_dict(torch.load(options.graph / "train", weights_only=False)["state_dict"])
    pl.Trainer(**length).test(model, data, verbose=False)
    right = torch.cat(model.right).float()
    np.save(out, right.numpy())
    return {
        "seeds": len(right),
        "accuracy": float(right.mean()),
        "GB of rows": model.figures.get("data/fetched_bytes", 0.0) / 1e9,
    }


Stage = Callable[[argparse.Namespace, Path], dict[str, float] | None]
STAGES: dict[str, tuple[Stage, tuple[str, ...]]] = {  # and what it leaves no need for
    "generate": (generate, ()),
    "prepare": (prepare, ("generate",)),
    "cut": (cut, ()),
    "order": (order, ("prepare", "cut.npy")),
    "train": (train, ()),
    "evaluate": (evaluate, ()),
}


def stage(options: argparse.Namespace) -> None:
    """Do one stage, and append its figures."""
    work, _ = STAGES[options.stage]
    out, start, peak, before = options.graph / options.stage, time.perf_counter(), Peak("RssAnon"), held("RssAnon")
    if out.is_dir():  # of files that are half written; the package itself leaves none
        shutil.rmtree(out)
    found = work(options, out) or {}
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    figures = {"seconds": seconds, "CPU": used.ru_utime + used.ru_stime, "GB held": (before + peak.stop()) / 1e9}
    figures |= {"GB read": bytes_of_disk() / 1e9} | found
    figures["GB of files"] = sum(file.stat().st_size for file in options.graph.rglob("*") if file.is_file()) / 1e9
    keep(options.graph / "stages.jsonl", {"stage": options.stage} | figures)


def in_group(limit: int, command: list[str]) -> None:
    """Run a command in a control group of so many bytes."""
    group = group_of(limit)
    try:
        subprocess.run(["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command], check=True)
    finally:
        group.rmdir()


def world(options: argparse.Namespace) -> None:
    """Do all stages that are left, each in a process of its own, and print their figures."""
    if options.stage:
        stage(options)
        return
    options.graph.mkdir(exist_ok=True)
    file, command = options.graph / "stages.jsonl", [sys.executable, __file__, *sys.argv[1:]]
    done = {json.loads(line)["stage"] for line in file.read_text().splitlines()} if file.exists() else set()
    for name, (_, spent) in STAGES.items():
        if name not in done:
            let_go(options.graph)
            in_group(round(options.limit), [*command, "--stage", name])
        for path in (options.graph / each for each in spent):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    print(f"{machine()}\na share of 1/{options.share}, in {options.limit / 1e9:.2f} GB")
    for line in file.read_text().splitlines():
        print(
            {name: round(value, 3) if isinstance(value, float) else value for name, value in json.loads(line).items()}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "accuracy", "world"))
    parser.add_argument("graph", type=Path)
    parser.add_argument("--share", type=int, default=1, help="of world: one part in so many")
    parser.add_argument("--limit", type=float, help="of world: GB of the host (default: the share of 24)")
    parser.add_argument("--stage", choices=STAGES, help="of world: do this one alone, in this process")
    parser.add_argument("--held", type=int, help="chunks at a time (default: all in memory)")
    parser.add_argument("--of", type=int, help="chunks in all (default: those of the saved graph, or 512)")
    parser.add_argument("--steps", type=int, help="default: 200, and of world -1, a whole sweep")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--exact", type=int, default=0, help="of accuracy: of these, that see all edges, at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.steps = (-1 if options.what == "world" else 200) if options.steps is None else options.steps
    options.limit = HOST / options.share if options.limit is None else options.limit * 1e9
    torch.set_num_threads(1)
    {"steps": steps, "accuracy": accuracy, "world": world}[options.what](options)


if __name__ == "__main__":
    main()
