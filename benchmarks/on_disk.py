"""Features four times as large as memory: rows of files asked for ahead, against all in memory; and what caches hold.

    python benchmarks/on_disk.py make big                       # 2 M nodes, 16 M edges, 512 features: 4.1 GB
    python benchmarks/on_disk.py make typed --typed --num-nodes 3000000  # rows of 1,024, 2,048 and 1,024 bytes: 4.0 GB
    python benchmarks/on_disk.py run big                        # as root: it makes a control group for each process
    python benchmarks/on_disk.py caches big                     # hits and bytes of three rules

``run`` trains so many steps in a process of its own for each way: with the features in memory and no limit; and in a
control group whose memory is a quarter of the features, which counts all that the process holds and what the system
caches of files for it. There rows are read through the map, or ahead (``Loading(cache_bytes=...)``); before, the system
lets go of the files. The first steps are not counted. A GraphSAGE of two layers behind a layer of the nodes' own rows,
of which ``--hidden`` says how long a step computes; one thread computes, another makes batches. "Computing" is the time
of steps with their batch at hand, "waited" what training waited for batches. "Read" is what is logged of rows, and "by
the disk" what the system counts, edges that were not in memory too. After each table stands the disk.

With ``--typed`` six tenths of the nodes are papers with float16 features, three tenths authors with float32, and all
others topics with float16, but for venues, one in a thousand, which learn their rows. Edges between two others than
papers are left out.

``caches`` counts, with room for 10, 25 and 50 % of the rows, in bulks as ``run`` makes them: the rows that are held
when a bulk needs them, and the megabytes that a bulk reads of the others: by Belady's rule with eight bulks known (as
here), by LRU, and with the rows of most receivers. Those are held before the start; reading them is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from sampling import power_law_communities
from shares import of_latest, of_most, of_soonest
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Fetch, Graph, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import typed_graph
from lightning_gnn_dist.graph.typed.build import EdgeTable, NodeTable, build

CLASSES = 32
SAMPLER, BULK = NeighborSampler([10, 5]), 2
GROUPS = Path("/sys/fs/cgroup")
WAYS = ("memory", "map", "ahead")


class Timed(pl.LightningModule):
    """Notes the times of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.steps, self.ends = 0.0, list[float](), list[float]()

    def training_step(self, batch: Any) -> Tensor:
        self.began = time.perf_counter()
        loss: Tensor = self.loss(batch)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.steps.append(self.ends[-1] - self.began)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Model(Timed):
    """Two layers behind a layer of the nodes' own rows."""

    def __init__(self, graph: Graph, hidden: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(graph.node_arrays["x"].shape[1], hidden)
        self.convs = torch.nn.ModuleList([SAGEConv(hidden, 256), SAGEConv(256, CLASSES)])

    def loss(self, batch: Any) -> Tensor:
        first, last = batch.blocks
        x = self.first(batch.x).relu()
        x = self.convs[0]((x, x[: first.num_dst]), first.adj).relu()
        out = self.convs[1]((x, x[: last.num_dst]), last.adj)
        return functional.cross_entropy(out, batch.y)


class TypedModel(Timed):
    """The same for each edge type; types without features have rows that are learned."""

    def __init__(self, graph: Graph, hidden: int) -> None:
        super().__init__()
        counts, arrays = graph.types.num_nodes, graph.types.node_arrays
        self.first = torch.nn.ModuleDict(
            {
                kind: torch.nn.Linear(of["x"].shape[1], hidden)
                if "x" in of
                else torch.nn.Embedding(counts[kind], hidden)
                for kind, of in arrays.items()
            }
        )
        ends = {kind: "__".join(kind) for kind in graph.types.edge_types}
        self.convs = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: SAGEConv(*widths) for name in ends.values()})
            for widths in ((hidden, 256), (256, CLASSES))
        )

    def loss(self, batch: Any) -> Tensor:
        x = {kind: of(batch[kind].x if "x" in batch[kind] else batch[kind].n_id) for kind, of in self.first.items()}
        for convs, blocks in zip(self.convs, batch.blocks, strict=True):
            found: dict[str, list[Tensor]] = {}
            for kind, block in blocks.items():
                if kind[0] not in x:  # nobody sends to it, so the first layer gives it no row
                    continue
                ends = x[kind[0]].relu(), x[kind[2]][: block.num_dst].relu()
                found.setdefault(kind[2], []).append(convs["__".join(kind)](ends, block.adj))
            x = {kind: torch.stack(rows).sum(0) for kind, rows in found.items()}
        return functional.cross_entropy(x["paper"], batch["paper"].y)


