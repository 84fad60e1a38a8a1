"""What a batch costs here, and what the same batch costs PyG and DGL.

    export OMP_NUM_THREADS=1
    python benchmarks/sampling_peers.py                             # 1M nodes, 20M edges: 6 GB of memory, some minutes
    THP_MEM_ALLOC_ENABLE=1 python benchmarks/sampling_peers.py      # torch allocates in pages of 2 MB

Batches of three hops around the same seeds, drawn without replacement, from one graph and one array of features. One
thread; CPU times, the best of several passes, in which all take turns. Peers that cannot be imported are left out.

None has wheels for every torch, so they are built from source with a C++ compiler, each in a clone of the commit that
`sampling_peers.md` names, in an environment that has torch and setuptools, and for DGL what it requires and `cython<3`:

    git submodule update --init --recursive
    FORCE_CUDA=0 pip install --no-build-isolation --no-deps .               # pyg-lib
    FORCE_ONLY_CPU=1 pip install --no-build-isolation --no-deps .           # torch-scatter, torch-sparse
    DGL_HOME=$PWD bash script/build_dgl.sh -c -t release -e "-DUSE_LIBXSMM=OFF -DBUILD_SPARSE=OFF"    # DGL, GraphBolt
    cd python && python setup.py build_ext --inplace                        # and this folder on PYTHONPATH
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch_geometric
from harness import machine
from peers.dgl_core import dgl_and_graphbolt
from sampling import consume, parser_of, power_law_communities, receivers_of
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn_dist.batches.batches import Batches, Deal, Learning
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

NUM_NEIGHBORS = [15, 10, 5]
NUM_BATCHES = 10  # of a pass

Size = tuple[int, int]  # nodes and edges


@dataclass(frozen=True)
class Way:
    """One way to make the same batches: the neighbourhoods alone, and with their features."""

    name: str
    samples: Callable[[], Iterable[Any]]
    batches: Callable[[], Iterable[Any]]
    size: Callable[[Any], Size]  # of one of ``samples``


def our_ways(graph: Graph, seeds: Tensor) -> list[Way]:
    """As a step on blocks takes it, and with the ``edge_index`` that is made when somebody asks for it."""
    sampler, chunks = NeighborSampler(NUM_NEIGHBORS), seeds.chunk(NUM_BATCHES)
    deal = Deal(seeds, NUM_BATCHES, 0, shuffle=False)
    learning = Learning(GraphSource(graph, sampler), deal)
    loader = Batches(lambda _: learning, NUM_BATCHES, bulk_size=1, num_threads=0)

    def samples() -> Iterator[Any]:
        return (sampler.sample_bulk(graph, [chunk], [BatchKey(0, 0, i)])[0] for i, chunk in enumerate(chunks))

    def size(sample: Any) -> Size:
        return sample.nodes.numel(), sample.indices.numel()

    return [
        Way("ours", samples, lambda: ([block.adj for block in batch.blocks] for batch in loader), size),
        Way("ours, with edge_index", samples, lambda: (batch.edge_index for batch in loader), size),
    ]


def pyg_ways(graph: Graph, seeds: Tensor) -> list[Way]:
    """PyG draws with pyg-lib where it can, else with torch-sparse: the flag that says so is set for every pass."""
    found = [(name, find(module)) for name, module in (("pyg-lib", "pyg_lib"), ("torch-sparse", "torch_sparse"))]
    if not any(module for _, module in found):
        return []
    edge_index = torch.stack([graph.indices.long(), receivers_of(graph)])
    data = Data(num_nodes=graph.num_nodes, edge_index=edge_index, **graph.node_arrays)
    size, chunks = seeds.numel() // NUM_BATCHES, seeds.chunk(NUM_BATCHES)
    loader = NeighborLoader(data, NUM_NEIGHBORS, seeds, batch_size=size, is_sorted=True, num_workers=0)

    def using(with_pyg_lib: bool, alone: bool) -> Iterator[Any]:
        torch_geometric.typing.WITH_PYG_LIB = with_pyg_lib
        draw = loader.node_sampler.sample_from_nodes
        yield from (draw(NodeSamplerInput(None, chunk)) for chunk in chunks) if alone else loader

    return [
        Way(
            f"PyG with {name} {module.__version__}",
            partial(using, name == "pyg-lib", True),
            partial(using, name == "pyg-lib", False),
            lambda sample: (sample.node.numel(), sample.row.numel()),
        )
        for name, module in found
        if module
    ]


def dgl_way(dgl: Any, graph: Graph, seeds: Tensor, bits: int) -> Way:
    """DGL's own loader, which fetches what its sampler is told to."""
    theirs = dgl.graph(("csc", (graph.indptr, graph.indices.long(), [])), num_nodes=graph.num_nodes)
    theirs, seeds = (theirs.int(), seeds.int()) if bits == 32 else (theirs, seeds)
    theirs.ndata.update(graph.node_arrays)
    size, fanouts = seeds.numel() // NUM_BATCHES, NUM_NEIGHBORS[::-1]
    alone = dgl.dataloading.NeighborSampler(fanouts)
    whole = dgl.dataloading.NeighborSampler(fanouts, prefetch_node_feats=["x"], prefetch_labels=["y"])
    loader = dgl.dataloading.DataLoader(theirs, seeds, whole, batch_size=size, num_workers=0)
    return Way(
        f"DGL {dgl.__version__}, ids of {bits} bits",
        lambda: (alone.sample(theirs, chunk) for chunk in seeds.chunk(NUM_BATCHES)),
        lambda: ((blocks, blocks[0].srcdata["x"]) for _, _, blocks in loader),
        lambda sample: (sample[0].numel(), sum(block.num_edges() for block in sample[2])),
    )


