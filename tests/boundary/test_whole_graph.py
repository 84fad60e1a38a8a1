"""Training on parts that lack nothing is training on the whole graph, step for step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.boundary.boundary import Halo
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from tests.boundary.models import MODELS, learned_by_hand, model, weighted_data
from tests.data_fitting import trainer
from tests.evaluation.models import graph_of
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks

STEPS = 4
Weights = dict[str, Tensor]


def unequal(data: Data, world_size: int) -> Partition:
    """Parts of which each is twice the next."""
    chance = torch.rand(data.num_nodes, generator=torch.Generator().manual_seed(1))
    limits = torch.tensor([1 - 0.5**part for part in range(1, world_size)])
    return Partition(torch.bucketize(chance, limits).to(torch.int32), world_size)


def fit(rank: int, world_size: int, data: Data, cases: list[tuple[str, int]], accumulated: int = 1) -> list[Weights]:
    found = []
    for name, num_layers in cases:
        module = model(name, num_layers)
        parts = PartitionedDataModule(
            graph_of(data),
            partitioner=unequal(data, world_size),
            sampler=NeighborSampler([-1] * num_layers),
            boundary=Halo(num_layers),
        )
        options: dict[str, Any] = {"max_epochs": STEPS, "limit_val_batches": 0, "precision": "64-true"}
        trainer(world_size, GrappaStrategy(**PATIENCE), **options).fit(module, parts)
        found.append({key: value.detach().clone() for key, value in module.named_parameters()})
    return found


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_halos_as_deep_as_the_model_lose_nothing(world_size: int) -> None:
    data = weighted_data()
    cases = [(name, 2) for name in MODELS] + [("SAGE", 3)]
    check(cases, run_ranks(fit, world_size, data, cases), data)


def check(cases: list[tuple[str, int]], of_ranks: list[list[Weights]], data: Data) -> None:
    for case, (name, num_layers) in enumerate(cases):
        expected = learned_by_hand(name, num_layers, data, STEPS)
        for found in of_ranks:
            for key, value in expected.items():
                assert torch.allclose(found[case][key], value, rtol=0, atol=1e-12), (name, num_layers, key)
                assert torch.equal(found[case][key], of_ranks[0][case][key]), "replicas differ"
