"""The part of a shard and what a boundary brings along is the part of the whole graph, to the bit."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist import (
    Coverage,
    Exchange,
    Graph,
    Halo,
    Isolated,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    WholePartSampler,
    save_shards,
)
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.extensions.shards import part as part_module
from lightning_gnn_dist.extensions.shards import remote_graph
from lightning_gnn_dist.extensions.shards.part import read_part
from lightning_gnn_dist.graph.typed.names import have_names
from tests.batch_contents import check_same
from tests.extensions.shards.graphs import opened
from tests.graph.parted import (
    in_order_of_parts,
    in_order_of_shards,
    small_graph,
    typed_graph_of_widths,
    uneven_partition,
)
from tests.ranks import run_ranks

BOUNDARIES: list[Boundary] = [Isolated(), Halo(1), Halo(3), Halo(2, neighbors=2)]
WITHOUT_TYPES = [*BOUNDARIES, Halo(2, bytes=2000), Halo(3, bytes=400, neighbors=1), Exchange()]
WITH_TYPES = [*BOUNDARIES, Halo(2, bytes=300)]
COVERAGE = Coverage(shrinkage=1.0)


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


def parts(rank: int, world_size: int, folder: Path, boundaries: list[Boundary]) -> list[tuple[dict[str, Any], Tensor]]:
    part_module.BYTES_OF_A_ROUND = remote_graph.BYTES_OF_A_ROUND = 2000  # several rounds
    found = []
    with opened(rank, world_size, folder) as graph:
        for boundary in boundaries:
            coverage = None if isinstance(boundary, Exchange) else COVERAGE
            part, ids = read_part(graph, boundary, coverage, 5)
            found.append((contents(part), ids))
            if not have_names(part.types):
                own = ids[: graph.shard.rows.num_nodes]
                wide = graph.extended({"ids": own[:, None].repeat(1, 9)}, ids[len(own) :])["ids"]
                assert torch.equal(wide, ids[:, None].repeat(1, 9))
    return found


def contents(part: Graph) -> dict[str, Any]:
    of_all = {f"all {name}": array for name, array in part.node_arrays.items()}
    sizes = {"nodes": part.types.num_nodes, "edges": part.types.num_edges}
    return {"indptr": part.indptr, "indices": part.indices} | part.types.arrays | of_all | sizes


def part_of_whole(whole: Graph, owner: Tensor, boundary: Boundary, rank: int) -> dict[str, Any]:
    sampler = WholePartSampler(2) if isinstance(boundary, Exchange) else NeighborSampler([2, 2])
    options: dict[str, Any] = {"boundary": boundary, "coverage": COVERAGE, "sampler": sampler}
    data = PartitionedDataModule(whole, partitioner=Partition(owner, 3), seed=5, **options)
    return contents(data.part(rank, 3))


def test_it_is_the_part_of_the_whole_graph(tmp_path: Path) -> None:
    graph = some_graph()
    partition = uneven(graph)
    save_shards(graph, partition, tmp_path / "shares")
    whole, order = in_order_of_parts(graph, partition), partition.assignment.argsort(stable=True)
    for rank, of_rank in enumerate(run_ranks(parts, 3, tmp_path / "shares", WITHOUT_TYPES)):
        assert len({len(ids) for _, ids in of_rank}) == (1 if rank == 2 else 6)
        for boundary, (found, ids) in zip(WITHOUT_TYPES, of_rank, strict=True):
            expected = part_of_whole(whole, partition.assignment[order], boundary, rank)
            n_id = expected["all n_id"]
            assert torch.equal(ids, n_id)
            # A part's mask marks its rank's own seeds, and a shard knows which nodes are its own.
            masks = {"all train_mask": whole.node_arrays["train_mask"][n_id], "all n_id": order[n_id]}
            expected |= masks | {name.replace("all ", "nodes/"): array for name, array in masks.items()}
            check_same([found], [expected])


def test_of_types_too(tmp_path: Path) -> None:
    graph = typed_graph_of_widths()
    partition = uneven_partition(graph, 3)
    save_shards(graph, partition, tmp_path / "shards")
    whole = in_order_of_shards(graph, partition)
    before = {kind: arrays.pop("n_id") for kind, arrays in whole.types.node_arrays.items()}  # type: ignore[attr-defined]
    starts = [whole.types.nodes_of(kind).start for kind in whole.types.node_types]
    owner = partition.assignment[torch.cat([ids + start for ids, start in zip(before.values(), starts, strict=True)])]
    for rank, of_rank in enumerate(run_ranks(parts, 3, tmp_path / "shards", WITH_TYPES)):
        for boundary, (found, _) in zip(WITH_TYPES, of_rank, strict=True):
            expected = part_of_whole(whole, owner, boundary, rank)
            ids = {f"nodes/{kind}/n_id": of[expected[f"nodes/{kind}/n_id"]] for kind, of in before.items()}
            check_same([found], [expected | ids])
