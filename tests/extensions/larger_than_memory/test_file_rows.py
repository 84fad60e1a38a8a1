"""Batches read from files are those that are read through the map."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import Graph, NeighborSampler, citations, communities
from lightning_gnn_dist.batches.source import GraphSource
from tests.batch_contents import check_same, contents
from tests.extensions.larger_than_memory.test_file_source import floats, halves, scaled
from tests.loaders import over


def of(form: Callable[..., Any]) -> Graph:
    graph = communities(500, 4, num_features=8)
    arrays = graph.node_arrays | form(graph.node_arrays["x"])
    return Graph(graph.indptr, graph.indices, arrays, {"edge_weight": torch.rand(graph.num_edges)})


def typed() -> Graph:
    data = citations(400, 2, mean_degree=3).to_pyg()
    for kind in data.edge_types:
        data[kind].edge_weight = torch.rand(data[kind].num_edges)
    return Graph.from_pyg(data)


GRAPHS = {form.__name__: partial(of, form) for form in (floats, halves, scaled)} | {"typed": typed}


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize(
    ("is_saved", "num_threads", "all_labels"), [(False, 0, True), (True, 2, False), (True, 0, True)]
)
def test_batches_are_the_same(
    make: Callable[[], Graph], is_saved: bool, num_threads: int, all_labels: bool, tmp_path: Path
) -> None:
    graph = make()
    if is_saved:
        graph.save(tmp_path / "graph")
        graph = Graph.open(tmp_path / "graph")
    source = partial(GraphSource, graph, NeighborSampler([-1, -1]), all_labels=all_labels)
    plain, sparing = (over(source(), torch.arange(400), 7, seed=0, num_threads=num_threads) for _ in range(2))
    sparing.spare_memory()
    check_same(map(contents, sparing), map(contents, plain))
