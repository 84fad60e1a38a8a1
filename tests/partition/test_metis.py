"""METIS: few cut edges, bounds that hold, and the graph that it is given."""

from collections.abc import Callable
from math import ceil

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, MetisPartitioner, RandomPartitioner, communities
from lightning_gnn_dist.partition.multilevel import refuse_beyond, undirected
from tests.partition.graphs import lonely_nodes, messy_community, path_graph, random_directed

GRAPH = communities(4000, 8, num_features=2, train_share=0.2, homophily=0.9)


def uneven(graph: Graph, share: float) -> Graph:
    """The same edges, but only the first nodes of every community are trained on."""
    y = graph.node_arrays["y"]
    train_mask = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for label in (0, 1):
        members = (y == label).nonzero().view(-1)
        train_mask[members[: int(share * members.numel())]] = True
    return Graph(graph.indptr, graph.indices, {"y": y, "train_mask": train_mask})


@pytest.mark.parametrize("imbalance", [0.0, 0.03, 0.3])
@pytest.mark.parametrize("num_parts", [2, 8, 30, 300])
@pytest.mark.parametrize("graph", [GRAPH, random_directed(400, 2000), path_graph(301), lonely_nodes(400)])
def test_no_part_exceeds_its_bound(graph: Graph, num_parts: int, imbalance: float) -> None:
    average = graph.num_nodes / num_parts
    counts = MetisPartitioner(imbalance=imbalance)(graph, num_parts, seed=0).counts()
    assert counts.max() <= max(ceil(average), (1 + imbalance) * average)


@pytest.mark.parametrize("num_parts", [2, 8, 32])
@pytest.mark.parametrize("graph", [GRAPH, uneven(GRAPH, 1.0), uneven(GRAPH, 0.1), communities(64, 4, train_share=0.6)])
def test_training_nodes_and_nodes_are_balanced_together(graph: Graph, num_parts: int) -> None:
    report = MetisPartitioner(balance="train")(graph, num_parts, seed=0).report(graph)
    train_nodes = report.train_nodes
    assert train_nodes is not None
    for counts in (train_nodes, report.nodes):
        average = int(counts.sum()) / num_parts
        assert counts.max() <= max(ceil(average), 1.03 * average)
    assert train_nodes.min() >= 1


def test_balanced_training_nodes_still_cut_far_fewer_edges_than_random() -> None:
    graph = uneven(GRAPH, 0.5)
    plain, balanced = (MetisPartitioner(balance)(graph, 8, seed=0) for balance in ("nodes", "train"))
    assert 0 in plain.report(graph).train_nodes.tolist()  # type: ignore[union-attr]
    assert balanced.report(graph).cut_ratio < 0.6


def test_too_few_training_nodes_are_refused() -> None:
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 6, {"train_mask": torch.arange(6) < 3})
    with pytest.raises(ValueError, match=r"num_parts \(4\) must not exceed the training nodes \(3\)"):
        MetisPartitioner(balance="train")(graph, 4, seed=0)
    assert MetisPartitioner(balance="train")(graph, 3, seed=0).report(graph).train_nodes is not None


def test_balancing_training_nodes_needs_a_mask() -> None:
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 6)
    with pytest.raises(ValueError, match="no train_mask"):
        MetisPartitioner(balance="train")(graph, 2, seed=0)


@pytest.mark.parametrize(
    "graph",
    [
        random_directed(),
        messy_community(),
        path_graph(9, both_ways=False),
        lonely_nodes(),
        GRAPH.induced(torch.randperm(4000, generator=torch.Generator().manual_seed(0))[:500]),
    ],
    ids=["directed", "messy", "directed path", "isolated nodes", "rows out of order"],
)
def test_metis_sees_every_edge_both_ways_and_once(graph: Graph) -> None:
    start, neighbors = undirected(graph, lambda start: np.empty(start[-1], np.int64))
    receivers = np.repeat(np.arange(graph.num_nodes), graph.degrees().numpy())
    expected = {(u, v) for u, v in zip(graph.indices.tolist(), receivers.tolist(), strict=True) if u != v}
    expected |= {(v, u) for u, v in expected}
    owners = np.repeat(np.arange(graph.num_nodes), np.diff(start))
    found = list(zip(neighbors.tolist(), owners.tolist(), strict=True))
    assert len(found) == len(expected)
    assert set(found) == expected


def test_what_metis_cannot_count_is_refused() -> None:
    refuse_beyond(2**31 - 1, 2**31 - 1, "nodes", "METIS")
    with pytest.raises(ValueError, match=r"2147483648 nodes.*up to 2147483647.*StreamingPartitioner"):
        refuse_beyond(2**31 - 1, 2**31, "nodes", "METIS")


def test_metis_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    MetisPartitioner()(path_graph(20), 19, seed=0)
    assert capfd.readouterr() == ("", "")


def test_cora(to_pyg: Callable[..., Data]) -> None:
    graph = Graph.from_pyg(to_pyg("cora.npz"))
    assert MetisPartitioner()(graph, 8, seed=0).report(graph).cut_ratio < 0.2
    assert MetisPartitioner(balance="train")(graph, 8, seed=0).report(graph).cut_ratio < 0.2
    assert RandomPartitioner()(graph, 8, seed=0).report(graph).cut_ratio == pytest.approx(7 / 8, abs=0.02)