def make(options: argparse.Namespace) -> None:
    """Write a graph whose degrees follow a power law; a tenth of the nodes are seeds."""
    graph = power_law_communities(options.num_nodes, options.num_edges, CLASSES)
    if options.typed:
        graph = typed_graph_of(graph, options)
    else:
        x = features(options, "x", graph.num_nodes, np.float32)
        graph = Graph(graph.indptr, graph.indices, {"x": x} | labels(graph.num_nodes))
    graph.save(options.folder)
    for scratch in options.folder.parent.glob(f"{options.folder.name}.*.npy"):
        scratch.unlink()


def features(options: argparse.Namespace, name: str, count: int, dtype: Any) -> Tensor:
    """Write random numbers to a file, and return them mapped."""
    generator = np.random.default_rng(0)
    scratch = options.folder.with_suffix(f".{name}.npy")
    x = np.lib.format.open_memmap(scratch, "w+", dtype, (count, options.num_features))
    for first in range(0, count, 10_000):
        x[first : first + 10_000] = generator.standard_normal(x[first : first + 10_000].shape, np.float32)
    return torch.from_numpy(x)


def labels(count: int) -> dict[str, Tensor]:
    generator = np.random.default_rng(1)
    y, mask = generator.integers(CLASSES, size=count), generator.random(count) < 0.1
    return {"y": torch.from_numpy(y), "train_mask": torch.from_numpy(mask)}


def typed_graph_of(graph: Graph, options: argparse.Namespace) -> Graph:
    """The same nodes, whose ids say their types, and the edges of a paper at least."""
    ends = torch.tensor([0, *(round(share * graph.num_nodes) for share in (0.6, 0.9, 0.999)), graph.num_nodes])
    counts = dict(zip(("paper", "author", "topic", "venue"), ends.diff().tolist(), strict=True))
    made = (("paper", np.float16), ("author", np.float32), ("topic", np.float16))
    x: dict[str, dict[str, Tensor]] = {kind: {"x": features(options, kind, counts[kind], of)} for kind, of in made}
    x["venue"] = {}
    x["paper"] |= labels(counts["paper"])
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    kinds = [torch.bucketize(ids, ends[1:], right=True) for ids in (graph.indices.long(), receivers)]
    edges = {}
    for sender, receiver in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1)):
        at = (kinds[0] == sender) & (kinds[1] == receiver)
        pairs = torch.stack([graph.indices[at].long() - ends[sender], receivers[at] - ends[receiver]])
        edges[list(counts)[sender], "to", list(counts)[receiver]] = EdgeTable(pairs, {})
    return typed_graph(*build({kind: NodeTable(counts[kind], arrays) for kind, arrays in x.items()}, edges))


def in_memory(graph: Graph) -> Graph:
    """A copy in RAM."""
    nodes = {
        kind: {name: array.clone() for name, array in arrays.items()}
        for kind, arrays in graph.types.node_arrays.items()
    }
    types = replace(graph.types, node_arrays=nodes, edge_type=graph.types.edge_type.clone())
    return typed_graph(graph.indptr.clone(), graph.indices.clone(), types)


def bytes_of_features(graph: Graph) -> int:
    return sum(arrays["x"].nbytes for arrays in graph.types.node_arrays.values() if "x" in arrays)


def bytes_of_disk() -> int:
    """What the disk has read for this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def train(options: argparse.Namespace) -> None:
    """Train in one way, and print the figures as JSON."""
    torch.set_num_threads(1)
    cache = options.cache if options.way == "ahead" else None
    graph = Graph.open(options.folder)
    if options.way == "memory":
        graph = in_memory(graph)
    loading = Loading(bulk_size=BULK, ahead_bytes=options.ahead, cache_bytes=cache, check_values=False)
    data = PartitionedDataModule(graph, sampler=SAMPLER, batch_size=128, loading=loading, boundary=Fetch())
    model = (TypedModel if graph.types.have_names else Model)(graph, options.hidden)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=options.steps, limit_val_batches=0, enable_checkpointing=False, **quiet
    )

    class Figures(pl.Callback):
        before, after = dict[str, float](), dict[str, float]()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.after = data.figures | {"disk": bytes_of_disk()}
            if trainer.global_step == options.skipped:
                self.before = self.after

    trainer.callbacks.append(figures := Figures())  # type: ignore[attr-defined]
    trainer.fit(model, data)
    figure = {name: value - figures.before.get(name, 0.0) for name, value in figures.after.items()}
    print(
        json.dumps(
            {
                "seconds": model.ends[-1] - model.ends[options.skipped - 1],
                "computing": sum(model.steps[options.skipped :]),
                "waited": figure["data/waited_seconds"],
                "read": figure.get("data/fetched_bytes", float("nan")),
                "disk": figure["disk"],
                "hits": figures.after.get("data/cache_hit_rate", float("nan")),
            }
        )
    )


def let_go(folder: Path) -> None:
    """Have the system forget what it caches of the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def group_of(limit: int) -> Path:
    """Make a control group of so many bytes, of version 1 or 2; its files of processes and of memory differ."""
    parent = GROUPS / "memory" if (GROUPS / "memory").is_dir() else GROUPS
    group = parent / f"on-disk-{os.getpid()}"
    group.mkdir(exist_ok=True)
    name = "memory.limit_in_bytes" if parent != GROUPS else "memory.max"
    (group / name).write_text(str(limit))
    return group


