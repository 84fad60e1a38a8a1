"""Evaluations of shards by layers are those of one process on the whole graph."""

from pathlib import Path

import pytest

from lightning_gnn_dist import RandomPartitioner, save_shards
from tests.layers.models import MODELS, graph_of, uneven_data
from tests.layers.test_probe import on_two_ranks
from tests.layers.test_ranks import SLOW, check, evaluate
from tests.layers.test_sight import check_ranks, sparse_data
from tests.ranks import run_ranks


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


def sparse_shards(folder: Path) -> str:
    graph = graph_of(sparse_data())
    save_shards(graph, RandomPartitioner()(graph, 2, seed=0), folder / "shards")
    return str(folder / "shards")


def test_rows_of_layers_that_count_degrees(tmp_path: Path) -> None:
    where = sparse_shards(tmp_path)
    check_ranks([(name, where) for name in ("GCN 2", "APPNP")])


def test_two_ranks_look_alike(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, sparse_shards(tmp_path))
    assert first == [(1, True), (0, False)]  # rank 0 tells
    assert second == [(0, True), (0, False)]
