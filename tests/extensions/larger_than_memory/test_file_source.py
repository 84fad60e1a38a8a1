"""Batches whose rows are read from files are those of the graph in RAM, whatever is held and made ahead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import ClusterSampler, Graph, LadiesSampler, Loading, NeighborSampler, communities
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.extensions.larger_than_memory.files import DiskRows, FileSource
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import check_same, contents
from tests.loaders import over

AHEAD = {0: 0, 1: 1, 8: 1_200_000}  # bulks: bytes
SAMPLER = NeighborSampler([4, 3])


def floats(x: Tensor) -> dict[str, Tensor]:
    return {"x": x}


def halves(x: Tensor) -> dict[str, Tensor]:
    return {"x": x.bfloat16()}


def scaled(x: Tensor) -> dict[str, Tensor]:
    x, scale = quantize_rows(x)
    return {"x": x, "x_scale": scale}


def saved(folder: Path, form: Callable[[Tensor], dict[str, Tensor]] = floats, *, edges: bool = True) -> Graph:
    graph = communities(500, 4, num_features=32)
    arrays = (
        graph.node_arrays
        | form(graph.node_arrays["x"])
        | {"z": torch.randn(500, 3, 5), "chunk": torch.arange(500) // 50}
    )
    of_edges = {"edge_weight": torch.rand(graph.num_edges), "edge_attr": torch.randn(graph.num_edges, 9)}
    Graph(graph.indptr, graph.indices, arrays, of_edges if edges else {}).save(folder / "graph")
    return Graph.open(folder / "graph")


def passes(source: BatchSource, num_threads: int) -> list[dict[str, Any]]:
    """Two loaders and corrections share what is held, and one leaves a pass unfinished."""
    seeds = torch.arange(500)
    loader = over(source, seeds, 30, seed=1, bulk_size=3, num_threads=num_threads, inputs=seeds + 7)
    other = over(source, seeds[:90], 4, seed=0, shuffle=False, num_threads=num_threads)
    whole = GlobalBatches(source, torch.arange(300), 32, 0, 3, None, True, in_background=num_threads > 0)
    unfinished = iter(loader)
    found = [*other, *(next(unfinished) for _ in range(4)), *other]
    unfinished.close()
    found += [*loader.between(40, 75), *whole.of_round(1, 0, 2, start=1, stop=6)]
    loader.close()
    return [contents(batch) for batch in found]


@pytest.mark.parametrize(("depth", "cache_bytes"), [(0, 0), (8, 0), (0, 1000), (1, 40_000), (8, 40_000), (1, 80_000)])
def test_batches_are_those_of_the_graph(tmp_path: Path, cache_bytes: int, depth: int) -> None:
    graph = saved(tmp_path)
    rows = DiskRows.of(graph, cache_bytes)
    assert rows is not None
    source = FileSource(graph, rows, SAMPLER, Loading(ahead_bytes=AHEAD[depth]))
    found = passes(source, num_threads=2)
    rows.close()
    check_same(found, passes(GraphSource(graph, SAMPLER, all_labels=False), 0))
    assert 4 <= source.depth(2) <= 12 if depth == 8 else source.depth(2) == depth, source._bulk_bytes
    assert (rows.cache.hits > 0) == (cache_bytes > 0) and rows.fetched_bytes > 0
    assert rows.cache.num_bytes <= cache_bytes


@pytest.mark.parametrize(("widen", "all_labels"), [(False, True), (True, False), (torch.bfloat16, False)])
@pytest.mark.parametrize("form", [floats, halves, scaled])
def test_all_forms_of_features_are_read(
    tmp_path: Path, form: Callable[[Tensor], dict[str, Tensor]], widen: Widen, all_labels: bool
) -> None:
    graph = saved(tmp_path, form, edges=False)
    rows = DiskRows.of(graph, 5000)
    assert rows is not None
    stays, said = (None, widen) if isinstance(widen, bool) else (widen, "auto")
    source = FileSource(graph, rows, SAMPLER, Loading(widen=said, all_labels=all_labels), stays=stays)
    expected = passes(GraphSource(graph, SAMPLER, widen=widen, all_labels=all_labels), 0)
    check_same(passes(source, 1), expected)
    source.spare_memory()
    check_same(passes(source, 0), expected)
    rows.close()


@pytest.mark.parametrize("sampler", [NeighborSampler([-1, -1]), LadiesSampler([32, 32]), ClusterSampler(2)], ids=str)
def test_samplers_draw_what_they_draw_in_ram(tmp_path: Path, sampler: Sampler) -> None:
    graph = saved(tmp_path)
    rows = DiskRows.of(graph, 10_000)
    assert rows is not None
    source = FileSource(graph, rows, sampler, Loading())
    check_same(passes(source, 1), passes(GraphSource(graph, sampler, all_labels=False), 0))
    rows.close()


def test_what_fits_is_read_through_the_map(tmp_path: Path) -> None:
    graph = saved(tmp_path)
    wide = 500 * 4 * (32 + 15)
    assert DiskRows.of(graph, wide) is None
    rows = DiskRows.of(graph, wide - 1)
    assert rows is not None and rows.of_nodes[0].cache.num_rows == 499
    assert rows.are_rows_of(graph) and not rows.are_rows_of(communities(500, 4))
    rows.close()
