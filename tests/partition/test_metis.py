"""METIS: few cut edges, bounds that hold, and the graph that it is given."""

from itertools import product
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.partition import default, metis
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.metis import undirected
from lightning_gnn_dist.partition.random import deal
from tests.partition.graphs import lonely_nodes, messy_community, path_graph, random_directed

GRAPH = lgd.communities(4000, 8, num_features=2, train_share=0.2, homophily=0.9)


def uneven(graph: lgd.Graph, share: float) -> lgd.Graph:
    """The same edges, but only the first nodes of every community are trained on."""
    y = graph.node_arrays["y"]
    train_mask = torch.zeros(graph.num_nodes, dtype=torch.bool)
    for label in (0, 1):
        members = (y == label).nonzero().view(-1)
        train_mask[members[: int(share * members.numel())]] = True
    return lgd.Graph(graph.indptr, graph.indices, {"y": y, "train_mask": train_mask})


@pytest.mark.parametrize("graph", [GRAPH, random_directed(400, 2000), path_graph(301), lonely_nodes(400)])
def test_no_part_exceeds_its_bound(graph: lgd.Graph) -> None:
    for num_parts, imbalance in product([2, 8, 30, 300], [0.0, 0.03, 0.3]):
        average = graph.num_nodes / num_parts
        counts = lgd.MetisPartitioner(imbalance=imbalance)(graph, num_parts, seed=0).counts()
        assert counts.max() <= max(ceil(average), (1 + imbalance) * average)


@pytest.mark.parametrize("num_parts", [2, 8, 32])
@pytest.mark.parametrize(
    "graph", [GRAPH, uneven(GRAPH, 1.0), uneven(GRAPH, 0.1), lgd.communities(64, 4, train_share=0.6)]
)
def test_training_nodes_and_nodes_are_balanced_together(graph: lgd.Graph, num_parts: int) -> None:
    report = lgd.MetisPartitioner(balance="train")(graph, num_parts, seed=0).report(graph)
    train_nodes = report.train_nodes
    for counts in (train_nodes, report.nodes):
        average = int(counts.sum()) / num_parts
        assert counts.max() <= max(ceil(average), 1.03 * average)
    assert train_nodes.min() >= 1


def test_balanced_training_nodes_still_cut_far_fewer_edges_than_random() -> None:
    graph = uneven(GRAPH, 0.5)
    plain, balanced = (lgd.MetisPartitioner(balance)(graph, 8, seed=0) for balance in ("nodes", "train"))
    assert 0 in plain.report(graph).train_nodes.tolist()  # type: ignore[union-attr]
    assert balanced.report(graph).cut_ratio < 0.6


def test_too_few_training_nodes_are_refused() -> None:
    graph = lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 6, {"train_mask": torch.arange(6) < 3})
    with pytest.raises(ValueError, match=r"num_parts \(4\) must not exceed the training nodes \(3\)"):
        lgd.MetisPartitioner(balance="train")(graph, 4, seed=0)
    assert lgd.MetisPartitioner(balance="train")(graph, 3, seed=0).report(graph).train_nodes is not None


def test_balancing_training_nodes_needs_a_mask() -> None:
    graph = lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 6)
    with pytest.raises(ValueError, match="no train_mask"):
        lgd.MetisPartitioner(balance="train")(graph, 2, seed=0)


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
def test_metis_sees_every_edge_both_ways_and_once(graph: lgd.Graph) -> None:
    start, neighbors = undirected(graph)
    receivers = np.repeat(np.arange(graph.num_nodes), graph.degrees().numpy())
    expected = {(u, v) for u, v in zip(graph.indices.tolist(), receivers.tolist(), strict=True) if u != v}
    expected |= {(v, u) for u, v in expected}
    owners = np.repeat(np.arange(graph.num_nodes), np.diff(start))
    found = list(zip(neighbors.tolist(), owners.tolist(), strict=True))
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize(("num_nodes", "count"), [(128, "128 nodes"), (65, "128 edges, counted in both directions,")])
def test_what_metis_cannot_count_is_refused(num_nodes: int, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis.pymetis, "zero_copy_dtype", lambda: np.int8)
    assert undirected(path_graph(64))[0][-1] == 126
    with pytest.raises(
        ValueError, match=rf"{count} but this build of METIS counts up to 127: use StreamingPartitioner"
    ):
        undirected(path_graph(num_nodes))


