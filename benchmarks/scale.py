"""What graphs cost that are larger than memory: prepared under an enforced memory limit, cut, and trained on.

    python benchmarks/scale.py generate rmat25 --num-edges 25000000          # 0.5 GB of files, half a minute
    python benchmarks/scale.py prepare rmat25 graph25 --limit 4              # a row of the table in scale.md
    python benchmarks/scale.py prepare rmat25 graph25 --limit 4 --kind as    # all address space, not only data
    python benchmarks/scale.py in-memory rmat25 graph25                      # to compare with
    python benchmarks/scale.py partition graph25 --parts 64                  # seconds and memory
    python benchmarks/scale.py train graph25 --parts 64 --ranks 2            # one pass, and what a rank holds

The limit holds for the process that prepares: RLIMIT_DATA counts everything that it may write to and that is not a
file, RLIMIT_AS its files and libraries too. Peak memory is the kernel's VmHWM.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections import defaultdict
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from accuracy import SAGE
from harness import Peak, held
from numpy.typing import NDArray
from torch_geometric.utils import to_undirected

from lightning_gnn_dist import (
    EveryPass,
    Graph,
    Isolated,
    Launch,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    RandomPartitioner,
    StreamingPartitioner,
)
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY, Preparation

EDGES_PER_FILE = 1 << 22
EDGES_PER_NODE = 12  # of the list, before the reverse edges
CORNERS = (0.57, 0.19, 0.19, 0.05)  # of Graph500
SCATTER = 0x9E3779B97F4A7C15  # odd, so that multiplying by it modulo a power of two is a permutation
LIMITS = {"data": resource.RLIMIT_DATA, "as": resource.RLIMIT_AS}


def rmat(bits: int, count: int, seed: int, piece: int) -> NDArray[np.int32]:
    """R-MAT edges (Chakrabarti, Zhan & Faloutsos, SDM 2004) among ``2 ** bits`` nodes, shape (2, count).

    Each bit of the two ends chooses a quarter of the adjacency matrix. Ids are sharded, so that hubs do not stand
    side by side. A piece is a function of the seed and its number.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, piece]))
    ends = np.zeros((2, count), np.uint64)
    steps = np.cumsum(CORNERS).astype(np.float32)
    for _ in range(bits):
        draw = generator.random(count, np.float32)
        ends <<= np.uint64(1)
        ends[0] |= draw >= steps[1]
        ends[1] |= ((draw >= steps[0]) & (draw < steps[1])) | (draw >= steps[2])
    return (ends * np.uint64(SCATTER) & np.uint64((1 << bits) - 1)).astype(np.int32)


