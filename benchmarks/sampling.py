"""What a batch costs: sampling, gathering its features, and a training step on it.

    python benchmarks/sampling.py                       # 1M nodes, 20M edges: 4 GB of memory, some minutes
    python benchmarks/sampling.py --num-nodes 100000 --num-edges 2000000
    THP_MEM_ALLOC_ENABLE=1 python benchmarks/sampling.py    # torch allocates in pages of 2 MB: all of it is faster

One thread, unless a line says two. All times are CPU time, unless a line says wall, the best of several repetitions,
so that other work on the machine disturbs them little; memory bandwidth is still shared. `sampling_peers.py` compares
with PyG and DGL.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import scipy.sparse
import torch
from harness import machine
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import trim_to_layer

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.batches import Batches, Deal, Learning
from lightning_gnn_dist.batches.pool import BufferPool, gather_rows
from lightning_gnn_dist.batches.source import GraphSource, assemble
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.subgraphs.shadow import ShadowSampler
from lightning_gnn_dist.extensions.subgraphs.walk import RandomWalkSampler
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.cluster import ClusterSampler
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


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


def wall_ms(function: Callable[[], object], repeats: int) -> float:
    """The least wall time of a call, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def batches_of_seeds(graph: Graph, batch_size: int, number: int) -> list[Tensor]:
    return [permutation(graph.num_nodes, 1, i)[:batch_size] for i in range(number)]


def bench_sampling(graph: Graph, batch_size: int, repeats: int) -> Iterator[str]:
    """Every sampler, for bulks of 1, 8 and 64 batches, and in two threads."""
    graph = with_extras(graph)
    for sampler, bulks in (
        (NeighborSampler([15, 10, 5]), (1, 8, 64)),
        (LadiesSampler([512, 512, 512]), (1, 8, 64)),
        (FastGCNSampler([512, 512, 512]), (1, 8, 64)),
        (NeighborSampler([15, 10, 5], replace=True), (8,)),
        (NeighborSampler([15, 10, 5], weight="edge_weight"), (8,)),
        (NeighborSampler([15, 10]), (8,)),
        (NeighborSampler([15, 10], weight="edge_weight"), (8,)),
        (NeighborSampler([15, 10, 5], replace=True, weight="edge_weight"), (8,)),
        (LadiesSampler([512, 512, 512], weight="edge_weight"), (8,)),
        (RandomWalkSampler(3, walk_length=3, visits=0), (8,)),
        (ShadowSampler([10, 5], num_hops=3), (8,)),
        (ClusterSampler(3), (8,)),
    ):
        yield from bench_sampler(graph, sampler, bulks, batch_size, repeats)


def with_extras(graph: Graph) -> Graph:
    """The graph with weights, and with chunks of about 1,000 nodes."""
    chunk = permutation(graph.num_nodes, 2, 0) % max(1, graph.num_nodes // 1000)
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0))
    return Graph(graph.indptr, graph.indices, {"chunk": chunk}, {"edge_weight": weight})


def bench_sampler(graph: Graph, sampler: Sampler, bulks: Iterable[int], batch_size: int, repeats: int) -> Iterator[str]:
    seeds = batches_of_seeds(graph, batch_size, max(bulks))
    if isinstance(sampler, ClusterSampler):  # as its loader deals them
        order = sampler.order(graph, torch.arange(graph.num_nodes), 0, 0)
        seeds = [order[i * batch_size : (i + 1) * batch_size] for i in range(max(bulks))]
    keys = [BatchKey(0, 0, i) for i in range(max(bulks))]
    first = sampler.sample_bulk(graph, seeds[:1], keys[:1])[0]
    nodes, edges = first.nodes.numel(), first.indices.numel()
    yield f"{sampler}, {batch_size} seeds: {nodes:,} nodes, {edges:,} edges in the first batch"
    for k in bulks:
        ms = cpu_ms(lambda k=k: sampler.sample_bulk(graph, seeds[:k], keys[:k]), repeats) / k
        yield row(f"bulks of {k}", ms, f"{edges / ms / 1e3:.1f} M edges per CPU-second")
    if max(bulks) == 64:
        yield from bench_threads(graph, sampler, seeds, keys, edges, repeats)