def figures_of(way: str, options: argparse.Namespace, limit: int) -> dict[str, float]:
    """Train in one way in a process of its own."""
    let_go(options.folder)
    group = None if way == "memory" else group_of(limit)
    command = [sys.executable, __file__, "train", str(options.folder), "--way", way]
    for name in ("steps", "skipped", "hidden", "cache", "ahead"):
        command += [f"--{name}", str(getattr(options, name))]

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        done = subprocess.run(command, preexec_fn=join, stdout=subprocess.PIPE, check=True, text=True)
    finally:
        if group is not None:
            group.rmdir()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(options: argparse.Namespace) -> None:
    total = bytes_of_features(Graph.open(options.folder))
    limit = total // 4
    print(f"{total / 1e9:.2f} GB of features, limit {limit / 1e6:.0f} MB, cache {options.cache / 1e6:.0f} MB")
    print("| rows | turn | seconds | of all in memory | computing | waited | MB read a step | by the disk | held |")
    print("|---|---|---|---|---|---|---|---|---|")
    for turn in range(options.turns):
        base = 0.0  # seconds of the first way
        for way in options.ways:
            found = figures_of(way, options, limit)
            base = base or found["seconds"]
            cells = [f"{found[name]:.1f}" for name in ("seconds", "computing", "waited")]
            cells.insert(1, f"{found['seconds'] / base:.2f}")
            count = options.steps - options.skipped
            cells += [f"{found[name] / 1e6 / count:.1f}" for name in ("read", "disk")]
            print(f"| {way} | {turn} | {' | '.join(cells)} | {found['hits']:.0%} |", flush=True)
    print(f"\nDisk: {disk_of(options.folder)}")


def disk_of(folder: Path) -> str:
    """The device that a folder lies on, its file system, and what Linux knows of it."""
    told = subprocess.run(["df", "--output=source,fstype", folder], stdout=subprocess.PIPE, check=True, text=True)
    device, kind = told.stdout.split()[-2:]
    queue = Path("/sys/class/block") / Path(device).name / "queue"
    facts = {name: (queue / name).read_text().strip() for name in ("rotational", "read_ahead_kb") if queue.is_dir()}
    return f"{device}, {kind}, " + ", ".join(f"{name} {value}" for name, value in facts.items())


def caches(options: argparse.Namespace) -> None:
    """Print what three rules hold of the rows that bulks need."""
    graph = Graph.open(options.folder)
    seeds, width = graph.split("train"), graph.node_arrays["x"][:1].nbytes
    seeds = seeds[torch.randperm(len(seeds), generator=torch.Generator().manual_seed(0))]
    bulks = []
    for first in range(0, options.steps, BULK):
        numbers = range(first, first + BULK)
        places = [torch.arange(i * 128, (i + 1) * 128) % len(seeds) for i in numbers]
        samples = SAMPLER.sample_bulk(graph, [seeds[at] for at in places], [BatchKey(0, 0, i) for i in numbers])
        bulks.append(torch.cat([sample.nodes for sample in samples]).unique())
    degrees, asked = graph.degrees(), sum(map(len, bulks))
    print("| room | Belady: hits | MB a bulk | LRU: hits | MB a bulk | most receivers: hits | MB a bulk |")
    print("|---|---|---|---|---|---|---|")
    for share in (0.1, 0.25, 0.5):
        room = int(share * graph.num_nodes)
        found = of_soonest(bulks, degrees, room), of_latest(bulks, room), of_most(bulks, degrees, room)
        cells = [f"{hits / asked:.0%} | {(asked - hits) * width / len(bulks) / 1e6:.1f}" for hits in found]
        print(f"| {share:.0%} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["make", "run", "train", "caches"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--typed", action="store_true")
    parser.add_argument("--num-nodes", type=int, default=2_000_000)
    parser.add_argument("--num-edges", type=int, default=16_000_000)
    parser.add_argument("--num-features", type=int, default=512)
    parser.add_argument("--steps", type=int, default=170)
    parser.add_argument("--skipped", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cache", type=int, default=100_000_000)
    parser.add_argument("--ahead", type=int, default=60_000_000)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    {"make": make, "run": run, "train": train, "caches": caches}[options.what](options)


if __name__ == "__main__":
    main()
