"""Draws that the nodes of a hop share, against those of each node for itself: nodes and CPU time of a batch, accuracy.

    python benchmarks/shared_draws.py DIRECTORY                        # costs on two graphs, a few minutes
    python benchmarks/shared_draws.py DIRECTORY --accuracy cora dblp   # and accuracy, three seeds each

DIRECTORY is that of ``accuracy.py``. Costs: one thread, 128 floats a node, GraphSAGE 128-256-...-32 on blocks; CPU
time, the least of several repetitions in which both samplers take turns. Accuracy: GraphSAGE of hidden size 64, Adam
0.01, one process, batches of 256, as many layers as fan-outs; on all test nodes of the whole graph with the weights of
the best of all validations, one after each pass, and the nodes of a batch in the mean. What shards send:
``shares.py --kinds neighbors shared``.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import SAGE, Curve, load
from harness import keep, machine
from sampling import batches_of_seeds
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Graph, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.engine.sample import BatchKey

COSTS = [("arxiv_topology", [15, 10, 5], 1024), ("arxiv_topology", [15, 10], 1024), ("amazon_computers", [15, 10], 256)]


class Net(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(256 if i else 128, 256) for i in range(num_layers - 1))
        self.convs.append(SAGEConv(256, 32))

    def step(self, batch: SampledData) -> None:
        x: Tensor = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj).relu()
        x.square().mean().backward()


def cost(graph: Graph, samplers: list[NeighborSampler], size: int, repeats: int) -> list[list[float]]:
    """For each sampler, of a batch: nodes, edges, and CPU-ms to draw, to gather and to compute it."""
    seeds, keys = batches_of_seeds(graph, size, 4), [BatchKey(0, 0, i) for i in range(4)]
    net, found = Net(samplers[0].num_hops), [[[], [], []] for _ in samplers]  # type: ignore[var-annotated]
    for _ in range(repeats):
        for sampler, times in zip(samplers, found, strict=True):
            drawn = timed(times[0], lambda one=sampler: one.sample_bulk(graph, seeds, keys))
            made = timed(times[1], lambda some=drawn: [assemble(graph, sample) for sample in some])
            timed(times[2], lambda some=made: [net.step(batch) for batch in some])
    sizes = [sampler.sample_bulk(graph, seeds, keys) for sampler in samplers]
    return [
        [
            sum(s.nodes.numel() for s in some) / 4,
            sum(s.indices.numel() for s in some) / 4,
            *(min(of) / 4 for of in times),
        ]
        for some, times in zip(sizes, found, strict=True)
    ]


def timed(times: list[float], function: Callable[[], Any]) -> Any:
    start = time.process_time()
    found = function()
    times.append(1e3 * (time.process_time() - start))
    return found


def show_costs(directory: Path, repeats: int) -> None:
    print("| graph | fan-outs | seeds | draws | nodes | edges | drawn, ms | gathered, ms | step, ms | all, ms |")
    print(f"|{'---|' * 10}")
    for name, fanouts, size in COSTS:
        whole = Graph.from_pyg(load(directory, name, 0))
        graph = Graph(whole.indptr, whole.indices, {"x": torch.randn(whole.num_nodes, 128)})
        samplers = [NeighborSampler(fanouts), NeighborSampler(fanouts, shared=True)]
        for sampler, (nodes, edges, *ms) in zip(samplers, cost(graph, samplers, size, repeats), strict=True):
            draws = "shared" if sampler.shared else "each for itself"
            figures = " | ".join(f"{one:.1f}" for one in (*ms, sum(ms)))
            print(f"| {name} | {fanouts} | {size:,} | {draws} | {nodes:,.0f} | {edges:,.0f} | {figures} |", flush=True)


class Module(SAGE):
    """Counts the nodes of its batches."""

    def on_fit_start(self) -> None:
        self.sizes: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        self.sizes.append(batch.num_nodes)
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])


def fit(graph: Graph, sampler: NeighborSampler, passes: int, seed: int) -> tuple[float, float]:
    """The test accuracy at the best validation, and the nodes of a batch."""
    pl.seed_everything(seed, verbose=False)
    curve = Curve(graph, every=1)
    sizes = [graph.node_arrays["x"].shape[1], *[64] * (sampler.num_hops - 1), int(graph.node_arrays["y"].max()) + 1]
    model = Module(sizes, dropout=0.5)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    data = PartitionedDataModule(graph, sampler=sampler, batch_size=256, seed=seed, loading=Loading(num_threads=0))
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=passes,
        callbacks=[curve],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
    ).fit(model, data)
    return max(curve.points)[1], statistics.mean(model.sizes)


def show_accuracy(options: argparse.Namespace) -> None:
    print(f"\n| graph | fan-outs | draws | test accuracy, {options.seeds} seeds | nodes of a batch |")
    print("|---|---|---|---|---|")
    for name in options.accuracy:
        for fanouts in ([15, 10], [4, 3]):
            for shared in (False, True):
                found = []
                for seed in range(options.seeds):
                    graph = Graph.from_pyg(load(options.directory, name, seed))
                    found.append(fit(graph, NeighborSampler(fanouts, shared=shared), options.passes, seed))
                    run = {"graph": name, "fanouts": fanouts, "shared": shared, "seed": seed, "passes": options.passes}
                    keep(options.out, run | {"test": found[-1][0], "nodes": found[-1][1]})
                right, nodes = zip(*found, strict=True)
                spread = statistics.stdev(right) if len(right) > 1 else 0.0
                figures = f"{statistics.mean(right):.3f} +- {spread:.3f} | {statistics.mean(nodes):,.0f}"
                print(f"| {name} | {fanouts} | {'shared' if shared else 'each for itself'} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--accuracy", nargs="*", default=[], help="graphs to train on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--out", type=Path, help="append every training to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(machine())
    if options.repeats:
        show_costs(options.directory, options.repeats)
    if options.accuracy:
        show_accuracy(options)


if __name__ == "__main__":
    main()
