"""Batches read from files are those that are read through the map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, NeighborSampler, citations, communities
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.graph.quantize import quantize_rows
from tests.batch_contents import check_same, contents


def floats(graph: Graph) -> dict[str, torch.Tensor]:
    return graph.node_arrays


def halves(graph: Graph) -> dict[str, torch.Tensor]:
    return graph.node_arrays | {"x": graph.node_arrays["x"].bfloat16()}


def scaled(graph: Graph) -> dict[str, torch.Tensor]:
    x, scale = quantize_rows(graph.node_arrays["x"])
    return graph.node_arrays | {"x": x, "x_scale": scale}


@pytest.mark.parametrize("form", [floats, halves, scaled])
@pytest.mark.parametrize(("is_saved", "num_threads"), [(False, 0), (True, 2), (True, 0)])
def test_batches_are_the_same(is_saved: bool, form: Callable[..., Any], num_threads: int, tmp_path: Path) -> None:
    graph = communities(500, 4, num_features=8)
    weights = {"edge_weight": torch.rand(graph.num_edges)}
    graph = Graph(graph.indptr, graph.indices, form(graph), weights)
    if is_saved:
        graph.save(tmp_path / "graph")
        graph = Graph.open(tmp_path / "graph")
    sampler, seeds = NeighborSampler([-1, -1]), torch.arange(500)
    plain, sparing = (
        BatchLoader(GraphSource(graph, sampler), seeds, 7, seed=0, num_threads=num_threads) for _ in range(2)
    )
    sparing.spare_memory()
    for batch, other in zip(plain, sparing, strict=True):
        check_same([contents(other)], [contents(batch)])
        assert torch.equal(other.blocks[0].weighted_adj.values(), batch.blocks[0].weighted_adj.values())


@pytest.mark.parametrize("all_labels", [True, False])
@pytest.mark.parametrize("is_saved", [False, True])
def test_typed_batches_are_the_same(is_saved: bool, all_labels: bool, tmp_path: Path) -> None:
    data = citations(400, 2, mean_degree=3).to_pyg()
    for kind in data.edge_types:
        data[kind].edge_weight = torch.rand(data[kind].num_edges)
    graph = Graph.from_pyg(data)
    if is_saved:
        graph.save(tmp_path / "graph")
        graph = Graph.open(tmp_path / "graph")
    plain, sparing = (
        BatchLoader(GraphSource(graph, NeighborSampler([-1, -1]), all_labels=all_labels), torch.arange(400), 7, seed=0)
        for _ in range(2)
    )
    sparing.spare_memory()
    check_same(map(contents, sparing), map(contents, plain))
