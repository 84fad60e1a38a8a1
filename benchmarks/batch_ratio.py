"""What a whole batch costs beside the gather of its rows alone, in float32 and from rows kept in bfloat16.

    python benchmarks/batch_ratio.py                        # 1M nodes, 20M edges: 3 GB of memory, two minutes
    python benchmarks/batch_ratio.py --num-nodes 100000 --num-edges 2000000

128 features, which a batch has in float32 in any case. One thread; CPU time, medians. A batch, our gather of its rows,
and torch's take turns, all into memory that is used again. Torch's leaves bfloat16 as it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from harness import machine
from sampling import batches_of_seeds, cpu_ms, parser_of, power_law_communities, row

from lightning_gnn_dist.batches.pool import BufferPool, gather_rows
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


def bench_ratio(graph: Graph, batch_size: int, repeats: int) -> Iterator[str]:
    """A whole batch, and the rows of its features alone: by our kernel, and by torch. They take turns; medians."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(graph.num_nodes, 128).to(dtype)
        held = Graph(graph.indptr, graph.indices, {"x": x})
        for num_neighbors in ([15, 10], [15, 10, 5]):
            for bulk_size in (1, 8):
                yield ratio(held, num_neighbors, batch_size, bulk_size, repeats)


def ratio(graph: Graph, num_neighbors: list[int], batch_size: int, bulk_size: int, repeats: int) -> str:
    sampler, x = NeighborSampler(num_neighbors), graph.node_arrays["x"]
    source, pool = GraphSource(graph, sampler), BufferPool(bulk_size + 1)
    source.keep_buffers(bulk_size + 1)
    seeds = batches_of_seeds(graph, batch_size, bulk_size * repeats)
    nodes = [sampler.sample_bulk(graph, [ids], [BatchKey(0, 0, i)])[0].nodes for i, ids in enumerate(seeds)]
    buffer = gather_rows(x, max(nodes, key=len))

    def batches(numbers: range) -> object:
        return list(source.make([seeds[i] for i in numbers], [BatchKey(0, 0, i) for i in numbers]))

    def ours(numbers: range) -> object:
        return [gather_rows(x, nodes[i], pool, widen=True) for i in numbers]

    def torchs(numbers: range) -> object:
        return [torch.index_select(x, 0, nodes[i], out=buffer[: len(nodes[i])]) for i in numbers]

    times: dict[Callable[[range], object], list[float]] = {batches: [], ours: [], torchs: []}
    for repeat in range(repeats):
        for make, taken in times.items():
            numbers = range(repeat * bulk_size, (repeat + 1) * bulk_size)
            taken.append(cpu_ms(lambda make=make, numbers=numbers: make(numbers), 1) / bulk_size)
    whole, alone, plain = (statistics.median(taken) for taken in times.values())
    name = f"{str(x.dtype)[6:]} {num_neighbors}, bulks of {bulk_size}"
    return row(
        name, whole, f"gather {alone:.2f} ms, {whole / alone:.2f} times; torch's {plain:.2f} ms, {whole / plain:.2f}"
    )


def main() -> None:
    options = parser_of(__doc__, repeats=21).parse_args()
    torch.set_num_threads(1)
    graph = power_law_communities(options.num_nodes, options.num_edges)
    print(machine())
    for line in bench_ratio(graph, options.batch_size, options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
