"""The memory and time that predictions of all nodes take, on a graph of several gigabytes.

    python benchmarks/predictions.py generate big --num-nodes 16000000
    python benchmarks/predictions.py by-layer big --budget-megabytes 256
    python benchmarks/predictions.py by-batch big --batch-size 1024

``by-layer`` is ``predict_by_layer``; ``by-batch`` is ``trainer.predict`` with a ``PredictionWriter``, which draws all
neighbours over both layers. Memory is VmRSS, mapped pages among it, beyond what there is after a small prediction.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from harness import Peak
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Graph,
    NeighborSampler,
    PartitionedDataModule,
    PredictionWriter,
    communities,
    predict_by_layer,
    through_layers,
)
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.npy import checksum_of

NUM_FEATURES, NEIGHBOURS, ROWS_AT_ONCE = 64, 3, 1 << 20


class SAGE(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(NUM_FEATURES, 16), SAGEConv(16, 8)])

    def forward(self, batch: Any) -> torch.Tensor:
        return through_layers(self, batch)

    def layers(self) -> list[Any]:
        return [lambda batch: self._layer(0, batch).relu(), lambda batch: self._layer(1, batch)]

    def _layer(self, place: int, batch: Any) -> torch.Tensor:
        block = batch.blocks[0]
        return self.convs[place]((batch.x, batch.x[: block.num_dst]), block.adj)


def generate(options: argparse.Namespace) -> None:
    """Every node hears from three others, anywhere; written in pieces."""
    nodes, folder, generator = options.num_nodes, options.graph, np.random.default_rng(0)
    (folder / "nodes").mkdir(parents=True)
    np.save(folder / "indptr.npy", np.arange(nodes + 1, dtype=np.int64) * NEIGHBOURS)
    senders = generator.integers(0, nodes, nodes * NEIGHBOURS, dtype=np.int32).reshape(nodes, NEIGHBOURS)
    np.save(folder / "indices.npy", np.sort(senders).reshape(-1))
    shape = (nodes, NUM_FEATURES)
    x = np.lib.format.open_memmap(folder / "nodes" / "x.npy", "w+", np.float32, shape)
    for start in range(0, nodes, ROWS_AT_ONCE):
        x[start : start + ROWS_AT_ONCE] = generator.random((min(ROWS_AT_ONCE, nodes - start), NUM_FEATURES), np.float32)
    x.flush()
    arrays = {
        "indptr": (torch.int64, (nodes + 1,)),
        "indices": (torch.int32, (nodes * NEIGHBOURS,)),
        "nodes/x": (torch.float32, shape),
    }
    sums = {name: checksum_of(folder / f"{name}.npy") for name in arrays}
    store.describe(folder, arrays, "random", sums)


def by_layer(options: argparse.Namespace) -> None:
    def predict(graph: Graph, path: Path) -> None:
        predict_by_layer(trainer(), SAGE(), graph, path, budget_bytes=options.budget_megabytes << 20)

    measure(predict, options.graph)


def by_batch(options: argparse.Namespace) -> None:
    def predict(graph: Graph, path: Path) -> None:
        data = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=options.batch_size)
        trainer(callbacks=[PredictionWriter(path)]).predict(SAGE(), data, return_predictions=False)

    measure(predict, options.graph)


def trainer(**options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def measure(predict: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        small = communities(2000, 4, num_features=NUM_FEATURES)
        small.save(Path(folder, "small"))
        predict(Graph.open(Path(folder, "small")), Path(folder, "small.npy"))
        peak = Peak("VmRSS")
        start, cpu = time.perf_counter(), time.process_time()
        graph = Graph.open(path)
        predict(graph, Path(folder, "rows.npy"))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        most = peak.stop()
    print(f"{graph.num_bytes / 1e9:.1f} GB, {wall:.0f} s, {cpu:.0f} s of CPU, {most / 1e6:.0f} MB beyond the start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (generate, by_layer, by_batch):
        command = commands.add_parser(run.__name__.replace("_", "-"))
        command.add_argument("graph", type=Path)
        command.add_argument("--num-nodes", type=int, default=16_000_000)
        command.add_argument("--budget-megabytes", type=int, default=256)
        command.add_argument("--batch-size", type=int, default=1024)
        command.set_defaults(run=run)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