def bench_threads(
    graph: Graph, sampler: Sampler, seeds: list[Tensor], keys: list[BatchKey], edges: int, repeats: int
) -> Iterator[str]:
    bulks = [slice(i, i + 8) for i in range(0, len(seeds), 8)]
    for num_threads in (1, 2):
        with ThreadPoolExecutor(num_threads) as threads:

            def run(threads: ThreadPoolExecutor = threads) -> None:
                consume(threads.map(lambda bulk: sampler.sample_bulk(graph, seeds[bulk], keys[bulk]), bulks))

            ms = wall_ms(run, repeats) / len(seeds)
        yield row(f"wall, {num_threads} threads, bulks of 8", ms, f"{edges / ms / 1e3:.1f} M edges per second")


def bench_products(graph: Graph, batch_size: int) -> Iterator[str]:
    """The same neighbours drawn by scipy."""
    yield f"sparse products: [15, 10, 5], {batch_size} seeds, sampling alone"
    seeds = batches_of_seeds(graph, batch_size, 2)
    csr = graph.indices.numpy(), graph.indptr.numpy()
    matrix = scipy.sparse.csr_matrix((np.ones(graph.num_edges, np.float32), *csr), (graph.num_nodes, graph.num_nodes))
    generator = np.random.default_rng(0)
    edges = by_products(matrix, seeds[0].numpy(), [15, 10, 5], generator)
    ms = cpu_ms(lambda: by_products(matrix, seeds[1].numpy(), [15, 10, 5], generator), 1)
    yield row("scipy, P = Q A", ms, f"{edges / ms / 1e3:.1f} M edges per CPU-second")


def receivers_of(graph: Graph) -> Tensor:
    return torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())


def by_products(
    matrix: scipy.sparse.csr_matrix, frontier: np.ndarray, fanouts: list[int], generator: np.random.Generator
) -> int:
    """Neighbour sampling with a product per hop: each row keeps the entries with the smallest random keys."""
    found, edges = frontier, 0
    for fanout in fanouts:
        ones = np.ones(len(frontier), np.float32)
        one_hot = scipy.sparse.csr_matrix(
            (ones, (np.arange(len(frontier)), frontier)), (len(frontier), matrix.shape[0])
        )
        product = one_hot @ matrix
        rows = np.repeat(np.arange(len(frontier)), np.diff(product.indptr))
        order = np.lexsort((generator.random(product.nnz), rows))
        chosen = order[np.arange(product.nnz) - product.indptr[rows] < fanout]
        edges += len(chosen)
        frontier = np.setdiff1d(product.indices[chosen], found)
        found = np.union1d(found, frontier)
    return edges


