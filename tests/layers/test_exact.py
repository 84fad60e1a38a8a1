"""Validation and test equal to one process on the whole graph, whatever the model, the ranks and where the graph is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    save_shards,
)
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import MODELS, graph_of, model, uneven_data, whole_rows
from tests.ranks import run_ranks

SLOW = {"GAT", "PyG GAT", "PyG GIN", "PyG JK"}  # tried with several ranks in the slow tests alone
Found = list[tuple[float, dict[int, Tensor], set[str]]]


def data_module(where: str | None, kind: str, num_layers: int) -> Any:
    options: dict[str, Any] = {"sampler": NeighborSampler([3] * num_layers), "batch_size": 7}
    if kind == "shards":
        return PartitionedDataModule(where, **options)
    graph = graph_of(uneven_data()) if kind == "RAM" else Graph.open(where)
    return PartitionedDataModule(graph, partitioner=RandomPartitioner(), **options)


def evaluate(rank: int, world_size: int, where: str, kind: str, cases: list[tuple[str, int]]) -> Found:
    found = []
    for name, num_layers in cases:
        module = model(name, num_layers)
        strategy = GrappaStrategy(**PATIENCE) if world_size > 1 else "auto"
        (metrics,) = trainer(world_size, strategy).test(module, data_module(where, kind, num_layers), verbose=False)
        found.append((metrics["accuracy"], module.rows, module.kinds))
    return found


def check(cases: list[tuple[str, int]], of_ranks: list[Found]) -> None:
    data = uneven_data()
    for case, (name, num_layers) in enumerate(cases):
        expected = whole_rows(model(name, num_layers), data)
        accuracy = float((expected.argmax(1) == data.y)[data.test_mask].double().mean())
        rows = {node: row for found in of_ranks for node, row in found[case][1].items()}
        assert sorted(rows) == data.test_mask.nonzero().view(-1).tolist()
        for node, row in rows.items():
            assert torch.allclose(row, expected[node], rtol=0, atol=1e-12), (name, num_layers, node)
        for found in of_ranks:
            assert found[case][0] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_those_of_the_whole_graph(world_size: int) -> None:
    check_models(world_size, [(name, 3) for name in MODELS if world_size == 1 or name not in SLOW])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_every_model(world_size: int) -> None:
    check_models(world_size, [(name, num_layers) for name in MODELS for num_layers in (2, 4)])


def check_models(world_size: int, cases: list[tuple[str, int]]) -> None:
    found = run_ranks(evaluate, world_size, "", "RAM", cases)
    check(cases, found)
    for (name, _), (_, _, kinds) in zip(cases, found[0], strict=True):
        assert kinds == {"SeedBatch"} or (world_size == 1 and not name.startswith("PyG")), name


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_a_graph_in_files(world_size: int, tmp_path: Path) -> None:
    graph_of(uneven_data()).save(tmp_path / "graph")
    cases = [("SAGE", 3), ("PyG GCN", 2), ("APPNP", 3)]
    check(cases, run_ranks(evaluate, world_size, str(tmp_path / "graph"), "files", cases))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_of_shards(world_size: int, tmp_path: Path) -> None:
    graph = graph_of(uneven_data())
    save_shards(graph, RandomPartitioner()(graph, 2, seed=0), tmp_path / "shards")
    depths = (3,) if world_size == 2 else (2, 4)
    names = [name for name in MODELS if name != "GraphNorm" and (world_size > 2 or name not in SLOW)]
    cases = [(name, num_layers) for name in names for num_layers in depths]
    found = run_ranks(evaluate, world_size, str(tmp_path / "shards"), "shards", cases)
    check(cases, found)
    assert all(kinds == {"SeedBatch"} for _, _, kinds in found[0])
