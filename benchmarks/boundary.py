"""Seconds and bytes of a step with each way to treat the boundary, on two hosts.

    RATE=1gbit benchmarks/two_hosts.sh benchmarks/boundary.py

Two ranks train a SAGE on random halves of a generated graph, so that half of all edges cross. All ways are timed in
turns, in one run. Bytes are those that the package counts, and those that rank 0's network interface has counted.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
from harness import LayeredSAGE
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Exchange,
    Graph,
    GrappaStrategy,
    Isolated,
    PartitionedDataModule,
    RandomPartitioner,
    WholePartSampler,
)
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.wire.collectives import traffic

WAYS: list[Boundary] = [
    Isolated(),
    Exchange(),
    Exchange(overlap=True),
    Exchange(every=5),
    Exchange(share=0.1),
]
SENT = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "lo") / "statistics/tx_bytes"


class SAGE(LayeredSAGE):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Watch(pl.Callback):
    """Notes the time, the counted bytes and the interface's bytes at the start of each step."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, float, int]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.notes.append((time.perf_counter(), traffic.bytes_sent, int(SENT.read_text())))


def generated(num_nodes: int, degree: int, width: int) -> Graph:
    chance = torch.Generator().manual_seed(0)
    edges = torch.randint(num_nodes, (2, num_nodes * degree), generator=chance)
    y = torch.randint(width, (num_nodes,), generator=chance)
    data = Data(torch.randn(num_nodes, width, generator=chance), edges, y=y)
    data.train_mask = torch.ones(num_nodes, dtype=torch.bool)
    return Graph.from_pyg(data)


def timed(graph: Graph, way: Boundary, options: argparse.Namespace) -> tuple[float, float, float]:
    """The mean seconds of a step, and its bytes: as counted here, and on the interface."""
    pl.seed_everything(0, verbose=False)
    watch = Watch()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=GrappaStrategy(),
        max_epochs=options.steps + 6,
        callbacks=[watch],
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = PartitionedDataModule(
        graph,
        partitioner=RandomPartitioner(),
        sampler=WholePartSampler(options.layers),
        boundary=way,
        batch_size=graph.num_nodes,
        coverage=None,
    )
    trainer.fit(SAGE([options.width] * (options.layers + 1)), data)
    notes = watch.notes[5:]  # the first steps are slower
    seconds = [after[0] - before[0] for before, after in pairwise(notes)]
    counted, wire = ((notes[-1][i] - notes[0][i]) / (len(notes) - 1) for i in (1, 2))
    return statistics.fmean(seconds), counted, wire


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--degree", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="a multiple of 5")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    graph = generated(options.nodes, options.degree, options.width)
    found: dict[Boundary, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way in WAYS:
            found[way].append(timed(graph, way, options))
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"{'boundary':32} {'seconds a step':>24} {'MB counted':>11} {'MB on the wire':>15}")
    for way, turns in found.items():
        seconds, counted, wire = zip(*turns, strict=True)
        told = f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        print(f"{way!r:32} {told:>24} {statistics.median(counted) / 1e6:11.2f} {statistics.median(wire) / 1e6:15.2f}")


if __name__ == "__main__":
    main()
