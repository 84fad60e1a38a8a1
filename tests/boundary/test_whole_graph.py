"""Training on parts that lack nothing is training on the whole graph, step for step."""

from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import lightning_gnn_dist as lgd
from tests.boundary.models import MODELS, Weights, check_learned, model, weighted_data, weights_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import graph_of
from tests.ranks import run_ranks

STEPS = 3


def unequal(data: Data, world_size: int) -> lgd.Partition:
    """Parts of which each is twice the next."""
    chance = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(1))
    limits = torch.tensor([1 - 0.5**part for part in range(1, world_size)])
    return lgd.Partition(torch.bucketize(chance, limits).to(torch.int32), world_size)


def odd(data: Data, world_size: int) -> lgd.Partition:
    """Parts of unequal sizes: of four, one has no training node, one no edge to others, and one no node."""
    owner = unequal(data, min(world_size, 2)).assignment.clone()
    if world_size > 2:
        some = (~data.train_mask).nonzero().view(-1)[::3]
        owner[some] = 2
    if world_size > 4:
        owner[-5:] = 3  # nodes without edges
    return lgd.Partition(owner, world_size)


def fit(rank: int, world_size: int, data: Data, cases: list[tuple[str, int]], options: dict[str, Any]) -> list[Weights]:
    found = []
    for name, num_layers in cases:
        module = model(name, num_layers)
        parts = lgd.PartitionedDataModule(graph_of(data), **options["data"](num_layers, data, world_size))
        strategy = options.get("strategy", lambda: lgd.GrappaStrategy(**PATIENCE))()
        more: dict[str, Any] = {"max_epochs": STEPS, "limit_val_batches": 0, "precision": "64-true"}
        trainer(world_size, strategy, **more).fit(module, parts)
        found.append(weights_of(module))
    return found


def halos(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    sampler = lgd.NeighborSampler([-1] * num_layers)
    return {"partitioner": unequal(data, world_size), "sampler": sampler, "boundary": lgd.Halo(num_layers)}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_halos_as_deep_as_the_model_lose_nothing(world_size: int) -> None:
    data = weighted_data()
    cases = [(name, 2) for name in MODELS] + [("SAGE", 3)]
    check_learned(cases, run_ranks(fit, world_size, data, cases, {"data": halos}), STEPS)
