"""What a batch costs: sampling, gathering its features, and a training step on it.

    python benchmarks/sampling.py                       # 1M nodes, 20M edges: 4 GB of memory, some minutes
    python benchmarks/sampling.py --num-nodes 100000 --num-edges 2000000
    THP_MEM_ALLOC_ENABLE=1 python benchmarks/sampling.py    # torch allocates in pages of 2 MB: all of it is faster

One thread. All times are CPU time, the best of several repetitions, so that other work on the machine
disturbs them little; memory bandwidth is still shared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.loader import BatchLoader
from lightning_gnn_dist.sampling.base import BatchKey
from lightning_gnn_dist.sampling.batch import SampledData, assemble
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.pool import BufferPool, gather_rows
from lightning_gnn_dist.sampling.rng import permutation


def power_law_communities(
    num_nodes: int, num_edges: int, num_classes: int = 32, homophily: float = 0.7, seed: int = 0
) -> Graph:
    """A degree-corrected block model: an end of an edge falls on a node in proportion to its weight.

    Weights have a Pareto tail of exponent 1.5. The sender comes from the receiver's community with the
    probability ``homophily``, else from anywhere. Both ends are drawn, so in- and out-degrees have the tail.
    """
    generator = np.random.default_rng(seed)
    label = np.sort(generator.integers(num_classes, size=num_nodes))
    weight = np.minimum(generator.pareto(1.5, num_nodes) + 1.0, num_nodes / 200)
    total = np.concatenate([[0.0], weight.cumsum()])
    first = np.searchsorted(label, np.arange(num_classes + 1))

    receivers = np.searchsorted(total, generator.random(num_edges) * total[-1], side="right") - 1
    inside = generator.random(num_edges) < homophily
    low = np.where(inside, total[first[label[receivers]]], 0.0)
    high = np.where(inside, total[first[label[receivers] + 1]], total[-1])
    senders = np.searchsorted(total, low + generator.random(num_edges) * (high - low), side="right") - 1

    mixed = permutation(num_nodes, seed, 0)  # ids say nothing about communities
    edge_index = mixed[torch.from_numpy(np.stack([senders, receivers]).clip(0, num_nodes - 1))]
    return Graph.from_edge_index(edge_index, num_nodes)


def cpu_ms(function: Callable[[], object], repeats: int) -> float:
    """The least CPU time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def batches_of_seeds(graph: Graph, batch_size: int, number: int) -> list[Tensor]:
    return [permutation(graph.num_nodes, 1, i)[:batch_size] for i in range(number)]


