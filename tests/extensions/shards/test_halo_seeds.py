"""Training nodes of a halo as seeds: shards have those of the whole graph in the order of the shards."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.boundary.models import model, weighted_data
from tests.boundary.test_auto import RANKS, SETTINGS, local_sgd, quick_fit, seeds_by_hand, unequal
from tests.graph.parted import in_order_of_parts
from tests.layers.models import graph_of
from tests.ranks import run_ranks


def seen_on_shards(rank: int, world_size: int, folder: Path) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The seeds of every step, their numbers and their labels."""
    module, data = model("SAGE", 1), lgd.PartitionedDataModule(folder / "shares", **SETTINGS)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    step = module.training_step

    def watched(batch: Any) -> Tensor:
        seen.append((batch.n_id[: batch.batch_size].clone(), batch.input_id.clone(), batch.y.clone()))
        return step(batch)

    module.training_step = watched
    quick_fit(local_sgd(), world_size=world_size).fit(module, data)
    return seen


def divided(folder: Path) -> tuple[lgd.Graph, lgd.Partition, Tensor]:
    """The graph of the tests as shards number it, its parts, and the new number of each node."""
    graph, partition = graph_of(weighted_data()), unequal(weighted_data().num_nodes)
    lgd.save_shards(graph, partition, folder / "shares")
    order = partition.assignment.argsort(stable=True)
    return in_order_of_parts(graph, partition), lgd.Partition(partition.assignment[order], RANKS), order.argsort()


@pytest.mark.parametrize("num_ranks", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_shards_have_the_same_seeds(num_ranks: int, tmp_path: Path) -> None:
    whole, partition, new_id = divided(tmp_path)
    strangers = 0
    for rank, seen in enumerate(run_ranks(seen_on_shards, num_ranks, tmp_path)):
        own, around = seeds_by_hand(whole, partition.assignment, rank % RANKS, 1)
        for old_ids, inputs, labels in seen:
            seeds = new_id[old_ids]
            assert set(seeds.tolist()) <= own | around
            assert whole.split("train")[inputs].equal(seeds)
            assert whole.node_arrays["y"][seeds].equal(labels)
            strangers += len(set(seeds.tolist()) & around)
    assert strangers
