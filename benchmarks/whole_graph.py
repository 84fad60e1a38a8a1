"""What training on a whole graph in blocks costs.

    python benchmarks/whole_graph.py blocks DIRECTORY --graphs arxiv_topology amazon_computers --megabytes 200
    python benchmarks/whole_graph.py blocks --nodes 200000 --megabytes 600

DIRECTORY holds ``<graph>.npz`` files and a ``read.py`` with ``to_pyg(path, split=...)``. A step is that of a
SAGE of eight layers of width 256 on all nodes; plain and in blocks take turns, each in a process of its own;
CPU time of the second step, and the most memory that the process has held. Figures are means over
``--seeds``, of partitions and of weights, and how far from each other they are at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness import LayeredSAGE, machine

from lightning_gnn_dist import Graph, PartitionedDataModule, WholePartSampler

LAYERS, WIDTH, CLASSES = 8, 256, 16
DEGREE, FEATURES = 10, 32  # of the generated graph


def read(directory: Path, name: str) -> Graph:
    """A graph whose nodes are all training nodes."""
    spec = importlib.util.spec_from_file_location("read", directory / "read.py")
    assert spec is not None and spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    data = reader.to_pyg(str(directory / f"{name}.npz"), split=0)
    data.train_mask = torch.ones(data.num_nodes, dtype=torch.bool)
    data.y, data.val_mask, data.test_mask = data.y.clamp(min=0), None, None
    return Graph.from_pyg(data)


def generated(num_nodes: int) -> Graph:
    """Nodes that receive from ten others: one in twenty from anywhere, others from some thousand away."""
    chance = torch.Generator().manual_seed(0)
    near = (torch.randn(num_nodes, DEGREE, generator=chance) * 1000).int()
    near += torch.arange(num_nodes, dtype=torch.int32)[:, None]
    far = torch.rand(num_nodes, DEGREE, generator=chance) < 0.05
    near[far] = torch.randint(num_nodes, (int(far.sum()),), generator=chance, dtype=torch.int32)
    near.remainder_(num_nodes)
    arrays = {
        "x": torch.randn(num_nodes, FEATURES, generator=chance),
        "y": torch.randint(CLASSES, (num_nodes,), generator=chance),
        "train_mask": torch.ones(num_nodes, dtype=torch.bool),
    }
    return Graph(torch.arange(num_nodes + 1) * DEGREE, near.sort(1).values.view(-1), node_arrays=arrays)


def opened(options: argparse.Namespace, folder: Path) -> Graph:
    """The graph of a run; a generated one from files, whose pages the system may drop."""
    if options.graphs:
        return read(options.directory, options.graphs[0])
    generated(options.nodes).save(folder / "graph")
    return Graph.open(folder / "graph")


class SAGE(LayeredSAGE):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__([num_features, *[WIDTH] * (LAYERS - 1), num_classes])
        self.seconds = 0.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.start = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds = time.process_time() - self.start


def run_blocks(options: argparse.Namespace, graph: Graph) -> None:
    """Print the CPU seconds of the last step, and the megabytes held at most."""
    torch.manual_seed(options.seeds)
    sampler = WholePartSampler(LAYERS, bytes=round(options.megabytes * 1e6) or None)
    module = SAGE(graph.node_arrays["x"].shape[1], int(graph.node_arrays["y"].max()) + 1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=options.steps, enable_model_summary=False, **quiet)
    trainer.fit(module, PartitionedDataModule(graph, sampler=sampler, batch_size=graph.num_nodes))
    print(module.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, flush=True)


def compare_blocks(options: argparse.Namespace, where: list[str]) -> None:
    """Plain steps and steps in blocks, in turns."""
    found: dict[float, list[list[float]]] = {0.0: [], options.megabytes: []}
    for seed in range(options.seeds):
        for megabytes, runs in found.items():
            more = ["--megabytes", str(megabytes), "--steps", str(options.steps), "--seeds", str(seed)]
            run = subprocess.run([sys.executable, __file__, "one", *where, *more], check=True, stdout=subprocess.PIPE)
            runs.append([float(figure) for figure in run.stdout.split()])
    for megabytes, runs in found.items():
        seconds, peaks = zip(*runs, strict=True)
        way = f"{megabytes:g} MB" if megabytes else "plain"
        print(f"{way:>10}  {spread(seconds, 's of CPU a step')}  {max(peaks):8,.0f} MB held at most", flush=True)
    ratios = [blocks[0] / plain[0] for plain, blocks in zip(*found.values(), strict=True)]
    print(f"            {spread(ratios, 'times the time')}", flush=True)


def spread(figures: Sequence[float], unit: str) -> str:
    return f"{statistics.mean(figures):8.2f} {unit} ({min(figures):.2f} to {max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["blocks", "one"])
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--graphs", nargs="*", default=[])
    parser.add_argument("--nodes", type=int, default=0, help="of a generated graph")
    parser.add_argument("--megabytes", type=float, default=600.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3, help="how many; of `one`, which")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.what == "one":
        with tempfile.TemporaryDirectory() as folder:
            run_blocks(options, opened(options, Path(folder)))
        return
    print(machine())
    for name in options.graphs or [None]:
        print(name or f"{options.nodes:,} nodes", flush=True)
        where = [str(options.directory), "--graphs", name] if name else ["--nodes", str(options.nodes)]
        compare_blocks(options, where)


if __name__ == "__main__":
    main()
