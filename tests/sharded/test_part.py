"""The part of a shard and what a boundary brings along is the part of the whole graph, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist import (
    Boundary,
    Coverage,
    Exchange,
    Graph,
    Halo,
    Isolated,
    Partition,
    PartitionedDataModule,
    WholePartSampler,
    save_shards,
)
from lightning_gnn_dist.sharded import part as part_module
from lightning_gnn_dist.sharded import remote_graph
from lightning_gnn_dist.sharded.part import read_part
from tests.batch_contents import check_same
from tests.ranks import run_ranks
from tests.sharded.graphs import in_order_of_parts, opened, small_graph

BOUNDARIES: list[Boundary] = [
    Isolated(),
    Halo(1),
    Halo(3),
    Halo(2, neighbors=2),
    Halo(2, bytes=2000),
    Halo(3, bytes=400, neighbors=1),
    Exchange(),
]
COVERAGE = Coverage(hops=2, shrinkage=1.0)


def uneven(graph: Graph) -> Partition:
    """Three parts of unequal sizes. Nobody sends to the last, which so needs nothing of the others."""
    owner = (torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(2)) < 0.3).int()
    owner[graph.degrees() == 0] = 2
    return Partition(owner, 3)


def some_graph() -> Graph:
    graph = small_graph(num_edges=400, edge_arrays=True)
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    kept = rows >= 20
    ends = torch.stack([graph.indices.long(), rows])[:, kept]
    edges = {name: array[kept] for name, array in graph.edge_arrays.items()}
    arrays = {name: array for name, array in graph.node_arrays.items() if name != "n_id"}
    return Graph.from_edge_index(ends, graph.num_nodes, arrays, edges)


def parts(rank: int, world_size: int, folder: Path) -> list[tuple[dict[str, Any], list[int]]]:
    part_module._BYTES_OF_A_ROUND = remote_graph._BYTES_OF_A_ROUND = 2000  # several rounds
    found = []
    with opened(rank, world_size, folder) as graph:
        for boundary in BOUNDARIES:
            coverage = None if isinstance(boundary, Exchange) else COVERAGE
            part, ids = read_part(graph, boundary, coverage, 5)
            found.append((contents(part), ids.tolist()))
            own = ids[: graph.shard.rows.num_nodes]
            wide = graph.extended({"ids": own[:, None].repeat(1, 9)}, ids[len(own) :])["ids"]
            assert torch.equal(wide, ids[:, None].repeat(1, 9))
    return found


def contents(part: Graph) -> dict[str, Any]:
    arrays = {f"nodes/{name}": array for name, array in part.node_arrays.items()}
    arrays |= {f"edges/{name}": array for name, array in part.edge_arrays.items()}
    return {"indptr": part.indptr, "indices": part.indices} | arrays


def test_it_is_the_part_of_the_whole_graph(tmp_path: Path) -> None:
    graph = some_graph()
    partition = uneven(graph)
    save_shards(graph, partition, tmp_path / "shares")
    whole, order = in_order_of_parts(graph, partition), partition.assignment.argsort(stable=True)
    sorted_parts = Partition(partition.assignment[order], 3)
    for rank, of_rank in enumerate(run_ranks(parts, 3, tmp_path / "shares")):
        assert len({len(ids) for _, ids in of_rank}) == (1 if rank == 2 else 6)
        for boundary, (found, ids) in zip(BOUNDARIES, of_rank, strict=True):
            options: dict[str, Any] = {"boundary": boundary, "coverage": COVERAGE, "sampler": WholePartSampler(2)}
            part = PartitionedDataModule(whole, partitioner=sorted_parts, seed=5, **options).part(rank, 3)
            expected = contents(part)
            n_id = expected.pop("nodes/n_id")
            assert ids == n_id.tolist() and found.pop("nodes/n_id").tolist() == order[n_id].tolist()
            # A part's mask marks its rank's own seeds, and a shard knows which nodes are its own.
            assert torch.equal(found.pop("nodes/train_mask"), whole.node_arrays["train_mask"][n_id])
            del expected["nodes/train_mask"]
            check_same([found], [expected])