def bench_gather(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    """A batch's features by torch and by our kernel, and what a plain copy of as many bytes takes."""
    seeds = batches_of_seeds(graph, batch_size, 1)
    rows = NeighborSampler(num_neighbors).sample_bulk(graph, seeds, [BatchKey(0, 0, 0)])[0].nodes
    x, pool = torch.randn(graph.num_nodes, 128), BufferPool(max_free=2)
    buffer = gather_rows(x, rows)
    yield f"gathering {rows.numel():,} rows of 128 numbers, float32"
    yield row("x[rows]", cpu_ms(lambda: x[rows], repeats))
    yield row("index_select", cpu_ms(lambda: x.index_select(0, rows), repeats))
    yield row("index_select, same buffer", cpu_ms(lambda: torch.index_select(x, 0, rows, out=buffer), repeats))
    yield row("our kernel, pooled", cpu_ms(lambda: gather_rows(x, rows, pool), repeats))
    yield row("the first so many rows, copied", cpu_ms(lambda: buffer.copy_(x[: rows.numel()]), repeats))
    for name, array in (("float16", x.half()), ("bfloat16", x.bfloat16())):

        def gathered(array: Tensor = array, *, widen: bool) -> Tensor:
            return gather_rows(array, rows, pool, widen=widen)

        yield row(f"{name}, as it is", cpu_ms(partial(gathered, widen=False), repeats))
        yield row(f"{name}, widened to float32", cpu_ms(partial(gathered, widen=True), repeats))


def bench_union(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    """Features of a bulk: batch by batch, or first those of all its nodes once, and then each batch's from these."""
    x = torch.randn(graph.num_nodes, 128)
    for k in (8, 64):
        keys = [BatchKey(0, 0, i) for i in range(k)]
        seeds = batches_of_seeds(graph, batch_size, k)
        batches = [sample.nodes for sample in NeighborSampler(num_neighbors).sample_bulk(graph, seeds, keys)]
        pools = BufferPool(max_free=2), BufferPool(max_free=2)
        place = torch.empty(graph.num_nodes, dtype=torch.int64)

        def by_batch(batches: list[Tensor] = batches, pool: BufferPool = pools[0]) -> None:
            for nodes in batches:
                gather_rows(x, nodes, pool)

        def by_union(
            batches: list[Tensor] = batches,
            pools: tuple[BufferPool, BufferPool] = pools,
            place: Tensor = place,
        ) -> None:
            is_met = torch.zeros(x.size(0), dtype=torch.bool)
            for nodes in batches:
                is_met[nodes] = True
            union = is_met.nonzero().view(-1)
            place[union] = torch.arange(union.numel())
            rows = gather_rows(x, union, pools[1])
            for nodes in batches:
                gather_rows(rows, place[nodes], pools[0])

        rows = torch.cat(batches)
        yield f"features of bulks of {k}, {num_neighbors}: {rows.numel():,} rows of {rows.unique().numel():,} nodes"
        yield row("batch by batch", cpu_ms(by_batch, repeats) / k)
        yield row("over the union, then apart", cpu_ms(by_union, repeats) / k)


def bench_loader(graph: Graph, num_neighbors: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    arrays = {"x": torch.randn(graph.num_nodes, 128), "y": torch.zeros(graph.num_nodes, dtype=torch.int64)}
    graph = Graph(graph.indptr, graph.indices, arrays)
    seeds = permutation(graph.num_nodes, 1, 0)[: 10 * batch_size]
    yield f"whole batches {num_neighbors}, {batch_size} seeds: sampled, 128 floats a node gathered, assembled"
    for bulk_size in (1, 8):
        loader = loader_of(graph, NeighborSampler(num_neighbors), seeds, bulk_size, 0)
        ms = cpu_ms(lambda one=loader: consume(one), repeats) / 10
        yield row(f"bulks of {bulk_size}", ms)
        loader.close()
    for num_threads in (1, 2):
        loader = loader_of(graph, NeighborSampler(num_neighbors), seeds, 1, num_threads)
        yield row(f"wall, {num_threads} threads, bulks of 1", wall_ms(lambda one=loader: consume(one), repeats) / 10)
        loader.close()


def loader_of(
    graph: Graph, sampler: Sampler, seeds: Tensor, bulk_size: int, num_threads: int, num_batches: int = 10
) -> Batches:
    source = GraphSource(graph, sampler)
    learning = Learning(source, Deal(seeds, num_batches, 0))
    return Batches(lambda _: learning, num_batches, bulk_size=bulk_size, num_threads=num_threads)


def consume(batches: Iterable[object]) -> None:
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


def bench_waiting(graph: Graph, batch_size: int) -> Iterator[str]:
    """The training loop, with one background thread: a pass of 50 batches."""
    arrays = {"x": torch.randn(graph.num_nodes, 128)}
    graph = Graph(graph.indptr, graph.indices, arrays)
    seeds = permutation(graph.num_nodes, 1, 0)[: 50 * batch_size]
    loader, net = loader_of(graph, NeighborSampler([15, 10]), seeds, 4, 1, num_batches=50), Net()
    for _ in range(2):  # buffers grow at first, and pages
        for batch in loader:
            net.step(net.by_adj, batch)
    waited, started = loader.waited_seconds, time.perf_counter()
    for batch in loader:
        net.step(net.by_adj, batch)
    seconds = time.perf_counter() - started
    share = (loader.waited_seconds - waited) / seconds
    yield f"training SAGE 128-256-32 on [15, 10], blocks, 1 background thread: waits {share:.1%} of {seconds:.1f} s"
    loader.close()


def row(name: str, ms: float, note: str = "") -> str:
    return f"  {name:<30} {ms:>9.2f} ms   {note}".rstrip()


def parser_of(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """What all benchmarks of sampling are asked with."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=1_000_000)
    parser.add_argument("--num-edges", type=int, default=20_000_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=repeats)
    return parser


def main() -> None:
    options = parser_of(__doc__, repeats=7).parse_args()
    torch.set_num_threads(1)

    graph = power_law_communities(options.num_nodes, options.num_edges)
    print(machine())
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, largest in-degree {graph.degrees().max():,}")
    size, repeats = options.batch_size, options.repeats
    for lines in (
        bench_sampling(graph, size, repeats),
        bench_products(graph, size),
        bench_gather(graph, [15, 10, 5], size, repeats),
        bench_union(graph, [15, 10, 5], size, min(repeats, 3)),
        bench_loader(graph, [15, 10, 5], size, repeats),
        bench_step(graph, size, repeats),
        bench_waiting(graph, size),
    ):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
