"""What it would save to reduce the neighbours' features of the first layer while they are gathered.

    python benchmarks/reduce_first.py                   # 1M nodes, 20M edges: 3 GB of memory, some minutes
    python benchmarks/reduce_first.py --num-nodes 100000 --num-edges 2000000

Features need no gradient, so of the outermost nodes a first layer that takes a mean needs no rows, only their means:

    x = [rows of the first block's receivers; means of their senders],   receiver i has the one sender num_dst + i

and the user's module is as before, for the mean of one row is that row. "Whole" batches hold the rows of all nodes,
"reduced" ones are made so, and "free" ones are reduced at no cost at all, which no kernel can beat: their means are
whatever is in the buffer. Batches and steps are measured in turns, the least CPU time of each counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sampling import Net, batches_of_seeds, parser_of, power_law_communities
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import spmm

from lightning_gnn_dist.batches.assembling import Content, Taken, assemble, made_of
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.pool import BufferPool, Pool, gather_rows
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.compiling import inlined, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import LINE, Array
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.convert import SUFFIX, quantize_rows, scale_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.block import Block
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

WIDTH = 128
ROWS_AHEAD = 8  # measured flat between 4 and 24
POOL = BufferPool(max_free=4)

_U = np.uint64


@inlined
def load_number(source: Array, at: int) -> Any:
    return np.float32(source[_U(at)])


@inlined
def load_bfloat16(source: Array, at: int) -> Any:
    return np.uint32(np.uint32(source[_U(at)]) << np.uint32(16)).view(np.float32)


@part
def mean_rows(source: Array, scales: Array, rows: Array, indptr: Array, out: Array, load: Any) -> None:
    """Row ``i`` of ``out`` is the mean of the rows ``rows[indptr[i] : indptr[i + 1]]`` of ``source``, float32.

    Four rows at a time are added to one that stays in the cache, which is 1.5 times as fast as one by one. So is
    a width that the compiler knows.
    """
    last = len(rows) - 1
    for i in range(len(indptr) - 1):
        edge, end, to = indptr[_U(i)], indptr[_U(i + 1)], i * WIDTH
        share = np.float32(1) / np.float32(max(end - edge, 1))
        for j in range(WIDTH):
            out[_U(to + j)] = np.float32(0)
        while edge + 4 <= end:
            for k in range(4):
                prefetch_row(source, rows[_U(min(edge + k + ROWS_AHEAD, last))] * WIDTH)
            a, b, c, d = rows[_U(edge)], rows[_U(edge + 1)], rows[_U(edge + 2)], rows[_U(edge + 3)]
            u, v = share * scale(scales, a), share * scale(scales, b)
            w, z = share * scale(scales, c), share * scale(scales, d)
            a, b, c, d = a * WIDTH, b * WIDTH, c * WIDTH, d * WIDTH
            for j in range(WIDTH):
                first, second = load(source, a + j) * u + load(source, b + j) * v, load(source, c + j) * w
                out[_U(to + j)] += first + (second + load(source, d + j) * z)
            edge += 4
        while edge < end:
            prefetch_row(source, rows[_U(min(edge + ROWS_AHEAD, last))] * WIDTH)
            a = rows[_U(edge)]
            u = share * scale(scales, a)
            for j in range(WIDTH):
                out[_U(to + j)] += load(source, a * WIDTH + j) * u
            edge += 1


@inlined
def scale(scales: Array, row: int) -> Any:
    return scales[_U(row)] if len(scales) else np.float32(1)


@inlined
def prefetch_row(source: Array, start: int) -> None:
    for offset in range(0, WIDTH, LINE // source.itemsize):
        prefetch(source, start + offset)


def means_into(out: Tensor, graph: Graph, sample: Sample) -> None:
    x, scales = graph.node_arrays["x"], scale_of("x", graph.node_arrays)
    is_bfloat16 = x.dtype == torch.bfloat16
    source = (x.view(torch.uint16) if is_bfloat16 else x).view(-1).numpy()
    by = np.empty(0, np.float32) if scales is None else scales.view(-1).numpy()
    rows = sample.nodes.numpy()[sample.indices.numpy()]
    load = load_bfloat16 if is_bfloat16 else load_number
    mean_rows(source, by, rows, sample.indptr.numpy(), out.view(-1).numpy(), load)


def whole(graph: Graph, sample: Sample, pool: Pool = POOL) -> SampledData:
    return assemble(graph, sample, lambda _: pool)


def reduced(graph: Graph, sample: Sample, pool: Pool = POOL, *, is_free: bool = False) -> SampledData:
    num_dst = sample.indptr.numel() - 1
    others = {name: array for name, array in graph.node_arrays.items() if name not in ("x", "x" + SUFFIX)}
    batch = made_of(Content.of_one_type(sample, Taken(others, sample.nodes), Taken({})))
    outermost, *inner = batch.blocks
    batch.x = reduced_rows(graph, sample, pool, is_free=is_free)
    has_senders = outermost.indptr.diff() > 0
    indptr = torch.cat([outermost.indptr[:1], has_senders.cumsum(0, dtype=torch.int32)])
    senders = num_dst + has_senders.nonzero().view(-1).to(torch.int32)
    batch.blocks = [Block(num_dst, 2 * num_dst, indptr, senders), *inner]
    return batch


def reduced_rows(graph: Graph, sample: Sample, pool: Pool = POOL, *, is_free: bool = False) -> Tensor:
    num_dst = sample.indptr.numel() - 1
    x = pool.take(2 * num_dst * WIDTH * 4).view(torch.float32).view(2 * num_dst, WIDTH)
    array, scales = graph.node_arrays["x"], scale_of("x", graph.node_arrays)
    gather_rows(array, sample.nodes[:num_dst], Given(x[:num_dst]), scale=scales, widen=True)
    if not is_free:
        means_into(x[num_dst:], graph, sample)
    return x


def whole_rows(graph: Graph, sample: Sample) -> Tensor:
    array, scales = graph.node_arrays["x"], scale_of("x", graph.node_arrays)
    return gather_rows(array, sample.nodes, POOL, scale=scales, widen=True)


class Given:
    """A pool of one place, so that rows are gathered to where they belong."""

    def __init__(self, rows: Tensor) -> None:
        self._bytes = rows.view(-1).view(torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        return self._bytes[:num_bytes]


def free(graph: Graph, sample: Sample) -> SampledData:
    return reduced(graph, sample, is_free=True)


class ReducingSource(GraphSource):
    def _assemble(self, sample: Sample) -> SampledData:
        pool = self._pool_of("x")
        assert pool is not None
        return reduced(self._graph, sample, pool)


def net_of(sizes: list[int]) -> Net:
    net = Net()
    net.convs = nn.ModuleList([SAGEConv(*pair) for pair in pairwise(sizes)])
    return net


def stored(x: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    yield "float32", {"x": x}
    yield "bfloat16", {"x": x.bfloat16()}
    rows, scales = quantize_rows(x)
    yield "int8", {"x": rows, "x" + SUFFIX: scales}


def check(graph: Graph, sample: Sample, net: Net) -> None:
    """Whole and reduced batches give the same outputs and gradients."""
    results = []
    for make in (whole, reduced):
        net.zero_grad()
        out = net.by_adj(make(graph, sample))
        out.square().mean().backward()
        results.append([out, *(parameter.grad for parameter in net.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def bench_cpu(graph: Graph, num_neighbors: list[int], sizes: list[int], batch_size: int, repeats: int) -> Iterator[str]:
    sampler, net = NeighborSampler(num_neighbors), net_of(sizes)
    seeds, keys = batches_of_seeds(graph, batch_size, 1), [BatchKey(0, 0, 0)]
    sample = sampler.sample_bulk(graph, seeds, keys)[0]
    counts = sample.nodes.numel(), sample.indices.numel(), sample.indptr.numel() - 1
    yield "SAGE {} on {}: {:,} nodes, {:,} edges to {:,} receivers".format(
        "-".join(map(str, sizes)), num_neighbors, *counts
    )
    check(graph, sample, net)
    yield from bench_means(graph, sample, repeats)
    makers: dict[str, Callable[[Graph, Sample], SampledData]] = {"whole": whole, "reduced": reduced, "free": free}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for _ in range(repeats):
        for name, make in makers.items():
            started = time.process_time()
            batch = make(graph, sampler.sample_bulk(graph, seeds, keys)[0])
            made = time.process_time()
            net.step(net.by_adj, batch)
            times[name].append((made - started, time.process_time() - made))
            del batch
    yield from rows_of(times, ("batch", "step"))


def rows_of(times: dict[str, list[tuple[float, float]]], names: tuple[str, str]) -> Iterator[str]:
    """The least of both times, and of the first kind how often the others fit into it."""
    least = {name: [1e3 * min(column) for column in zip(*pairs, strict=True)] for name, pairs in times.items()}
    for name, (one, other) in least.items():
        ratio = sum(least["whole"]) / (one + other)
        line = f"  {name:<8} {names[0]:<5} {one:>7.2f}   {names[1]:<5} {other:>8.2f}   both {one + other:>8.2f} ms"
        yield line if name == "whole" else f"{line}   {ratio:.2f} times as fast"


def bench_means(graph: Graph, sample: Sample, repeats: int) -> Iterator[str]:
    """The two things that differ, without the rest of a batch and of a step: features, and the first layer's means."""
    makers = {"whole": (whole, whole_rows), "reduced": (reduced, reduced_rows)}
    blocks = {name: make(graph, sample).blocks[0] for name, (make, _) in makers.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for _ in range(repeats):
        for name, (_, gather) in makers.items():
            started = time.process_time()
            x = gather(graph, sample)
            made = time.process_time()
            spmm(blocks[name].adj, x, reduce="mean")
            times[name].append((made - started, time.process_time() - made))
            del x
    yield from rows_of(times, ("rows", "means"))


def bench_wall(graph: Graph, num_neighbors: list[int], sizes: list[int], batch_size: int) -> Iterator[str]:
    """The training loop, with one background thread: passes of 30 batches, in turns."""
    net, seeds = net_of(sizes), permutation(graph.num_nodes, 1, 0)[: 30 * batch_size]
    sampler = NeighborSampler(num_neighbors)
    sources = {"whole": GraphSource(graph, sampler), "reduced": ReducingSource(graph, sampler)}
    loaders = {name: BatchLoader(source, seeds, 30, seed=0, bulk_size=4) for name, source in sources.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(4):  # buffers grow in the first
        for name, loader in loaders.items():
            started = time.perf_counter()
            for batch in loader:
                net.step(net.by_adj, batch)
            seconds[name].append(time.perf_counter() - started)
    yield f"  wall, a pass of 30 batches, 1 background thread: {least_of(seconds)}"
    for loader in loaders.values():
        loader.close()


def least_of(seconds: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {min(times[1:]):.2f} s" for name, times in seconds.items())


def main() -> None:
    options = parser_of(__doc__, repeats=15).parse_args()
    torch.set_num_threads(1)

    plain = power_law_communities(options.num_nodes, options.num_edges)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    size, repeats = options.batch_size, options.repeats
    for storage, arrays in stored(torch.randn(plain.num_nodes, WIDTH)):
        graph = Graph(plain.indptr, plain.indices, arrays)
        print(f"{storage} features")
        for line in (
            *bench_cpu(graph, [15, 10], [WIDTH, 256, 32], size, repeats),
            *bench_wall(graph, [15, 10], [WIDTH, 256, 32], size),
            *bench_cpu(graph, [15, 10], [WIDTH, 64, 32], size, repeats),
            *bench_cpu(graph, [15, 10, 5], [WIDTH, 256, 256, 32], size, max(3, repeats // 3)),
        ):
            print(line, flush=True)


if __name__ == "__main__":
    main()
