"""What a batch costs on a GPU: sampled and gathered there, or in RAM and brought there beside the training.

    python benchmarks/sampling_cuda.py > benchmarks/sampling_cuda.md       # 1M nodes, 20M edges, on the first GPU
    python benchmarks/sampling_cuda.py --device cpu --num-nodes 20000 --num-edges 400000    # does it run at all?

Wall times, the best of several repetitions, each with a synchronisation at its end. The limit of sampling is the
measured bandwidth of the device's memory over 95 bytes an edge: what drawing, reading and placing one edge moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from harness import machine
from sampling import Net, batches_of_seeds, consume, parser_of, power_law_communities, receivers_of, with_extras
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.placement import Placement, stream_to
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.device import DeviceSampler
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.targets.sampler import LinkSampler
from lightning_gnn_dist.sampling.targets.tables import OwnLinks

BYTES_AN_EDGE = 95
NUM_BATCHES = 48  # of a pass, where passes are timed
NUM_OTHERS = 8  # of evaluation, corrections and links


def wall_ms(device: torch.device, function: Callable[[], object], repeats: int) -> float:
    """The least wall time of a call, in milliseconds, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> Iterator[str]:
    yield f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
    else:
        yield "no GPU: these figures say only that the benchmark runs"


def bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes that a copy reads and writes in a second."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 24), device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / wall_ms(device, lambda: target.copy_(source), repeats) * 1e3


def bench_sampler(
    graph: Graph, resident: Graph, sampler: Sampler, batch_size: int, limit: float, repeats: int
) -> Iterator[str]:
    device = resident.indices.device
    seeds, keys = batches_of_seeds(graph, batch_size, 64), [BatchKey(0, 0, i) for i in range(64)]
    there = DeviceSampler(sampler)
    expected = sampler.sample_bulk(graph, seeds[:4], keys[:4])
    found = there.sample_bulk(resident, seeds[:4], keys[:4])
    same = all(
        one.nodes.equal(other.nodes.cpu()) and one.indices.equal(other.indices.cpu())
        for one, other in zip(expected, found, strict=True)
    )
    edges = sum(sample.indices.numel() for sample in expected) / 4
    yield f"{sampler}, {batch_size} seeds: {edges:,.0f} edges a batch; as in RAM: {'yes' if same else 'NO'}"
    for k in (1, 16, 64):
        ms = wall_ms(device, partial(there.sample_bulk, resident, seeds[:k], keys[:k]), repeats) / k
        rate = edges / ms * 1e3
        yield row(f"bulks of {k}", ms, f"{rate / 1e6:.1f} M edges per second, {rate / limit:.1%} of the limit")
    ms = wall_ms(device, partial(sampler.sample_bulk, graph, seeds[:16], keys[:16]), repeats) / 16
    yield row("in RAM, one thread", ms, f"{edges / ms / 1e3:.1f} M edges per second")


def bench_gather(resident: Graph, rows: Tensor, speed: float, repeats: int) -> Iterator[str]:
    x = resident.node_arrays["x"]
    yield f"gathering {rows.numel():,} rows of {x.size(1)} numbers, {x.dtype}"
    ms = wall_ms(x.device, lambda: x.index_select(0, rows), repeats)
    moved = 2 * rows.numel() * x.size(1) * x.element_size()
    yield row("on the device", ms, f"{moved / ms / speed * 1e3:.1%} of the bandwidth of a copy")


def bench_ways(graph: Graph, device: torch.device, num_neighbors: list[int], size: int, repeats: int) -> Iterator[str]:
    """A pass over batches, and a pass with training on them, by each way to the device."""
    seeds = permutation(graph.num_nodes, 1, 0)[: NUM_BATCHES * size]
    yield f"whole batches {num_neighbors}, {size} seeds, {graph.node_arrays['x'].size(1)} floats a node, on the device"
    for bulk_size in (1, 4, 16):
        resident, sampler = Placement(device, "device").of(graph, NeighborSampler(num_neighbors))
        loader = loader_of(resident, sampler, seeds, bulk_size, device)
        yield from bench_way(f"made there, bulks of {bulk_size}", loader, device, repeats)
    loader = loader_of(graph, NeighborSampler(num_neighbors), seeds, 4, device)
    yield from bench_way("made in RAM, pinned", loader, device, repeats)
    plain = GraphSource(graph, NeighborSampler(num_neighbors))
    loader = BatchLoader(plain, seeds, NUM_BATCHES, seed=0, bulk_size=4)
    yield from bench_way("made in RAM, batch.to()", loader, device, repeats)
    if not WITH_PYG_LIB and not WITH_TORCH_SPARSE:
        yield "  PyG: neither pyg-lib nor torch-sparse is installed"
        return
    edge_index = torch.stack([graph.indices.long(), receivers_of(graph)])
    data = Data(num_nodes=graph.num_nodes, edge_index=edge_index, **graph.node_arrays)
    theirs = NeighborLoader(data, num_neighbors, input_nodes=seeds, batch_size=size, num_workers=4)
    ms = wall_ms(device, lambda: consume(batch.to(device) for batch in theirs), repeats) / len(theirs)
    yield row("PyG NeighborLoader, 4 workers", ms)


def loader_of(graph: Graph, sampler: Sampler, seeds: Tensor, bulk_size: int, device: torch.device) -> BatchLoader:
    source = GraphSource(graph, sampler, stream=stream_to(device))
    return BatchLoader(source, seeds, NUM_BATCHES, seed=0, bulk_size=bulk_size)


