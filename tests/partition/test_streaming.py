"""Streaming: within its bounds always, and fewer cut edges than random."""

from itertools import product
from math import ceil

import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.partition import metis
from tests.partition.graphs import path_graph, random_directed

GRAPH = lgd.communities(4000, 8, num_features=2, train_share=0.5, homophily=0.9)
orders = pytest.mark.parametrize("order", ["natural", "random"])


@orders
def test_no_part_leaves_its_bounds(order: str) -> None:
    for graph, slack, num_parts in product([GRAPH, path_graph(1001)], [0.0, 0.05, 0.5, 2.0], [3, 8, 64]):
        partitioner = lgd.StreamingPartitioner(slack, passes=2, order=order)  # type: ignore[arg-type]
        counts = partitioner(graph, num_parts, seed=0).counts()
        average = graph.num_nodes / num_parts
        assert counts.max() <= max((1 + slack) * average, ceil(average))
        assert counts.min() >= max(1, int((1 - slack) * average))


@orders
def test_cuts_fewer_edges_than_random_and_more_passes_fewer_still(order: str) -> None:
    def cut(passes: int) -> float:
        partitioner = lgd.StreamingPartitioner(passes=passes, order=order)  # type: ignore[arg-type]
        return partitioner(GRAPH, 8, seed=0).report(GRAPH).cut_ratio

    assert cut(passes=1) < 0.75 * lgd.RandomPartitioner()(GRAPH, 8, seed=0).report(GRAPH).cut_ratio
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
    first, second = (lgd.StreamingPartitioner()(GRAPH, 4, seed).assignment for seed in (0, 1))
    assert torch.equal(first, second)


# Super-nodes lie between METIS and random parts.


def test_supernodes_stay_whole_and_are_dealt_evenly() -> None:
    supernodes = lgd.MetisPartitioner()(GRAPH, 50, seed=4).assignment
    partition = lgd.SuperNodePartitioner(50)(GRAPH, 8, seed=4)
    pairs = torch.stack([supernodes, partition.assignment]).unique(dim=1)  # (2, distinct pairs)
    assert pairs.shape[1] == 50
    dealt = torch.bincount(pairs[1], minlength=8)
    assert dealt.max() - dealt.min() <= 1


def test_they_lie_between_metis_and_random_in_cut_and_in_skew() -> None:
    metis = lgd.MetisPartitioner()(GRAPH, 8, seed=0).report(GRAPH)
    supernodes = lgd.SuperNodePartitioner(80)(GRAPH, 8, seed=0).report(GRAPH)
    random = lgd.RandomPartitioner()(GRAPH, 8, seed=0).report(GRAPH)
    assert metis.cut_ratio < supernodes.cut_ratio < random.cut_ratio
    assert metis.worst_label_skew is not None
    assert supernodes.worst_label_skew is not None
    assert random.worst_label_skew is not None
    assert metis.worst_label_skew > supernodes.worst_label_skew > random.worst_label_skew


def test_there_are_fifty_for_each_part_where_no_number_is_given() -> None:
    assert torch.equal(
        lgd.SuperNodePartitioner()(GRAPH, 3, 0).assignment, lgd.SuperNodePartitioner(150)(GRAPH, 3, 0).assignment
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
    clusters = lgd.StreamingPartitioner()(GRAPH, 60, 1).assignment
    partition = lgd.SuperNodePartitioner(60, lgd.StreamingPartitioner())(GRAPH, 4, 1)
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