def test_metis_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lgd.MetisPartitioner()(path_graph(20), 19, seed=0)
    assert capfd.readouterr() == ("", "")


# The default: METIS where half of the memory takes it, else streaming.


GB = 10**9


@pytest.mark.parametrize(
    ("num_edges", "memory", "expected"),
    [(10**6, 8 * GB, "Metis"), (30 * 10**6, 80 * GB, "Metis"), (10**7, 2 * GB, "Streaming")],
)
def test_size_and_memory_decide(num_edges, memory, expected, monkeypatch, logged) -> None:
    monkeypatch.setattr(metis, "pymetis", object())
    default._tell.cache_clear()
    assert type(default_partitioner(num_edges, memory)).__name__ == f"{expected}Partitioner"
    alike: Any = default_partitioner(num_edges, memory, look_alike=True)
    assert type(alike).__name__ == "SuperNodePartitioner"
    assert type(alike.clusters).__name__ == ("NoneType" if expected == "Metis" else f"{expected}Partitioner")
    assert len(logged) == (expected != "Metis")
    assert all("METIS would take about" in text and f"for {num_edges:,} edges" in text for text in logged)


# Random parts: balanced, alike, and without most of their edges.


@pytest.mark.parametrize("num_parts", [1, 3, 8])
def test_counts_differ_by_one_at_most(num_parts: int) -> None:
    counts = lgd.RandomPartitioner()(path_graph(1001), num_parts, seed=0).counts()
    assert counts.max() - counts.min() <= 1


def test_the_deal_never_changes() -> None:
    # Ranks that compute it by themselves must agree, so must a run and the one that resumes it.
    assert deal(12, 3, seed=0).tolist() == [0, 1, 0, 1, 0, 0, 2, 1, 2, 2, 1, 2]


# Streaming: within its bounds always, and fewer cut edges than random.


HALF_LABELLED = lgd.communities(4000, 8, num_features=2, train_share=0.5, homophily=0.9)
orders = pytest.mark.parametrize("order", ["natural", "random"])


@orders
def test_no_part_leaves_its_bounds(order: str) -> None:
    for graph, slack, num_parts in product([HALF_LABELLED, path_graph(1001)], [0.0, 0.05, 0.5, 2.0], [3, 8, 64]):
        partitioner = lgd.StreamingPartitioner(slack, passes=2, order=order)  # type: ignore[arg-type]
        counts = partitioner(graph, num_parts, seed=0).counts()
        average = graph.num_nodes / num_parts
        assert counts.max() <= max((1 + slack) * average, ceil(average))
        assert counts.min() >= max(1, int((1 - slack) * average))


@orders
def test_cuts_fewer_edges_than_random_and_more_passes_fewer_still(order: str) -> None:
    def cut(passes: int) -> float:
        partitioner = lgd.StreamingPartitioner(passes=passes, order=order)  # type: ignore[arg-type]
        return partitioner(HALF_LABELLED, 8, seed=0).report(HALF_LABELLED).cut_ratio

    assert cut(passes=1) < 0.75 * lgd.RandomPartitioner()(HALF_LABELLED, 8, seed=0).report(HALF_LABELLED).cut_ratio
    assert cut(passes=5) < cut(passes=1)


@pytest.mark.parametrize("passes", [1, 3])
def test_every_choice_follows_the_formula(passes: int) -> None:
    graph, num_parts, slack = random_directed(), 4, 0.3
    partitioner = lgd.StreamingPartitioner(slack, passes)
    found = partitioner(graph, num_parts, seed=0).assignment.tolist()
    assert found == by_the_formula(graph, num_parts, slack, passes)