def generate(options: argparse.Namespace) -> None:
    """Write the edges, features of float16, labels and lists of nodes."""
    (options.folder / "edge_index").mkdir(parents=True)
    (options.folder / "x").mkdir()
    bits = max(1, round(np.log2(options.num_edges / EDGES_PER_NODE)))
    num_nodes, generator = 1 << bits, np.random.default_rng(options.seed)
    for piece, first in enumerate(range(0, options.num_edges, EDGES_PER_FILE)):
        count = min(EDGES_PER_FILE, options.num_edges - first)
        np.save(options.folder / "edge_index" / f"{piece:05}.npy", rmat(bits, count, options.seed, piece))
    for piece, first in enumerate(range(0, num_nodes, 1 << 20)):
        rows = generator.random((min(1 << 20, num_nodes - first), options.num_features), np.float32)
        np.save(options.folder / "x" / f"{piece:05}.npy", rows.astype(np.float16))
    np.save(options.folder / "y.npy", generator.integers(16, size=num_nodes))
    np.save(options.folder / "train_idx.npy", np.sort(generator.permutation(num_nodes)[: num_nodes // 10]))
    print(f"{options.folder}: {num_nodes:,} nodes, {options.num_edges:,} edges")


def limited(kind: str, limit: int) -> None:
    """Hold this process to so many bytes, and try whether that is enforced."""
    resource.setrlimit(LIMITS[kind], (limit, limit))
    try:
        np.ones(limit, np.uint8)
    except MemoryError:
        return
    raise SystemExit(f"The limit of {limit:,} bytes is not enforced here.")


def prepare_limited(options: argparse.Namespace) -> None:
    """Prepare under the limit, and print a row: seconds and CPU nanoseconds per edge of each stage, peak memory."""
    limited(options.kind, round(options.limit * 1e9))
    before = {name: held(name) / 1e9 for name in ("VmRSS", "VmData", "VmSize")}
    wall: dict[str, float] = defaultdict(float)
    cpu: dict[str, float] = defaultdict(float)
    last = [time.perf_counter(), time.process_time()]

    def on_progress(stage: str, share: float) -> None:
        now = [time.perf_counter(), time.process_time()]
        wall[stage] += now[0] - last[0]
        cpu[stage] += now[1] - last[1]
        last[:] = now

    start = time.perf_counter(), time.process_time()
    made = Preparation(options.source, options.out, undirected=True, memory_bytes=round(options.memory * 1e9)).run(
        on_progress
    )
    seconds, busy = time.perf_counter() - start[0], time.process_time() - start[1]
    stages = ", ".join(f"{stage} {1e9 * cpu[stage] / options.edges:.0f}" for stage in cpu)
    print(
        f"| {options.edges:,} | {made.num_nodes:,} | {made.num_edges:,} | {seconds:.0f} | "
        f"{1e9 * seconds / options.edges:.0f} | {1e9 * busy / options.edges:.0f} | {held('VmHWM') / 1e9:.2f} | "
        f"{held('VmHWM') / 1e9 - before['VmRSS']:.2f} |"
    )
    print(f"CPU ns per edge: {stages}")
    print("before: " + ", ".join(f"{name} {value:.2f} GB" for name, value in before.items()))


def prepare(options: argparse.Namespace) -> None:
    """In a child, which holds nothing yet and whose limit ends with it."""
    files = (options.source / "edge_index").iterdir()
    options.edges = sum(np.load(file, mmap_mode="r").shape[1] for file in files)
    child = multiprocessing.get_context("spawn").Process(target=prepare_limited, args=(options,))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)


def in_memory(options: argparse.Namespace) -> None:
    """The same graph sorted in memory, by PyG and ``Graph.from_edge_index``: a row to compare with."""
    arrays = {
        name: [np.load(file) for file in sorted((options.source / name).iterdir())] for name in ("edge_index", "x")
    }
    edges, x = (
        torch.from_numpy(np.concatenate(arrays.pop("edge_index"), 1)),
        torch.from_numpy(np.concatenate(arrays["x"])),
    )
    y, mask = torch.from_numpy(np.load(options.source / "y.npy")), torch.zeros(len(x), dtype=torch.bool)
    mask[torch.from_numpy(np.load(options.source / "train_idx.npy"))] = True
    del arrays
    start = time.perf_counter(), time.process_time()
    graph = Graph.from_edge_index(to_undirected(edges.long()), len(x), {"x": x, "y": y, "train_mask": mask})
    graph.save(options.out)
    seconds, busy = time.perf_counter() - start[0], time.process_time() - start[1]
    print(
        f"{edges.shape[1]:,} edges in memory: {seconds:.0f} s, {1e9 * seconds / edges.shape[1]:.0f} ns per edge, CPU "
        f"{1e9 * busy / edges.shape[1]:.0f} ns, peak {held('VmHWM') / 1e9:.2f} GB; fingerprint {graph.fingerprint}"
    )


PARTITIONERS: dict[str, Partitioner] = {
    "streaming": StreamingPartitioner(),
    "metis": MetisPartitioner(),
    "random": RandomPartitioner(),
}


def partition(options: argparse.Namespace) -> None:
    """Cut the saved graph, keep the partition beside it, and print a row."""
    graph, start, peak = Graph.open(options.graph), time.perf_counter(), Peak("RssAnon")
    made = cached_partition(graph, PARTITIONERS[options.partitioner], options.parts, 0)
    seconds, anonymous = time.perf_counter() - start, peak.stop() / 1e9
    ends = graph.indices[: 1 << 24].long()
    receivers = torch.searchsorted(graph.indptr, torch.arange(len(ends)), right=True) - 1
    cut = float((made.assignment[ends] != made.assignment[receivers]).float().mean())
    print(
        f"| {options.partitioner} | {graph.num_edges:,} | {options.parts} | {seconds:.0f} | "
        f"{1e9 * seconds / graph.num_edges:.0f} | {anonymous:.2f} | {cut:.1%} |"
    )


class Watch(pl.Callback):
    """On every rank: its share, what it held at most beside what it had at the start, and how long the pass took."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.peak = Peak("RssAnon")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seconds, taken = time.perf_counter() - self.start, self.peak.stop() / 1e9
        data = trainer.datamodule  # type: ignore[attr-defined]
        share = data._home.parts.current().num_bytes / 1e9
        print(
            f"| {trainer.global_rank} of {trainer.world_size} | {data.graph.num_bytes / 1e9:.2f} | {share:.2f} | "
            f"{taken:.2f} | {taken / share:.2f} | {trainer.fit_loop.total_batch_idx + 1} | {seconds:.0f} |",
            flush=True,
        )


def train(options: argparse.Namespace) -> None:
    """One pass of local steps on parts that are many chunks each; a row for every rank."""
    torch.set_num_threads(1)  # before anything is forked
    graph = Graph.open(options.graph)
    chunks = cached_partition(graph, PARTITIONERS[options.partitioner], options.parts, 0)
    parts = Partition(chunks.assignment // (options.parts // options.ranks), options.ranks)
    data = PartitionedDataModule(
        options.graph,
        partitioner=parts,
        sampler=NeighborSampler([10, 5]),
        batch_size=1024,
        boundary=Isolated(),
        coverage=None,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=LocalSGDStrategy(EveryPass(), launch=Launch(start_method="fork")),
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SAGE([graph.node_arrays["x"].shape[1], 64, 16], dropout=0.0), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("generate", help="write an R-MAT graph in pieces")
    making.add_argument("folder", type=Path)
    making.add_argument("--num-edges", type=int, default=25_000_000)
    making.add_argument("--num-features", type=int, default=64)
    making.add_argument("--seed", type=int, default=0)
    making.set_defaults(run=generate)
    preparing = commands.add_parser("prepare", help="prepare it under a memory limit")
    preparing.add_argument("source", type=Path)
    preparing.add_argument("out", type=Path)
    preparing.add_argument("--limit", type=float, default=4.0, help="GB that the process may take")
    preparing.add_argument("--kind", choices=LIMITS, default="data")
    preparing.add_argument("--memory", type=float, default=DEFAULT_MEMORY / 1e9, help="GB for sorting and copying")
    preparing.set_defaults(run=prepare)
    comparing = commands.add_parser("in-memory", help="the same without a limit, sorted in memory")
    comparing.add_argument("source", type=Path)
    comparing.add_argument("out", type=Path)
    comparing.set_defaults(run=in_memory)

    for run, purpose in ((partition, "cut a saved graph"), (train, "train on its parts for a pass")):
        command = commands.add_parser(run.__name__, help=purpose)
        command.add_argument("graph", type=Path)
        command.add_argument("--parts", type=int, default=64)
        command.add_argument("--partitioner", choices=PARTITIONERS, default="streaming")
        command.add_argument("--ranks", type=int, default=2)
        command.set_defaults(run=run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
