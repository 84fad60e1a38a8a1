"""What a batch drawn by time costs, against one of the same graph drawn without times.

    python benchmarks/temporal.py                # 1M nodes, 10M edges: 1 GB, a minute

Two costs for each drawn edge, in turns, CPU time, the lower quartile of all turns: drawing a batch, and a whole batch
with the rows of its features. Seeds have times all over those of the edges, or the last one, when they see all edges.
Trees of one batch share no nodes, so a batch drawn by time has more of them, and more features.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from harness import machine

from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.extensions.temporal.times import time_order
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

NUM_NODES, WIDTH, BATCH_SIZE, NUMBERS = 1_000_000, 64, 1024, [10, 10]
SECONDS = 10**9  # over which edges and seeds are spread
Work = Callable[[torch.Tensor, BatchKey], int]


def random_graph(num_edges: int) -> Graph:
    generator = np.random.default_rng(0)
    edge_index = torch.from_numpy(generator.integers(NUM_NODES, size=(2, num_edges)))
    times = torch.from_numpy(generator.integers(SECONDS, size=num_edges))
    nodes = {
        "x": torch.from_numpy(generator.random((NUM_NODES, WIDTH), np.float32)),
        "time": torch.from_numpy(generator.integers(SECONDS, size=NUM_NODES)),
        "end": torch.full((NUM_NODES,), SECONDS),
    }
    return Graph.from_edge_index(edge_index, NUM_NODES, nodes, {"edge_time": times})


def works_of(graph: Graph, sampler: Sampler) -> tuple[Work, Work]:
    source = GraphSource(graph, sampler)
    source.keep_buffers(2)

    def draw(seeds: torch.Tensor, key: BatchKey) -> int:
        return int(sampler.sample_bulk(graph, [seeds], [key])[0].indices.numel())

    def whole(seeds: torch.Tensor, key: BatchKey) -> int:
        (batch,) = source.make([seeds], [key])
        return int(batch.num_edges)

    return draw, whole


def lower_quartiles(works: dict[str, Work], turns: int) -> dict[str, tuple[float, float]]:
    """Nanoseconds of CPU time for each drawn edge, and edges of a batch."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    drawn = dict.fromkeys(works, 0)
    for turn in range(turns):
        for name, work in works.items():
            seeds = torch.randperm(NUM_NODES)[:BATCH_SIZE]
            started = time.thread_time()
            edges = work(seeds, BatchKey(0, 0, turn))
            drawn[name] += edges
            spent[name].append((time.thread_time() - started) / edges * 1e9)
    return {name: (float(np.quantile(of[2:], 0.25)), drawn[name] / turns) for name, of in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-edges", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=60)
    options = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    graph = random_graph(options.num_edges)
    started = time.process_time()
    time_order(graph, "edge_time")
    print(f"{graph.num_edges} edges put in order of time in {time.process_time() - started:.1f} s")
    samplers: dict[str, Sampler] = {
        "without times": NeighborSampler(NUMBERS),
        "at the end": TemporalSampler(NUMBERS, "edge_time", "end"),
        "uniform": TemporalSampler(NUMBERS, "edge_time", "time"),
        "latest": TemporalSampler(NUMBERS, "edge_time", "time", pick="latest"),
    }
    works = {name: works_of(graph, sampler) for name, sampler in samplers.items()}
    for place, what in enumerate(("draw", "whole batch")):
        spent = lower_quartiles({name: of[place] for name, of in works.items()}, options.turns)
        plain, _ = spent["without times"]
        for name, (ns, edges) in spent.items():
            print(f"{what:12} {name:14} {edges:8.0f} edges, {ns:6.1f} ns for each, ratio {ns / plain:.2f}")


if __name__ == "__main__":
    main()
