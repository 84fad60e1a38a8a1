"""Batches of a typed graph in shards are those of the whole graph, to the bit."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.batches.hetero import assemble_typed
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.prepare.shard import Bounds, Shard, save_shards
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sharded.sampling import begin, finish
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph
from lightning_gnn_dist.wire.channel import open_channel
from tests.graph.typed.graphs import EDGES
from tests.ranks import run_ranks
from tests.sharded.typed.graphs import check_equal, contents, in_order_of_shards, some_graph, some_partition

PER_TYPE = {kind: [number, 2 - number % 2] for number, kind in enumerate(EDGES)}  # 0 for the first one


def seeds_of(rank: int, world_size: int, nodes: range) -> list[Tensor]:
    """One batch more than ranks before it; the last rank of several asks for nothing."""
    generator = torch.Generator().manual_seed(10 + rank)
    size = 0 if rank and rank == world_size - 1 else len(nodes) // 3
    return [torch.randperm(len(nodes), generator=generator)[: size and size + i] + nodes.start for i in range(rank + 1)]


def keys_of(rank: int, bulk: int, count: int) -> list[BatchKey]:
    return [BatchKey(7 + rank, bulk, i) for i in range(count)]


def drawn(rank: int, world_size: int, folders: list[str], sampler: NeighborSampler, cache: int) -> list[Any]:
    """Of each graph the contents of the batches of two bulks, and how many rows were held."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    found = []
    for folder in folders:
        shard = Shard.open(folder, rank)
        graph = TypedShardedGraph(shard, open_channel(world_size), cache_bytes=cache)
        seeds = seeds_of(rank, world_size, graph.types.nodes_of(graph.types.seed_type()))
        bulks = [begin(graph, sampler, seeds, keys_of(rank, bulk, len(seeds))) for bulk in range(2)]
        made = finish(graph, bulks[0], bulks[1:], all_labels=rank == 0)
        made += finish(graph, bulks[1], all_labels=rank == 0)
        graph.close()
        found.append(([contents(batch) for batch in made], graph.cache.hits))
    dist.destroy_process_group()
    return found


def compare(graphs: list[Graph], world_size: int, sampler: NeighborSampler, cache: int, folder: Path) -> None:
    parts = [some_partition(graph, world_size) for graph in graphs]
    for number, (graph, partition) in enumerate(zip(graphs, parts, strict=True)):
        save_shards(graph, partition, folder / str(number))
    names = [str(folder / str(number)) for number in range(len(graphs))]
    results = run_ranks(drawn, world_size, names, sampler, cache)
    for number, (graph, partition) in enumerate(zip(graphs, parts, strict=True)):
        whole = in_order_of_shards(graph, partition)
        assert whole.types is not None
        whole = whole.with_seeds(Bounds.read(names[number]).types.seed_type())  # type: ignore[union-attr]
        for rank, of_rank in enumerate(results):
            found, hits = of_rank[number]
            assert (hits > 0) == (cache > 0 and rank < max(1, world_size - 1) and world_size > 1)
            seeds, expected = seeds_of(rank, world_size, whole.types.nodes_of(whole.types.seed_type())), []
            for bulk in range(2):
                samples = sampler.sample_bulk(whole, seeds, keys_of(rank, bulk, len(seeds)))
                expected += [assemble_typed(whole, sample, all_labels=rank == 0) for sample in samples]
            assert len(found) == len(expected)
            for ours, theirs in zip(found, map(contents, expected), strict=True):
                check_equal(ours, theirs)


@pytest.mark.parametrize(
    ("world_size", "sampler", "cache"),
    [
        (4, NeighborSampler([3, 2]), 0),
        pytest.param(2, NeighborSampler([-1, 2, 1]), 100_000, marks=pytest.mark.slow),
        (3, NeighborSampler(PER_TYPE), 100_000),
        (1, NeighborSampler([-1, 1]), 0),
        pytest.param(3, NeighborSampler([2, 3], replace=True), 0, marks=pytest.mark.slow),
    ],
    ids=["four", "all neighbours", "per type", "alone", "replace"],
)
def test_batches_are_those_of_the_whole_graph(
    tmp_path: Path, world_size: int, sampler: NeighborSampler, cache: int
) -> None:
    compare([some_graph(), some_graph(2)], world_size, sampler, cache, tmp_path)
