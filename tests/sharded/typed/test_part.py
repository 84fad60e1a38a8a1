"""The part of a shard of a typed graph, with what a boundary brings along, is that of the whole graph, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist import (
    Boundary,
    Coverage,
    Graph,
    Halo,
    Isolated,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    save_shards,
)
from lightning_gnn_dist.sharded.part import read_part
from tests.batch_contents import check_same
from tests.ranks import run_ranks
from tests.sharded.graphs import opened
from tests.sharded.typed.graphs import in_order_of_shards, some_graph, some_partition

BOUNDARIES: list[Boundary] = [Isolated(), Halo(1), Halo(3), Halo(2, neighbors=2), Halo(2, bytes=300)]
COVERAGE = Coverage(hops=2, shrinkage=1.0)


def parts(rank: int, world_size: int, folder: Path) -> list[dict[str, Any]]:
    with opened(rank, world_size, folder) as graph:
        return [contents(read_part(graph, boundary, COVERAGE, 5)[0]) for boundary in BOUNDARIES]


def contents(part: Graph) -> dict[str, Any]:
    of_all = {f"all {name}": array for name, array in part.node_arrays.items()}
    sizes = {"nodes": part.types.num_nodes, "edges": part.types.num_edges}
    return {"indptr": part.indptr, "indices": part.indices} | part.types.arrays | of_all | sizes


def test_it_is_the_part_of_the_whole_graph(tmp_path: Path) -> None:
    graph = some_graph()
    partition = some_partition(graph, 3)
    save_shards(graph, partition, tmp_path / "shards")
    whole = in_order_of_shards(graph, partition)
    owner = torch.cat(  # by new ids; an old id is that in the type, behind the types before
        [
            partition.assignment[whole.types.node_arrays[kind].pop("n_id") + whole.types.nodes_of(kind).start]  # type: ignore[attr-defined]
            for kind in whole.types.node_types
        ]
    )
    for rank, of_rank in enumerate(run_ranks(parts, 3, tmp_path / "shards")):
        for boundary, found in zip(BOUNDARIES, of_rank, strict=True):
            options: dict[str, Any] = {"boundary": boundary, "coverage": COVERAGE, "sampler": NeighborSampler([2, 2])}
            data = PartitionedDataModule(whole, partitioner=Partition(owner, 3), seed=5, **options)
            expected = contents(data.part(rank, 3))
            for kind in whole.types.node_types:  # ids in the whole graph as it was divided, and as it was before
                name = f"nodes/{kind}/n_id"
                ids = in_order_of_shards(graph, partition).types.node_arrays[kind]["n_id"]  # type: ignore[union-attr]
                expected[name] = ids[expected[name]]
            check_same([found], [expected])