def by_the_formula(graph: lgd.Graph, num_parts: int, slack: float, passes: int) -> list[int]:
    """The formulas in the plainest Python: every part is scored for every node."""
    num_nodes = graph.num_nodes
    capacity = max(ceil(num_nodes / num_parts), int((1 + slack) * num_nodes / num_parts))
    least = int((1 - slack) * num_nodes / num_parts)
    placed: dict[int, int] = {}
    for _ in range(passes):
        size = [0] * num_parts
        for node in range(num_nodes):
            senders = graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()
            links = [sum(u != node and placed.get(u) == p for u in senders) for p in range(num_parts)]
            owed = sum(max(least - s, 0) for s in size)
            limit = capacity if num_nodes - node > owed else least

            def score(p: int, links: list[int] = links, size: list[int] = size) -> float:
                return links[p] * (1 - size[p] / capacity)

            open_parts = [p for p in range(num_parts) if size[p] < limit]
            placed[node] = max(open_parts, key=lambda p: (score(p), -size[p], -p))
            size[placed[node]] += 1
    return [placed[node] for node in range(num_nodes)]


def test_natural_order_takes_no_notice_of_the_seed() -> None:
    first, second = (lgd.StreamingPartitioner()(HALF_LABELLED, 4, seed).assignment for seed in (0, 1))
    assert torch.equal(first, second)


# Super-nodes lie between METIS and random parts.


def test_supernodes_stay_whole_and_are_dealt_evenly() -> None:
    supernodes = lgd.MetisPartitioner()(HALF_LABELLED, 50, seed=4).assignment
    partition = lgd.SuperNodePartitioner(50)(HALF_LABELLED, 8, seed=4)
    pairs = torch.stack([supernodes, partition.assignment]).unique(dim=1)  # (2, distinct pairs)
    assert pairs.shape[1] == 50
    dealt = torch.bincount(pairs[1], minlength=8)
    assert dealt.max() - dealt.min() <= 1


def test_they_lie_between_metis_and_random_in_cut_and_in_skew() -> None:
    metis = lgd.MetisPartitioner()(HALF_LABELLED, 8, seed=0).report(HALF_LABELLED)
    supernodes = lgd.SuperNodePartitioner(80)(HALF_LABELLED, 8, seed=0).report(HALF_LABELLED)
    random = lgd.RandomPartitioner()(HALF_LABELLED, 8, seed=0).report(HALF_LABELLED)
    assert metis.cut_ratio < supernodes.cut_ratio < random.cut_ratio
    assert metis.worst_label_skew is not None
    assert supernodes.worst_label_skew is not None
    assert random.worst_label_skew is not None
    assert metis.worst_label_skew > supernodes.worst_label_skew > random.worst_label_skew


def test_there_are_fifty_for_each_part_where_no_number_is_given() -> None:
    assert torch.equal(
        lgd.SuperNodePartitioner()(HALF_LABELLED, 3, 0).assignment,
        lgd.SuperNodePartitioner(150)(HALF_LABELLED, 3, 0).assignment,
    )
    graph = path_graph(64)
    assert torch.equal(
        lgd.SuperNodePartitioner()(graph, 4, 0).assignment, lgd.SuperNodePartitioner(64)(graph, 4, 0).assignment
    )
    assert [str(lgd.SuperNodePartitioner(*number)) for number in ((), (8,))] == [
        "SuperNodePartitioner()",
        "SuperNodePartitioner(num_supernodes=8)",
    ]


def test_another_partitioner_finds_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    clusters = lgd.StreamingPartitioner()(HALF_LABELLED, 60, 1).assignment
    partition = lgd.SuperNodePartitioner(60, lgd.StreamingPartitioner())(HALF_LABELLED, 4, 1)
    assert torch.stack([clusters, partition.assignment]).unique(dim=1).shape[1] == 60  # each in one part


@pytest.mark.parametrize(
    ("num_supernodes", "message"),
    [
        (2, r"num_supernodes \(2\) must be at least num_parts \(4\): every part needs a super-node"),
        (11, r"num_supernodes \(11\) must not exceed the graph's nodes \(10\)"),
    ],
)
def test_impossible_numbers_are_refused(num_supernodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.SuperNodePartitioner(num_supernodes)(path_graph(10), 4, seed=0)
