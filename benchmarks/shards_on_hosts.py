"""Exact sampling across shards on two hosts, against Grappa on the same graph.

    python benchmarks/shards_on_hosts.py FOLDER                       # a graph and its two METIS shards, 3 GB
    RATE=1gbit benchmarks/two_hosts.sh benchmarks/shards_on_hosts.py FOLDER --way shards

GraphSAGE 128-256-32, [15, 10] neighbours, batches of 1024, Adam at .003, 48 steps a pass, each rank on a core of its
own. For each pass: seconds, CPU seconds of rank 0, seconds that it waited for batches, and megabytes that it has sent;
then two_hosts.sh says what went over the cable.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from peers.epoch_ours import Net, trainer_on_two_hosts
from sampling import power_law_communities

from lightning_gnn_dist import (
    Fetch,
    Graph,
    GrappaStrategy,
    Loading,
    MetisPartitioner,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    save_shards,
)
from lightning_gnn_dist.wire.collectives import traffic

WIDTH, CLASSES, STEPS, BATCH_SIZE = 128, 32, 48, 1024
WAYS = ("shards", "grappa")


def prepare(folder: Path, num_nodes: int, num_edges: int) -> None:
    """Save a graph, its parts and its shards, so that each part has enough training nodes for the steps."""
    edges = power_law_communities(num_nodes, num_edges)
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (num_nodes,), generator=generator)
    arrays = {"x": torch.randn(num_nodes, WIDTH, generator=generator), "y": y}
    partition = MetisPartitioner()(edges, 2, seed=0)
    is_train = torch.zeros(num_nodes, dtype=torch.bool)
    for part in range(2):
        own = (partition.assignment == part).nonzero().view(-1)
        chosen = torch.randperm(len(own), generator=generator)[: min(STEPS * BATCH_SIZE, len(own))]
        is_train[own[chosen]] = True
    arrays |= {"train_mask": is_train, "val_mask": ~is_train, "test_mask": torch.zeros(num_nodes, dtype=torch.bool)}
    graph = Graph(edges.indptr, edges.indices, arrays)
    graph.save(folder / "graph")
    save_shards(graph, partition, folder / "shards")
    torch.save(partition.assignment, folder / "parts.pt")


class Telling(Net):
    """Tells of each pass what rank 0 has waited and sent, too."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)
        self.before = 0.0, 0.0

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.before = self.figures()

    def figures(self) -> tuple[float, float]:
        waited = self.trainer.datamodule.figures["data/waited_seconds"]  # type: ignore[attr-defined]
        return waited, traffic.bytes_sent / 1e6

    def tell(self) -> None:
        if self.global_rank == 0:
            seconds, cpu = time.perf_counter() - self.clocks[0], time.process_time() - self.clocks[1]
            waited, sent = (now - then for now, then in zip(self.figures(), self.before, strict=True))
            load = os.getloadavg()[0]
            figures = f"{seconds:.2f} s, {cpu:.2f} CPU-s, waited {waited:.2f} s, sent {sent:.1f} MB"
            print(f"pass: {figures}, load {load:.0f}", flush=True)


def data_of(folder: Path, options: argparse.Namespace) -> pl.LightningDataModule:
    sampling: dict[str, Any] = {"sampler": NeighborSampler([15, 10]), "batch_size": BATCH_SIZE}
    if options.way == "grappa":
        partition = Partition(torch.load(folder / "parts.pt"), 2)
        return PartitionedDataModule(Graph.open(folder / "graph"), partitioner=partition, **sampling)
    loading = Loading(ahead_bytes=options.ahead_bytes, cache_bytes=options.cache_bytes)
    return PartitionedDataModule(folder / "shards", boundary=Fetch(), loading=loading, **sampling)


def run(folder: Path, options: argparse.Namespace) -> None:
    cores, rank = sorted(os.sched_getaffinity(0)), int(os.environ["RANK"])
    os.sched_setaffinity(0, {cores[-1 - rank]})
    torch.set_num_threads(1)
    strategy = GrappaStrategy() if options.way == "grappa" else DDPStrategy()
    trainer = trainer_on_two_hosts(strategy, options.passes)
    pl.seed_everything(0, verbose=False)
    trainer.fit(Telling(), data_of(folder, options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--ahead-bytes", type=int, default=1 << 29)
    parser.add_argument("--cache-bytes", type=int, default=1 << 26)
    parser.add_argument("--num-nodes", type=int, default=1_000_000)
    parser.add_argument("--num-edges", type=int, default=20_000_000)
    options = parser.parse_args()
    if options.way is None:
        prepare(options.folder, options.num_nodes, options.num_edges)
    else:
        run(options.folder, options)


if __name__ == "__main__":
    main()