def bench_sampling(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    sampler = NeighborSampler(num_neighbors)
    seeds = batches_of_seeds(graph, batch_size, 10)
    keys = [BatchKey(0, 0, i) for i in range(10)]
    bulk = sampler.sample_bulk(graph, seeds, keys)
    nodes, edges = (
        np.mean([sum(counts) for counts in column])
        for column in zip(*((s.num_sampled_nodes, s.num_sampled_edges) for s in bulk), strict=True)
    )
    del bulk
    ms = cpu_ms(lambda: [sampler.sample_bulk(graph, [s], [k]) for s, k in zip(seeds, keys, strict=True)], repeats) / 10
    yield f"sampling {num_neighbors}, {batch_size} seeds: {nodes:,.0f} nodes, {edges:,.0f} edges a batch"
    yield row("neighbour sampler", ms, f"{edges / ms / 1e3:.1f} M edges per CPU-second")


def bench_gather(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    seeds = batches_of_seeds(graph, batch_size, 1)
    rows = NeighborSampler(num_neighbors).sample_bulk(graph, seeds, [BatchKey(0, 0, 0)])[0].nodes
    for dtype in (torch.float32, torch.float16):
        x, pool = torch.randn(graph.num_nodes, 128).to(dtype), BufferPool(max_free=2)
        yield f"gathering {rows.numel():,} rows of 128 numbers, {dtype}"
        yield row("x[rows]", cpu_ms(lambda x=x: x[rows], repeats))
        yield row("index_select, fresh", cpu_ms(lambda x=x: x.index_select(0, rows), repeats))
        yield row("our kernel, fresh", cpu_ms(lambda x=x: gather_rows(x, rows), repeats))
        buffer = gather_rows(x, rows)
        yield row(
            "index_select, same buffer",
            cpu_ms(lambda x=x, out=buffer: torch.index_select(x, 0, rows, out=out), repeats),
        )
        yield row("our kernel, pooled", cpu_ms(lambda x=x, pool=pool: gather_rows(x, rows, pool), repeats))


def bench_loader(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    arrays = {"x": torch.randn(graph.num_nodes, 128), "y": torch.zeros(graph.num_nodes, dtype=torch.int64)}
    graph = Graph(graph.indptr, graph.indices, arrays)
    seeds = permutation(graph.num_nodes, 1, 0)[: 10 * batch_size]
    yield f"whole batches {num_neighbors}, {batch_size} seeds: sampled, 128 floats a node gathered, assembled"
    for num_threads in (0, 1):
        loader = BatchLoader(graph, NeighborSampler(num_neighbors), seeds, 10, seed=0, num_threads=num_threads)
        yield row(f"BatchLoader, {num_threads} threads", cpu_ms(lambda one=loader: consume(one), repeats) / 10)
        loader.close()


def consume(batches: Iterable[SampledData]) -> None:
    for batch in batches:
        del batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(128, 256), SAGEConv(256, 32)])

    def step(self, forward: Callable[[SampledData], Tensor], batch: SampledData) -> None:
        forward(batch)[: batch.batch_size].square().mean().backward()

    def by_adj(self, batch: SampledData) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.adj).relu()
        return x

    def by_block_edges(self, batch: SampledData) -> Tensor:
        x = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            x = conv((x, x[: block.num_dst]), block.edge_index).relu()
        return x

    def by_trimming(self, batch: SampledData) -> Tensor:
        x, edge_index = batch.x, batch.edge_index
        sizes = batch.num_sampled_nodes, batch.num_sampled_edges
        for layer, conv in enumerate(self.convs):
            x, edge_index, _ = trim_to_layer(layer, *sizes, x, edge_index)
            x = conv(x, edge_index).relu()
        return x

    def by_edge_index(self, batch: SampledData) -> Tensor:
        x = batch.x
        for conv in self.convs:
            x = conv(x, batch.edge_index).relu()
        return x


def bench_step(graph: Graph, batch_size: int, repeats: int) -> Iterator[str]:
    graph = Graph(graph.indptr, graph.indices, {"x": torch.randn(graph.num_nodes, 128)})
    seeds = batches_of_seeds(graph, batch_size, 1)
    batch = assemble(graph, NeighborSampler([15, 10]).sample_bulk(graph, seeds, [BatchKey(0, 0, 0)])[0])
    net = Net()
    yield f"step of SAGE 128-256-32 on [15, 10]: {batch.num_nodes:,} nodes, {batch.num_edges:,} edges"
    for name, forward in (
        ("blocks, block.adj", net.by_adj),
        ("blocks, block.edge_index", net.by_block_edges),
        ("trim_to_layer", net.by_trimming),
        ("edge_index", net.by_edge_index),
    ):
        yield row(name, cpu_ms(lambda forward=forward: net.step(forward, batch), repeats))


def row(name: str, ms: float, note: str = "") -> str:
    return f"  {name:<28} {ms:>9.2f} ms   {note}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=1_000_000)
    parser.add_argument("--num-edges", type=int, default=20_000_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)

    graph = power_law_communities(options.num_nodes, options.num_edges)
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, largest in-degree {graph.degrees().max():,}")
    size, repeats = options.batch_size, options.repeats
    for lines in (
        bench_sampling(graph, [15, 10, 5], size, repeats),
        bench_sampling(graph, [15, 10], size, repeats),
        bench_gather(graph, [15, 10, 5], size, repeats),
        bench_loader(graph, [15, 10, 5], size, repeats),
        bench_step(graph, size, repeats),
    ):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
