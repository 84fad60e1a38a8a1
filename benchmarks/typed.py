"""What a batch of a typed graph costs, against one of the same edges without types.

    python benchmarks/typed.py                          # 10M edges, 4 node types, 8 edge types: 1 GB, a minute
    python benchmarks/typed.py --num-types 200

Three costs for each drawn edge, in turns, CPU time, the lower quartile of all turns: drawing a batch; drawing it and
taking it apart into a CSR for each edge type; a whole batch with the rows of its features. Without types a node draws
as many neighbours as it does of all types together.

With ``--pyg`` a whole batch of PyG's ``NeighborLoader`` takes turns with those, and one of ours with the ``edge_index``
of each type, which is made when it is asked for. PyG draws with pyg-lib or torch-sparse, of which PyPI has no wheels:
``sampling_peers.py`` says how to build them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from harness import machine
from torch_geometric.loader import NeighborLoader

from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.apart import take_apart
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.build import EdgeTable, NodeTable, build
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

COUNTS = {"a": 400_000, "b": 300_000, "c": 200_000, "d": 100_000}
WIDTH, BATCH_SIZE = 128, 1024


def random_graph(num_types: int, num_edges: int) -> Graph:
    """Edges between random nodes, each type as many."""
    generator, kinds = np.random.default_rng(0), list(COUNTS)
    features = {kind: torch.from_numpy(generator.random((n, WIDTH), np.float32)) for kind, n in COUNTS.items()}
    edges = {}
    for number in range(num_types):
        ends = kinds[number % 4], kinds[(3 * number + number // 4 + 1) % 4]
        index = np.stack([generator.integers(COUNTS[end], size=num_edges // num_types) for end in ends])
        edges[ends[0], f"r{number}", ends[1]] = EdgeTable(torch.from_numpy(index), {})
    nodes = {kind: NodeTable(n, {"x": features[kind]}) for kind, n in COUNTS.items()}
    return typed_graph(*build(nodes, edges))


def seeds_of_batches() -> Iterator[tuple[torch.Tensor, BatchKey]]:
    number = 0
    while True:
        yield torch.randperm(COUNTS["a"])[:BATCH_SIZE], BatchKey(0, 0, number)
        number += 1


def lower_quartiles(works: dict[str, Callable[[torch.Tensor, BatchKey], int]], turns: int) -> dict[str, float]:
    """Nanoseconds of CPU time for each drawn edge."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    batches = seeds_of_batches()
    for _ in range(turns):
        for name, work in works.items():
            seeds, key = next(batches)
            started = time.thread_time()
            edges = work(seeds, key)
            spent[name].append((time.thread_time() - started) / edges * 1e9)
    return {name: float(np.quantile(of[2:], 0.25)) for name, of in spent.items()}


def works_of(graph: Graph, numbers: list[int]) -> dict[str, Callable[[torch.Tensor, BatchKey], int]]:
    sampler = NeighborSampler(numbers)
    source = GraphSource(graph, sampler)
    source.keep_buffers(2)

    def draw(seeds: torch.Tensor, key: BatchKey) -> int:
        return sampler.sample_bulk(graph, [seeds], [key])[0].indices.numel()

    def by_types(seeds: torch.Tensor, key: BatchKey) -> int:
        sample = sampler.sample_bulk(graph, [seeds], [key])[0]
        if graph.types.have_names:
            take_apart(graph, sample)
        return sample.indices.numel()

    def whole(seeds: torch.Tensor, key: BatchKey) -> int:
        (batch,) = source.make([seeds], [key])
        stores = batch.edge_stores if graph.types.have_names else [batch]
        return sum(store.num_edges for store in stores)

    return {"draw": draw, "draw, apart": by_types, "whole batch": whole}


def whole_batches(graph: Graph, numbers: list[int]) -> dict[str, Callable[[torch.Tensor, BatchKey], int]]:
    """A whole batch, with the ``edge_index`` of each type: ours, and PyG's."""
    source, data = GraphSource(graph, NeighborSampler(numbers)), graph.to_pyg()
    source.keep_buffers(2)
    filters = NeighborLoader(data, numbers, input_nodes=("a", None), batch_size=BATCH_SIZE)

    def ours(seeds: torch.Tensor, key: BatchKey) -> int:
        (batch,) = source.make([seeds], [key])
        return sum(batch[kind].edge_index.shape[1] for kind in batch.edge_types)

    def pygs(seeds: torch.Tensor, key: BatchKey) -> int:
        batch = filters(seeds)
        return sum(batch[kind].edge_index.shape[1] for kind in batch.edge_types)

    return {"ours, edge_index": ours, "PyG": pygs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-types", type=int, default=8)
    parser.add_argument("--num-edges", type=int, default=10_000_000)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--pyg", action="store_true", help="compare a whole batch with one of PyG's loader")
    options = parser.parse_args()
    print(machine())
    torch.set_num_threads(1)
    graph = random_graph(options.num_types, options.num_edges)
    rows = torch.cat([arrays["x"] for arrays in graph.types.node_arrays.values()])
    plain = Graph(graph.indptr, graph.indices, {"x": rows})
    numbers = [5, 4] if options.num_types <= 16 else [1, 1]
    into = options.num_types // 4
    typed, flat = works_of(graph, numbers), works_of(plain, [into * n for n in numbers])
    both = {f"typed {name}": work for name, work in typed.items()} | {f"plain {name}": w for name, w in flat.items()}
    peers = whole_batches(graph, numbers) if options.pyg else {}
    spent = lower_quartiles(both | peers, options.turns)
    print(f"{graph.num_edges} edges of {options.num_types} types, {numbers} of each; ns per drawn edge")
    for name in typed:
        one, other = spent[f"typed {name}"], spent[f"plain {name}"]
        print(f"{name:12}  typed {one:6.1f}  plain {other:6.1f}  ratio {one / other:.2f}")
    for name in peers:
        print(f"{name:16}  {spent[name]:7.1f}  ratio to ours {spent[name] / spent['typed whole batch']:.2f}")


if __name__ == "__main__":
    main()
