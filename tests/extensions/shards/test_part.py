"""The part of a shard and what a boundary brings along is the part of the whole graph, to the bit."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.extensions.shards import remote_graph
from lightning_gnn_dist.extensions.shards.home import read_part
from tests.batch_contents import check_same
from tests.boundary.models import MODELS, Weights, check_learned, model, weighted_data, weights_of
from tests.boundary.test_whole_graph import odd
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.extensions.ready_made.models_by_layers import READY
from tests.extensions.shards.graphs import opened
from tests.graph.parted import (
    in_order_of_parts,
    in_order_of_shards,
    small_graph,
    typed_graph_of_widths,
    uneven_partition,
)
from tests.layers.models import graph_of
from tests.ranks import run_ranks
from tests.slow import slow

BOUNDARIES: list[Boundary] = [lgd.Isolated(), lgd.Halo(1), lgd.Halo(3)]
WITHOUT_TYPES = [*BOUNDARIES, lgd.Halo(2, bytes=2000), lgd.Halo(3, bytes=400), lgd.Halo(3, bytes=1200), lgd.Exchange()]
WITH_TYPES = [*BOUNDARIES, lgd.Halo(2, bytes=300)]
COVERAGE = lgd.Coverage(shrinkage=1.0)


def uneven(graph: lgd.Graph) -> lgd.Partition:
    """Three parts of unequal sizes. Nobody sends to the last, which so needs nothing of the others."""
    owner = (torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(2)) < 0.3).int()
    owner[graph.degrees() == 0] = 2
    return lgd.Partition(owner, 3)


def some_graph() -> lgd.Graph:
    graph = small_graph(num_edges=400, edge_arrays=True)
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    kept = rows >= 20
    ends = torch.stack([graph.indices.long(), rows])[:, kept]
    edges = {name: array[kept] for name, array in graph.edge_arrays.items()}
    arrays = {name: array for name, array in graph.node_arrays.items() if name != "n_id"}
    return lgd.Graph.from_edge_index(ends, graph.num_nodes, arrays, edges)


def parts(rank: int, world_size: int, folder: Path, boundaries: list[Boundary]) -> list[tuple[dict[str, Any], Tensor]]:
    remote_graph.BYTES_OF_A_ROUND = 2000  # several rounds
    found = []
    with opened(rank, world_size, folder) as graph:
        for boundary in boundaries:
            coverage = None if isinstance(boundary, lgd.Exchange) else COVERAGE
            part, ids = read_part(graph, boundary, coverage, 5)
            found.append((contents(part), ids))
            if not part.types.have_names:
                own = ids[: graph.shard.rows.num_nodes]
                wide = graph.rows_of({"ids": own[:, None].repeat(1, 9)}, ids)["ids"]
                assert torch.equal(wide, ids[:, None].repeat(1, 9))
    return found


def contents(part: lgd.Graph) -> dict[str, Any]:
    of_all = {f"all {name}": array for name, array in part.node_arrays.items()}
    sizes = {"nodes": part.types.num_nodes, "edges": part.types.num_edges}
    return {"indptr": part.indptr, "indices": part.indices} | part.types.arrays | of_all | sizes


def part_of_whole(whole: lgd.Graph, owner: Tensor, boundary: Boundary, rank: int) -> dict[str, Any]:
    sampler = lgd.WholePartSampler(2) if isinstance(boundary, lgd.Exchange) else lgd.NeighborSampler([2, 2])
    options: dict[str, Any] = {"boundary": boundary, "coverage": COVERAGE, "sampler": sampler}
    data = lgd.PartitionedDataModule(whole, partitioner=lgd.Partition(owner, 3), seed=5, **options)
    return contents(data.part(rank, 3))


def test_it_is_the_part_of_the_whole_graph(tmp_path: Path) -> None:
    graph = some_graph()
    partition = uneven(graph)
    lgd.save_shards(graph, partition, tmp_path / "shares")
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
    lgd.save_shards(graph, partition, tmp_path / "shards")
    whole = in_order_of_shards(graph, partition)
    before = {kind: arrays.pop("n_id") for kind, arrays in whole.types.node_arrays.items()}  # type: ignore[attr-defined]
    starts = [whole.types.nodes_of(kind).start for kind in whole.types.node_types]
    owner = partition.assignment[torch.cat([ids + start for ids, start in zip(before.values(), starts, strict=True)])]
    for rank, of_rank in enumerate(run_ranks(parts, 3, tmp_path / "shards", WITH_TYPES)):
        for boundary, (found, _) in zip(WITH_TYPES, of_rank, strict=True):
            expected = part_of_whole(whole, owner, boundary, rank)
            ids = {f"nodes/{kind}/n_id": of[expected[f"nodes/{kind}/n_id"]] for kind, of in before.items()}
            check_same([found], [expected | ids])


# With a halo or an exchange, ranks that hold shards take the steps of one process on the whole graph.


STEPS = 4
Case = tuple[str, int, Boundary]


def divided(num_shards: int, folder: Path) -> lgd.Partition:
    """Shards of unequal sizes: of four, one has no training node, and one no edge to others."""
    data = weighted_data()
    owner = odd(data, 2 if num_shards == 2 else 5).assignment  # whose fifth has no node
    partition = lgd.Partition(owner, num_shards)
    lgd.save_shards(graph_of(data), partition, folder / "shares")
    return partition


def options(num_layers: int, boundary: Boundary) -> dict[str, Any]:
    whole = isinstance(boundary, lgd.Exchange)
    sampler = lgd.WholePartSampler(num_layers) if whole else lgd.NeighborSampler([-1] * num_layers)
    return {"sampler": sampler, "boundary": boundary, "seed": 3}


def quick(world_size: int, strategy: Any = None, **more: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": STEPS, "limit_val_batches": 0, "precision": "64-true"}
    return trainer(world_size, strategy or lgd.GrappaStrategy(**PATIENCE), **(defaults | more))


def fit(rank: int, world_size: int, folder: Path, cases: list[Case], strategy: Any = None) -> list[Weights]:
    found = []
    for name, num_layers, boundary in cases:
        module, data = (
            model(name, num_layers),
            lgd.PartitionedDataModule(folder / "shares", **options(num_layers, boundary)),
        )
        validates = {"limit_val_batches": 1.0} if name == "JK" else {}
        quick(world_size, strategy and strategy(), **validates).fit(module, data)
        found.append(weights_of(module))
    return found


EVERY_MODEL: list[Case] = [(name, 3, lgd.Exchange()) for name in MODELS + READY]
EVERY_MODEL += [("SAGE", 1, lgd.Exchange()), ("GAT", 2, lgd.Exchange())]
IN_DDP: list[Case] = [("SAGE", 2, lgd.Exchange()), ("JK", 3, lgd.Exchange())]
HALOS: list[Case] = [("GCN", 2, lgd.Halo(2)), ("SAGE", 3, lgd.Halo(3))]


@pytest.mark.parametrize(
    ("num_shards", "num_ranks", "cases", "strategy"),
    [
        (2, 2, HALOS, None),
        slow(2, 2, EVERY_MODEL, None),
        slow(4, 4, EVERY_MODEL, None),
        slow(4, 4, IN_DDP, plain_ddp),
        slow(2, 4, [("GAT", 2, lgd.Halo(2))], None),
    ],
    ids=["halos as deep as the model", "every model", "in four shards", "under ddp", "two copies of all shards"],
)
def test_nothing_is_lost(num_shards: int, num_ranks: int, cases: list[Case], strategy: Any, tmp_path: Path) -> None:
    divided(num_shards, tmp_path)
    check_learned(cases, run_ranks(fit, num_ranks, tmp_path, cases, strategy), STEPS)


def fit_again(
    rank: int, world_size: int, folder: Path, name: str, boundary: Boundary, partition: lgd.Partition
) -> list[Weights]:
    """Weights of a fit on shards that never stopped, of one that did, and of one on the whole graph, cut alike."""
    path, data, found = folder / "half.ckpt", [], []
    whole = lgd.Graph.open(folder / "whole")
    for epochs, resumes in ((STEPS, None), (STEPS // 2, None), (STEPS, path)):
        data = lgd.PartitionedDataModule(folder / "shares", **options(2, boundary))
        module, running = model(name, 2), quick(world_size, max_epochs=epochs)
        running.fit(module, data, ckpt_path=resumes)
        if epochs < STEPS:
            running.save_checkpoint(path)
        else:
            found.append(weights_of(module))
    module = model(name, 2)
    quick(world_size).fit(module, lgd.PartitionedDataModule(whole, partitioner=partition, **options(2, boundary)))
    return [*found, weights_of(module)]


AGAIN = [("GAT", lgd.Exchange(share=0.5)), slow("SAGE", lgd.Exchange(every=2))]
AGAIN += [slow("SAGE", lgd.Halo(1, bytes=2000)), slow("GCN", lgd.Halo(2, bytes=3000))]


@pytest.mark.parametrize(("name", "boundary"), AGAIN, ids=repr)
def test_a_fit_on_shards_is_one_on_parts_also_when_it_is_resumed(name: str, boundary: Any, tmp_path: Path) -> None:
    partition = divided(2, tmp_path)
    in_order_of_parts(graph_of(weighted_data()), partition).save(tmp_path / "whole")
    in_order = lgd.Partition(partition.assignment.sort().values, 2)
    for straight, resumed, on_parts in run_ranks(fit_again, 2, tmp_path, name, boundary, in_order):
        for key, value in straight.items():
            assert torch.equal(resumed[key], value) and torch.equal(on_parts[key], value), key


# Seeds: a pass of all ranks has each training node once, with its label, and its place among all.


def seen_on_shards(rank: int, world_size: int, folder: Path) -> list[Tensor]:
    """The seeds of a pass, their numbers and their labels."""
    module, data = model("SAGE", 2), lgd.PartitionedDataModule(folder / "shares", **options(2, lgd.Halo(2)))
    seen: list[tuple[Tensor, ...]] = []
    step = module.training_step

    def watched(batch: Any) -> Tensor:
        seen.append((batch.n_id[: batch.batch_size].clone(), batch.input_id.clone(), batch.y.clone()))
        return step(batch)

    module.training_step = watched
    quick(world_size, max_epochs=1).fit(module, data)
    return [torch.cat(column) for column in zip(*seen, strict=True)]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_have_the_seeds_of_the_whole_graph(num_ranks: int, tmp_path: Path) -> None:
    partition, graph = divided(2, tmp_path), graph_of(weighted_data())
    in_order = partition.assignment.argsort(stable=True)
    of_shards = in_order[graph.node_arrays["train_mask"][in_order]]  # training nodes, shard by shard
    seen = run_ranks(seen_on_shards, num_ranks, tmp_path)
    for rank, (seeds, inputs, labels) in enumerate(seen):
        assert (partition.assignment[seeds] == rank % 2).all()
        assert of_shards[inputs].equal(seeds)
        assert graph.node_arrays["y"][seeds].equal(labels)
    assert torch.cat([seeds for seeds, _, _ in seen]).sort().values.equal(graph.split("train"))
