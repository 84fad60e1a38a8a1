"""Times compare exactly, and those that do not are refused, as are graphs and settings without any."""

import math
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, TemporalSampler
from tests.extensions.temporal.temporal_graphs import KEY, plain, typed


def num_seen(edge_time: Any, time: Any, **sampler: Any) -> int:
    """How many of two edges into it node 1 sees."""
    arrays = {"time": torch.as_tensor(time)}, {"edge_time": torch.as_tensor(edge_time)}
    graph = Graph.from_edge_index(torch.tensor([[0, 2], [1, 1]]), 3, *arrays)
    (sample,) = TemporalSampler([-1], "edge_time", "time", **sampler).sample_bulk(graph, [torch.tensor([1])], [KEY])
    return sample.num_sampled_edges[0]


INF, LEAST, MOST, NAN = math.inf, -(2**63), 2**63 - 1, math.nan
EXTREMES: list[tuple[Any, Any, dict[str, Any], int]] = [
    ([-0.0, 0.0], [9.0, 0.0, 9.0], {}, 0),  # -0.0 is 0.0
    ([-0.0, -1e-300], [9.0, 0.0, 9.0], {"equal": True}, 2),
    ([-INF, 3.0], [9.0, INF, 9.0], {}, 2),
    ([-INF, 3.0], [9.0, 4.0, 9.0], {"last": 2}, 1),
    ([LEAST + 1, MOST], [0, LEAST + 2, 0], {"last": 5}, 1),  # 5 before it is no int64
    ([LEAST + 1, MOST], [0, MOST, 0], {"equal": True}, 2),
    ([LEAST + 1, MOST], [0, LEAST + 1, 0], {}, 0),
    ([2**53, 2**53 + 1], [0, 2**53 + 1, 0], {}, 1),  # as floating point numbers they are equal
]


@pytest.mark.parametrize(("edge_time", "time", "sampler", "count"), EXTREMES)
def test_extreme_times_compare_exactly(edge_time: Any, time: Any, sampler: dict[str, Any], count: int) -> None:
    assert num_seen(edge_time, time, **sampler) == count


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no time of an event": ([1.0, NAN], [1.0, 1.0, 1.0], {}, "edge_time of edge 1 is NaN, and edges are ordered by it"),
    "no time of a node": ([1.0, 1.0], [NAN, 1.0, 1.0], {}, "time of node 0 is NaN"),
    "no time of pandas": ([1, LEAST], [1, 1, 1], {}, r"edge_time of edge 1 is -2\*\*63, which pandas writes"),
    "two kinds": ([1, 2], [1.0, 1.0, 1.0], {}, r"Events have times of torch\.int64 .* and seeds of torch\.float32"),
    "vectors": ([[1, 2], [1, 2]], [1, 1, 1], {}, "edge_time must hold one number for each edge"),
    "flags": ([True, False], [1, 1, 1], {}, "edge_time must hold one number for each edge"),
    "a share of an integer": ([1, 2], [1, 1, 1], {"last": 0.5}, r"last \(0\.5\) must be an integer, as the times of"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_times_are_refused(case: str) -> None:
    edge_time, time, sampler, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        num_seen(edge_time, time, **sampler)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a timedelta": ({"last": timedelta(days=1)}, r"such as 86_400 for a day .* of a timedelta its total_seconds\(\)"),
    "latest, often": ({"pick": "latest", "replace": True}, 'pick="latest" takes each event once'),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused(case: str) -> None:
    settings, message = BAD_SETTINGS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        TemporalSampler([2], **({"time": "time"} | settings))


def test_errors_about_times_name_a_way_out_that_shows_nothing_new() -> None:
    """An event at 0 would lie before all seeds; a node of two times is two nodes."""
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, edge_time=torch.tensor([NAN]), time=torch.ones(2))
    later = "leave the edge out, or give it a time later than those of all seeds: 0 may lie before them"
    with pytest.raises(ValueError, match=rf"nan_to_num\(edge_time\)\. .* If these are times, {later}"):
        Graph.from_pyg(data)
    with pytest.raises(TypeError, match=r"Make it one: torch\.as_tensor\(\(\.\.\.\)\.astype\('int64'\)\)"):
        Graph.from_pyg(Data(edge_index=data.edge_index, time=np.zeros(2, "datetime64[s]"), num_nodes=2))
    with pytest.raises(
        ValueError, match=r"node 1 is given 2 times\. To ask for a node at several times, give it a copy"
    ):
        TemporalSampler([2], "time").sample_bulk(plain(0, "nodes"), [torch.tensor([1, 1])], [KEY])


def mixed() -> Graph:
    data = typed(0, in_order=False).to_pyg()
    data["b"].time = data["b"].time.double()
    return Graph.from_pyg(data)


GRAPHS_WITHOUT: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "no such time": (lambda: plain(0, "edges"), {"time": "when"}, 0, "time names the array 'when', and neither edges"),
    "times of edges alone": (lambda: plain(0, "edges"), {"time": "edge_time"}, 0, "Nodes have no 'edge_time' to say"),
    "seeds of a type without": (
        lambda: typed(0, in_order=False),
        {"time": "time"},
        55,
        r"Nodes of type 'c' have no 'time' to say .* set it in data\['c'\] as a tensor .* of theirs as seed_time",
    ),
    "two kinds": (mixed, {"time": "time"}, 0, "time holds integers for some types and floating point"),
    "unknown types": (
        lambda: typed(0, in_order=False),
        {"time": "time", "num_neighbors": {("a", "r0", "b"): [1]}},
        0,
        "no numbers for the edge type",
    ),
}


@pytest.mark.parametrize("case", GRAPHS_WITHOUT)
def test_graphs_without_the_times_are_refused(case: str) -> None:
    make, settings, seed, message = GRAPHS_WITHOUT[case]
    with pytest.raises(ValueError, match=message):
        TemporalSampler(**({"num_neighbors": [2]} | settings)).sample_bulk(make(), [torch.tensor([seed])], [KEY])
