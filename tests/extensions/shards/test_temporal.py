"""Batches by time of a graph in shards: those of the whole graph, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, PartitionedDataModule, TemporalSampler, save_shards
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.typed.names import have_names
from tests.batch_contents import check_same
from tests.extensions.shards.graphs import made_of, opened
from tests.extensions.shards.links.splits import content
from tests.extensions.temporal.temporal_graphs import plain, typed
from tests.graph.parted import as_shards_number_it, some_partition
from tests.placing import placed
from tests.ranks import RankError, join, run_ranks

DATA = {"sampler": TemporalSampler([3, 2], "edge_time", "time"), "batch_size": 8}
SIGHTS: list[dict[str, Any]] = [{}, {"equal": True, "last": 3}, {"pick": "latest"}, {"replace": True}]
OF_EDGES = [
    TemporalSampler(numbers, "edge_time", "time", **sight) for numbers in ([3, 2], [-1, -1]) for sight in SIGHTS[:3]
]
OF_NODES = [TemporalSampler([3, 2, 2], "time", **sight) for sight in [*SIGHTS, {"equal": True}, {"last": 3}]]
OF_TYPES = [*OF_NODES, *(TemporalSampler([-1, -1], "time", **sight) for sight in SIGHTS[:3])]
CASES: dict[str, tuple[Any, list[TemporalSampler]]] = {
    "of nodes": (lambda: plain(0, "nodes", torch.int64), OF_NODES),
    "of edges": (lambda: plain(0, "edges", torch.float32), OF_EDGES),
    "of types": (lambda: typed(0, in_order=False).with_seeds("a"), OF_TYPES),
    "of types in order": (lambda: typed(1, in_order=True).with_seeds("a"), OF_TYPES),
}


def bulk_of(rank: int, world_size: int, nodes: range) -> tuple[list[Tensor], list[BatchKey]]:
    """Two batches around nodes in some order; the last rank of several asks for nothing in one of them."""
    order = torch.randperm(len(nodes), generator=torch.Generator().manual_seed(rank)) + nodes.start
    seeds = [order[:0] if rank and rank == world_size - 1 else order, order[: rank * 3]]
    return seeds, [BatchKey(rank, 2, number) for number in range(2)]


def drawn(rank: int, world_size: int, folder: str, samplers: list[TemporalSampler]) -> list[dict[str, Any]]:
    with opened(rank, world_size, folder) as graph:
        bulk = bulk_of(rank, world_size, graph.types.nodes_of(graph.types.seed_type()))
        made = [made_of(graph, sampler, *bulk) for sampler in samplers]
    return [content(batch) for batches in made for batch in batches]


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_whole_graph(tmp_path: Path, world_size: int, case: str) -> None:
    make, samplers = CASES[case]
    graph = make()
    if not have_names(graph.types):
        graph.node_arrays["n_id"] = torch.arange(graph.num_nodes)
    partition = some_partition(graph, world_size)
    save_shards(graph, partition, tmp_path / "shards")
    whole, seen = as_shards_number_it(graph, partition), 0
    for rank, found in enumerate(run_ranks(drawn, world_size, str(tmp_path / "shards"), samplers)):
        batches, bulk = iter(found), bulk_of(rank, world_size, whole.types.nodes_of(whole.types.seed_type()))
        for sampler in samplers:
            for sample in sampler.sample_bulk(whole, *bulk):
                check_same([next(batches)], [content(assemble(whole, sample))])
                seen += len(sample.indices)
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
