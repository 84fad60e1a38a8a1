"""What is forecast of a fit is what its batches fetch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gnn_dist import Graph, Loading, NeighborSampler, citations, communities
from lightning_gnn_dist.batches.ahead.files import DiskRows, FileSource
from lightning_gnn_dist.batches.ahead.forecast import Elsewhere, forecast
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
    (reads,) = rows._reads
    types = [Elsewhere(64, graph.degrees().__getitem__, reads.bytes_of)]
    found = forecast(graph, SAMPLER, seeds, None, [0, 150 * 64, 500 * 64], types, **SIZES)
    assert (found.drawn, found.batches) == (150, 13)
    assert found.rows * 150 / 13 == rows.cache.asked
    none, some, most = found.held
    assert none == 0 and abs(some - rows.cache.hit_rate) < 0.02 and most > 0.95  # at first, fewer bulks are known
    assert found.num_bytes[1] * 150 / 13 == pytest.approx(rows.fetched_bytes, rel=0.02)
    rows.close()


def test_near_rows_are_not_fetched() -> None:
    graph, seeds = communities(500, 4), torch.arange(0, 500, 2)
    is_near = torch.arange(500) < 300
    types = [Elsewhere(1, graph.degrees().__getitem__, len)]
    found = forecast(graph, SAMPLER, seeds, is_near, [500], types, **SIZES)
    far, near = (forecast(graph, SAMPLER, seeds, near, [0], types, **SIZES) for near in (~is_near, None))
    assert found.rows + far.rows == near.rows == near.num_bytes[0]


def test_types_without_rows_elsewhere_count_nothing(tmp_path: Path) -> None:
    """Venues have no rows; with room for all others each is fetched once, and what is held is that of a fit.

    Which of equally useful rows stays differs between processors, so both caches rank rows by the same edges.
    """
    citations(600).save(tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    rows = DiskRows.of(graph, 9000)
    assert rows is not None
    source, seeds = FileSource(graph, rows, SAMPLER, Loading()), graph.split("train")
    loader = BatchLoader.over(source, seeds, -(-len(seeds) // 20), seed=0, bulk_size=3, num_threads=0)
    for _ in loader.between(0, 150):
        pass
    widths = [table.cache.bytes_per_row for table in rows.of_nodes]
    edges_from = graph.degrees().split(list(graph.types.num_nodes.values()))
    types = [
        Elsewhere(width, of_type.__getitem__, lambda ids, width=width: len(ids) * width)
        for width, of_type in zip(widths, edges_from, strict=True)
    ]
    assert sorted(widths) == [0, 32, 64, 128]
    found = forecast(graph, SAMPLER, seeds, None, [0, 9000, 10**6], types, **SIZES)
    assert found.rows * 150 / found.batches == rows.cache.asked
    assert found.held[0] == 0 < found.held[1] and abs(found.held[1] - rows.cache.hit_rate) < 0.02
    once = sum(width * count for width, count in zip(widths, graph.types.num_nodes.values(), strict=True))
    assert found.num_bytes[2] * 150 / found.batches <= once < found.num_bytes[1] * 150 / found.batches
    rows.close()
