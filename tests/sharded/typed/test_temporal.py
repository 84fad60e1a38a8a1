"""Batches by time of a typed graph in shards: those of the whole graph, to the bit, and nothing later than a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import BatchKey, Graph, Partition, TemporalSampler, save_shards
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.wire.channel import open_channel
from tests.batch_contents import check_same, contents
from tests.ranks import run_ranks
from tests.sampling.temporal_graphs import typed
from tests.sharded.graphs import joined, made_of
from tests.sharded.typed.graphs import in_order_of_shards, some_partition

SIGHTS: list[dict[str, Any]] = [
    {},
    {"equal": True},
    {"last": 3},
    {"equal": True, "last": 1},
    {"pick": "latest"},
    {"replace": True},
]


def bulk_of(rank: int, world_size: int, nodes: range) -> tuple[list[Tensor], list[BatchKey]]:
    """Two batches around all nodes of a type in some order; the last rank of several asks for nothing."""
    order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(rank)) + nodes.start
    seeds = [order[:0] if rank and rank == world_size - 1 else order, order[: rank * 3]]
    return seeds, [BatchKey(rank, 2, number) for number in range(2)]


def drawn(rank: int, world_size: int, folders: list[str], samplers: list[TemporalSampler]) -> list[list[Any]]:
    found = []
    with joined(rank, world_size):
        for folder in folders:
            graph = ShardedGraph(Shard.open(folder, rank), open_channel(world_size))
            bulk = bulk_of(rank, world_size, graph.types.nodes_of("a"))
            made = [made_of(graph, sampler, *bulk) for sampler in samplers]
            graph.close()
            found.append([contents(batch) for batches in made for batch in batches])
    return found


def check_no_leak(batch: dict[str, Any], graph: Graph, *, equal: bool, last: float | None) -> int:
    """At no hop is there an event that the seed of its tree must not see; return how many there were."""
    times, checked = batch["a seed_time"], 0
    for kind in graph.types.edge_types:
        source, _, target = kind
        sender, receiver = batch[f"{kind} edge_index"]
        assert torch.equal(batch[f"{source} batch"][sender], batch[f"{target} batch"][receiver])
        time = batch.get(f"{kind} time", batch[f"{source} time"][sender] if f"{source} time" in batch else None)
        if time is not None:
            of_seed = times[batch[f"{target} batch"][receiver]]
            assert bool((time <= of_seed if equal else time < of_seed).all())
            assert last is None or bool((time >= of_seed - last).all())
            checked += time.numel()
    return checked


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))])
def test_batches_are_those_of_the_whole_graph_and_nothing_leaks(tmp_path: Path, world_size: int) -> None:
    pairs: list[tuple[Graph, Graph, Partition]] = []
    for seed, in_order in enumerate((False, True)):
        graph = typed(seed, in_order).with_seeds("a")
        partition = some_partition(graph, world_size)
        save_shards(graph, partition, tmp_path / str(seed))
        pairs.append((graph, in_order_of_shards(graph, partition), partition))
    samplers = [TemporalSampler([3, 2, 2], "time", **sight) for sight in SIGHTS]
    samplers += [TemporalSampler([-1, -1], "time", **sight) for sight in SIGHTS[:4]]
    results = run_ranks(drawn, world_size, [str(tmp_path / str(seed)) for seed in range(2)], samplers)
    for number, (_, whole, _) in enumerate(pairs):
        for rank, of_rank in enumerate(results):
            found, checked = iter(of_rank[number]), 0
            bulk = bulk_of(rank, world_size, whole.types.nodes_of("a"))
            for sampler in samplers:
                for sample in sampler.sample_bulk(whole, *bulk):
                    batch = next(found)
                    check_same([batch], [contents(assemble(whole, sample))])
                    checked += check_no_leak(batch, whole, equal=sampler.equal, last=sampler.last)
                    if sampler.equal and batch["batch_size"] == 25:  # the check itself knows one moment from the next
                        with pytest.raises(AssertionError):
                            check_no_leak(batch, whole, equal=False, last=None)
            assert checked > 100 or (rank and rank == world_size - 1)