def bench_way(name: str, loader: BatchLoader, device: torch.device, repeats: int) -> Iterator[str]:
    net = Net().to(device)

    def train() -> None:
        for batch in loader:
            net.step(net.by_adj, batch.to(device))

    alone = wall_ms(device, lambda: consume(batch.to(device) for batch in loader), repeats) / NUM_BATCHES
    trained = wall_ms(device, train, repeats) / NUM_BATCHES
    yield row(name, alone, f"with a training step {trained:.2f} ms")
    loader.close()


def bench_others(graph: Graph, device: torch.device, size: int, repeats: int) -> Iterator[str]:
    """What is made beside training: evaluation, corrections and links, each on the device and in RAM."""
    seeds, everyone = permutation(graph.num_nodes, 1, 0), NeighborSampler([-1, -1])
    some, nodes = seeds[: NUM_OTHERS * (size // 4 or 1)], NeighborSampler([15, 10])
    yield f"evaluation, {size // 4 or 1} seeds with all neighbours of two hops, in bulks of 1"
    for name, source in ways(graph, everyone, device):
        loader = BatchLoader(source, some, NUM_OTHERS, seed=0, shuffle=False, bulk_size=1)
        yield row(name, wall_ms(device, partial(pass_over, loader, device), repeats) / NUM_OTHERS)
        loader.close()
    yield f"corrections, {size} seeds [15, 10], one batch at a time"
    for name, source in ways(graph, nodes, device):
        batches = GlobalBatches(source, seeds, size, seed=0)
        yield row(name, wall_ms(device, partial(correct, batches, device), repeats) / NUM_OTHERS)
    yield f"links, {size} edges and a false one each, [15, 10], bulks of 4"
    links = LinkSampler(nodes, OwnLinks(1, Candidates(range(graph.num_nodes)), undirected=False))
    edges = permutation(graph.num_edges, 1, 0)[: NUM_OTHERS * size]
    for name, source in ways(graph, links, device, graph.num_edges):
        loader = BatchLoader(source, edges, NUM_OTHERS, seed=0, bulk_size=4)
        yield row(name, wall_ms(device, partial(pass_over, loader, device), repeats) / NUM_OTHERS)
        loader.close()


def ways(
    graph: Graph, sampler: Sampler, device: torch.device, num_ids: int | None = None
) -> Iterator[tuple[str, GraphSource]]:
    there, drawn = Placement(device, "device").of(graph, sampler)
    yield "made there", GraphSource(there, drawn, num_ids=num_ids, stream=stream_to(device))
    yield "made in RAM, pinned", GraphSource(graph, sampler, num_ids=num_ids, stream=stream_to(device))


def correct(batches: GlobalBatches, device: torch.device) -> None:
    pass_over(batches.of_round(0, stop=NUM_OTHERS), device)


def pass_over(batches: Iterable[Data], device: torch.device) -> None:
    consume(batch.to(device) for batch in batches)


def bench_step(graph: Graph, device: torch.device, num_neighbors: list[int], size: int, repeats: int) -> Iterator[str]:
    """The step alone, on a batch that is there."""
    resident, sampler = Placement(device, "device").of(graph, NeighborSampler(num_neighbors))
    batch = next(iter(BatchLoader(GraphSource(resident, sampler), torch.arange(size), 1, seed=0, num_threads=0)))
    net = Net().to(device)
    yield row("a training step alone", wall_ms(device, lambda: net.step(net.by_adj, batch), repeats))


def row(name: str, ms: float, note: str = "") -> str:
    return f"  {name:<30} {ms:>9.3f} ms   {note}".rstrip()


def lines(graph: Graph, device: torch.device, size: int, repeats: int) -> Iterator[str]:
    yield from describe(device)
    yield f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, largest in-degree {graph.degrees().max():,}"
    speed = bandwidth(device, repeats)
    limit = speed / BYTES_AN_EDGE
    yield f"a copy moves {speed / 1e9:.0f} GB/s; the limit of sampling is then {limit / 1e6:,.0f} M edges per second"
    weighted = with_extras(graph)
    resident, _ = Placement(device, "device").of(weighted, NeighborSampler([1]))
    for sampler in (
        NeighborSampler([15, 10, 5]),
        NeighborSampler([15, 10, 5], replace=True),
        NeighborSampler([15, 10, 5], weight="edge_weight"),
        LadiesSampler([512, 512, 512]),
        FastGCNSampler([512, 512, 512]),
    ):
        yield from bench_sampler(weighted, resident, sampler, size, limit, repeats)
    featured = Graph(graph.indptr, graph.indices, {"x": torch.randn(graph.num_nodes, 128)})
    resident, sampler = Placement(device, "device").of(featured, NeighborSampler([15, 10, 5]))
    (sample,) = sampler.sample_bulk(resident, [torch.arange(size)], [BatchKey(0, 0, 0)])
    yield from bench_gather(resident, sample.nodes, speed, repeats)
    yield from bench_ways(featured, device, [15, 10], size, repeats)
    yield from bench_step(featured, device, [15, 10], size, repeats)
    yield from bench_others(featured, device, size, repeats)


def main() -> None:
    parser = parser_of(__doc__, repeats=5)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    print(machine())
    graph = power_law_communities(options.num_nodes, options.num_edges)
    print("# Sampling on a device\n\n`python benchmarks/sampling_cuda.py`\n\n```text")
    for line in lines(graph, torch.device(options.device), options.batch_size, options.repeats):
        print(line, flush=True)
    print("```")


if __name__ == "__main__":
    main()
