"""Batches of a sharded graph are those of the whole graph, and cost what the formula says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist import (
    BatchKey,
    FastGCNSampler,
    LadiesSampler,
    Loading,
    NeighborSampler,
    save_shards,
)
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.source import ShardedSampler, ShardedSource
from lightning_gnn_dist.wire.channel import open_channel
from lightning_gnn_dist.wire.collectives import traffic
from tests.batch_contents import check_same, contents
from tests.ranks import run_ranks
from tests.sharded.graphs import CountingGraph, in_order_of_parts, joined, made_of, opened, small_graph, some_partition

FANOUTS = [4, 3]


def seeds_of(rank: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randperm(300, generator=generator)[: size + i] for i in range(rank + 1)]


def sent(rank: int, world_size: int, folder: str, shards: int, sampler: ShardedSampler) -> tuple[float, float]:
    """Bytes that a rank sent for its batches, and what the formula says."""
    seeds, keys = [torch.arange(100 * rank, 100 * rank + 100) * 4], [BatchKey(rank, 0, 0)]
    with opened(rank, world_size, folder, shards) as graph:
        before = traffic.bytes_sent
        dist.barrier()  # what others ask for before this is counted would be missed
        (batch,) = made_of(graph, sampler, seeds, keys)
        dist.barrier()  # all have their answers
        spent = traffic.bytes_sent - before
    expanded = batch.n_id[: sum(batch.num_sampled_nodes[:-1])]
    others = 1 - 1 / shards  # of random nodes
    width = sum(batch[name][:1].numel() * batch[name].element_size() for name in ARRAYS)
    # As an asker 2 bytes for each node of the frontier and of the batch, for a shard has fewer than 32768, and as an
    # owner the answers to the others, who ask for as much, with a byte for each row's length: of layer-wise samplers,
    # whole rows.
    whole = int(small_graph(4000, 80_000).degrees()[expanded].sum())
    edges = sum(batch.num_sampled_edges) if isinstance(sampler, NeighborSampler) else whole
    return spent, others * (expanded.numel() * (2 + 1) + edges * 4 + batch.num_nodes * (2 + width))


ARRAYS = ("x", "y", "train_mask", "val_mask", "test_mask", "n_id")


@pytest.mark.parametrize(
    ("sampler", "shards"),
    [(NeighborSampler([10, 5]), 4), (NeighborSampler([10, 5]), 2), (LadiesSampler([200, 200]), 4)],
    ids=["one copy", "two copies", "ladies"],
)
def test_what_is_sent(tmp_path: Path, shards: int, sampler: ShardedSampler) -> None:
    graph = small_graph(4000, 80_000)
    save_shards(graph, some_partition(graph, shards), tmp_path / "shares")
    spent, formula = zip(*run_ranks(sent, 4, str(tmp_path / "shares"), shards, sampler), strict=True)
    assert abs(sum(spent) / sum(formula) - 1) < 0.1


def drawn(rank: int, world_size: int, folder: str, shards: int, sampler: ShardedSampler, cache: int) -> list[Any]:
    found = []
    with opened(rank, world_size, folder, shards, cache_bytes=cache) as graph:
        for bulk in bulks_of(rank, world_size):
            found += made_of(graph, sampler, *bulk, all_labels=world_size == shards)
    return [*map(contents, found), graph.cache.hits]


def bulks_of(rank: int, world_size: int) -> list[tuple[list[Tensor], list[BatchKey]]]:
    seeds = seeds_of(rank, 0 if rank == world_size - 1 else 20)
    return [(seeds, [BatchKey(7 + rank, bulk, i) for i in range(len(seeds))]) for bulk in range(2)]


@pytest.mark.parametrize(
    ("world_size", "shards", "sampler", "edge_arrays", "cache"),
    [
        (4, 4, NeighborSampler(FANOUTS), False, 0),
        pytest.param(4, 2, NeighborSampler(FANOUTS, replace=True), True, 0, marks=pytest.mark.slow),
        (3, 3, NeighborSampler([-1, 2, 1]), True, 2000),
        (1, 1, NeighborSampler(FANOUTS), True, 0),
        (4, 4, NeighborSampler(FANOUTS, weight="edge_weight"), True, 0),
        (4, 4, LadiesSampler([60, 40]), False, 0),
        pytest.param(
            4, 2, LadiesSampler([60, 40], weight="edge_weight", normalize=True), True, 0, marks=pytest.mark.slow
        ),
        pytest.param(3, 3, FastGCNSampler([90, 60], weight="edge_weight"), True, 0, marks=pytest.mark.slow),
        (1, 1, FastGCNSampler([90, 60]), False, 0),
    ],
    ids=["one copy", "two copies", "cache", "alone", "weights", "ladies", "ladies twice", "fastgcn", "fastgcn alone"],
)
def test_batches_are_those_of_the_whole_graph(
    tmp_path: Path, world_size: int, shards: int, sampler: ShardedSampler, edge_arrays: bool, cache: int
) -> None:
    graph = small_graph(edge_arrays=edge_arrays)
    partition = some_partition(graph, shards)
    save_shards(graph, partition, tmp_path / "shares")
    whole = in_order_of_parts(graph, partition)
    results = run_ranks(drawn, world_size, str(tmp_path / "shares"), shards, sampler, cache)
    for rank, (*found, hits) in enumerate(results):
        assert (hits > 0) == (cache > 0)
        expected = []
        for bulk in bulks_of(rank, world_size):
            samples = sampler.sample_bulk(whole, *bulk)
            expected += [assemble(whole, sample, all_labels=world_size == shards) for sample in samples]
        check_same(found, map(contents, expected))


def corrected(rank: int, world_size: int, folder: str, sampler: ShardedSampler) -> list[Any]:
    """For bulks of one and of four: batches of a round, turns, and bytes sent."""
    found: list[Any] = []
    with joined(rank, world_size):
        for bulk_size in (1, 4):
            graph = CountingGraph(Shard.open(folder, rank), open_channel(world_size))
            whole = GlobalBatches(ShardedSource(graph, sampler, Loading()), graph.split("train"), 32, 0, bulk_size)
            before = traffic.bytes_sent
            made = [contents(batch) for batch in whole.of_round(3, rank, world_size, start=2, stop=8)]
            graph.close()
            found.append((made, graph.turns, traffic.bytes_sent - before))
    return found


@pytest.mark.parametrize("sampler", [NeighborSampler(FANOUTS), LadiesSampler([30, 30])], ids=["neighbor", "ladies"])
def test_corrections_are_made_in_bulks(tmp_path: Path, sampler: ShardedSampler) -> None:
    graph = small_graph()
    save_shards(graph, some_partition(graph, 2), tmp_path / "shares")
    for (one, turns, spent), (four, fewer, less) in run_ranks(corrected, 2, str(tmp_path / "shares"), sampler):
        assert len(one) == 6
        check_same(four, one)
        # The first bulk goes through three exchanges, a second one through two more, each other one through one.
        assert (turns, fewer) == (9, 5) and less < spent
