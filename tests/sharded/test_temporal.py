"""Batches by time of a graph in shards, without types: those of the whole graph, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import BatchKey, Graph, PartitionedDataModule, TemporalSampler, save_shards
from lightning_gnn_dist.batches.assembling import assemble
from tests.batch_contents import check_same
from tests.placing import placed
from tests.ranks import RankError, join, run_ranks
from tests.sampling.temporal_graphs import plain
from tests.sharded.graphs import in_order_of_parts, made_of, opened, some_partition
from tests.sharded.links.splits import content

DATA = {"sampler": TemporalSampler([3, 2], "edge_time", "time"), "batch_size": 8}
SIGHTS: list[dict[str, Any]] = [{}, {"equal": True, "last": 3}, {"pick": "latest"}, {"replace": True}]
SAMPLERS = [
    TemporalSampler(numbers, "edge_time", "time", **sight) for numbers in ([3, 2], [-1, -1]) for sight in SIGHTS[:3]
]
OF_NODES = [TemporalSampler([3, 2, 2], "time", **sight) for sight in SIGHTS]


def bulk_of(rank: int, world_size: int) -> tuple[list[Tensor], list[BatchKey]]:
    """Two batches around nodes in some order; the last rank of several asks for nothing in one of them."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(rank))
    seeds = [order[:0] if rank and rank == world_size - 1 else order, order[: rank * 3]]
    return seeds, [BatchKey(rank, 2, number) for number in range(2)]


def drawn(rank: int, world_size: int, folder: str, of_nodes: bool) -> list[dict[str, Any]]:
    bulk = bulk_of(rank, world_size)
    with opened(rank, world_size, folder) as graph:
        made = [made_of(graph, sampler, *bulk) for sampler in (OF_NODES if of_nodes else SAMPLERS)]
    return [content(batch) for batches in made for batch in batches]


@pytest.mark.parametrize("world_size", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("of_nodes", "dtype"), [(True, torch.int64), (False, torch.float32)])
def test_batches_are_those_of_the_whole_graph(
    tmp_path: Path, world_size: int, of_nodes: bool, dtype: torch.dtype
) -> None:
    graph = plain(0, "nodes" if of_nodes else "edges", dtype)
    graph.node_arrays["n_id"] = torch.arange(graph.num_nodes)
    partition = some_partition(graph, world_size)
    save_shards(graph, partition, tmp_path / "shards")
    whole, seen = in_order_of_parts(graph, partition), 0
    for rank, found in enumerate(run_ranks(drawn, world_size, str(tmp_path / "shards"), of_nodes)):
        batches = iter(found)
        for sampler in OF_NODES if of_nodes else SAMPLERS:
            for sample in sampler.sample_bulk(whole, *bulk_of(rank, world_size)):
                expected = content(assemble(whole, sample))
                check_same([next(batches)], [expected])
                seen += expected["edge_index"].shape[1]
    assert seen > 500


def begun(rank: int, world_size: int, folder: str) -> None:
    join(rank, world_size)
    data = placed(PartitionedDataModule(folder, **DATA), rank, world_size)
    data.setup("fit")


def one_is_missing(graph: Graph) -> None:
    last = some_partition(graph, 2).assignment.argsort(stable=True)[-1]
    graph.edge_arrays["edge_time"][graph.indptr[last]] = -(2**63)


def seeds_come_first(graph: Graph) -> None:
    graph.node_arrays["time"] -= 5000


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(one_is_missing, r"Shard 1: edge_time of edge \d+ is -2\*\*63"), (seeds_come_first, "No seed sees an event")],
)
def test_what_is_wrong_with_one_shard_or_all_is_said_by_every_rank(tmp_path: Path, spoil: Any, message: str) -> None:
    graph = plain(0, "edges")
    graph.node_arrays |= {"y": torch.zeros(40), "train_mask": torch.ones(40, dtype=torch.bool)}
    spoil(graph)
    save_shards(graph, some_partition(graph, 2), tmp_path / "shards")
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(begun, 2, str(tmp_path / "shards"))
    assert len(caught.value.failures) == 2