def graphbolt_way(graphbolt: Any, graph: Graph, seeds: Tensor) -> Way:
    """GraphBolt's pipeline, with ids of 32 bits, as it stores them itself where they suffice."""
    theirs = graphbolt.fused_csc_sampling_graph(graph.indptr, graph.indices.int())
    features = graphbolt.BasicFeatureStore({("node", None, "x"): graphbolt.TorchBasedFeature(graph.node_arrays["x"])})
    items = graphbolt.ItemSet((seeds.int(), graph.node_arrays["y"][seeds]), names=("seeds", "labels"))

    def pipeline(fetch: bool) -> Any:
        stages = graphbolt.ItemSampler(items, batch_size=seeds.numel() // NUM_BATCHES)
        stages = stages.sample_neighbor(theirs, NUM_NEIGHBORS[::-1])
        stages = stages.fetch_feature(features, node_feature_keys=["x"]) if fetch else stages
        return graphbolt.DataLoader(stages, num_workers=0)

    alone, whole = pipeline(False), pipeline(True)
    return Way(
        "GraphBolt, ids of 32 bits",
        lambda: alone,
        lambda: ((batch, batch.node_features["x"]) for batch in whole),
        lambda batch: (
            batch.input_nodes.numel(),
            sum(layer.sampled_csc.indices.numel() for layer in batch.sampled_subgraphs),
        ),
    )


def find(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        print(f"{name} is left out: {error}".splitlines()[0].split(". ")[0])
        return None


def all_ways(graph: Graph, seeds: Tensor) -> list[Way]:
    ways = [*our_ways(graph, seeds), *pyg_ways(graph, seeds)]
    dgl, graphbolt = dgl_and_graphbolt()
    if dgl:
        ways += [dgl_way(dgl, graph, seeds, bits) for bits in (64, 32)]
    if graphbolt:
        ways.append(graphbolt_way(graphbolt, graph, seeds))
    return ways


def bench_peers(graph: Graph, batch_size: int, repeats: int) -> Iterator[str]:
    """A row of a table for everyone."""
    arrays = {"x": torch.randn(graph.num_nodes, 128), "y": torch.zeros(graph.num_nodes, dtype=torch.int64)}
    graph = Graph(graph.indptr, graph.indices, arrays)
    ways = all_ways(graph, permutation(graph.num_nodes, 1, 0)[: NUM_BATCHES * batch_size])
    sizes = [mean_size(way) for way in ways]
    alone, whole = best_of(ways, repeats)
    yield "| | nodes | edges | sampling alone, ms | ours is faster | whole batch, ms | ours is faster |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for way, (nodes, edges), one, other in zip(ways, sizes, alone, whole, strict=True):
        ratios = f"{one / alone[0]:.1f} times", f"{other / whole[0]:.1f} times"
        yield f"| {way.name} | {nodes:,} | {edges:,} | {one:.1f} | {ratios[0]} | {other:.1f} | {ratios[1]} |"


def mean_size(way: Way) -> Size:
    """Nodes and edges of a batch, as a pass has them; this warms it up too."""
    sizes = [way.size(sample) for sample in way.samples()]
    assert len(sizes) == NUM_BATCHES
    consume(way.batches())
    return sum(nodes for nodes, _ in sizes) // NUM_BATCHES, sum(edges for _, edges in sizes) // NUM_BATCHES


def best_of(ways: list[Way], repeats: int) -> tuple[list[float], list[float]]:
    """The least CPU time of a batch by each way, in milliseconds: alone, and whole. They take turns."""
    passes: list[list[float]] = [[] for _ in range(2 * len(ways))]
    for _ in range(repeats):
        for times, make in zip(passes, [way.samples for way in ways] + [way.batches for way in ways], strict=True):
            start = time.process_time()
            consume(make())
            times.append(1e3 * (time.process_time() - start) / NUM_BATCHES)
    least = [min(times) for times in passes]
    return least[: len(ways)], least[len(ways) :]


def main() -> None:
    parser = parser_of(__doc__, repeats=7)
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("everyone shall run in one thread: set OMP_NUM_THREADS=1 before the start")
    torch.set_num_threads(1)
    graph = power_law_communities(options.num_nodes, options.num_edges)
    pages = "2 MB" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "4 kB"
    print(f"torch {torch.__version__}, PyG {torch_geometric.__version__}, pages of {pages}")
    print(machine())
    for line in bench_peers(graph, options.batch_size, options.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
