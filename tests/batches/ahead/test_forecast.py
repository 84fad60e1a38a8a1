"""What is forecast of a fit is what its batches fetch."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_gnn_dist import Graph, Loading, NeighborSampler, communities
from lightning_gnn_dist.batches.ahead.files import DiskRows, FileSource
from lightning_gnn_dist.batches.ahead.forecast import forecast
from lightning_gnn_dist.batches.loader import BatchLoader

SAMPLER = NeighborSampler([4, 3])
SIZES = {"batch_size": 20, "bulk_size": 3, "most_batches": 150}


def test_it_is_what_batches_fetch(tmp_path: Path) -> None:
    communities(500, 4, num_features=16).save(tmp_path / "graph")
    graph, seeds = Graph.open(tmp_path / "graph"), torch.arange(0, 500, 2)
    rows = DiskRows.of(graph, 150 * 64)
    assert rows is not None
    loader = BatchLoader.over(
        FileSource(graph, rows, SAMPLER, Loading()), seeds, 13, seed=0, bulk_size=3, num_threads=0
    )
    for _ in loader.between(0, 150):
        pass
    found = forecast(graph, SAMPLER, seeds, None, [0, 150, 500], graph.degrees().__getitem__, **SIZES)
    assert (found.drawn, found.batches) == (150, 13)
    assert found.rows * 150 / 13 == rows.cache.asked
    none, some, most = found.held
    assert none == 0 and abs(some - rows.cache.hit_rate) < 0.02 and most > 0.95  # at first, fewer bulks are known
    rows.close()


def test_near_rows_are_not_fetched() -> None:
    graph, seeds = communities(500, 4), torch.arange(0, 500, 2)
    is_near = torch.arange(500) < 300
    edges = graph.degrees().__getitem__
    found = forecast(graph, SAMPLER, seeds, is_near, [500], edges, **SIZES)
    far, near = (forecast(graph, SAMPLER, seeds, near, [0], edges, **SIZES).rows for near in (~is_near, None))
    assert found.rows + far == near
