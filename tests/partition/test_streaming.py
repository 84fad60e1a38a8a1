"""Streaming: within its bounds always, and fewer cut edges than random."""

from math import ceil, sqrt

import pytest
import torch

from lightning_gnn_dist import Graph, RandomPartitioner, StreamingPartitioner, communities
from tests.partition.graphs import path_graph, random_directed

GRAPH = communities(4000, 8, num_features=2, train_share=0.5, homophily=0.9)
methods = pytest.mark.parametrize("method", ["ldg", "fennel"])
orders = pytest.mark.parametrize("order", ["natural", "random"])


@methods
@orders
@pytest.mark.parametrize("slack", [0.0, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("num_parts", [3, 8, 64])
def test_no_part_leaves_its_bounds(method: str, order: str, slack: float, num_parts: int) -> None:
    for graph in (GRAPH, path_graph(1001)):
        partitioner = StreamingPartitioner(method, slack, passes=2, order=order)  # type: ignore[arg-type]
        counts = partitioner(graph, num_parts, seed=0).counts()
        average = graph.num_nodes / num_parts
        assert counts.max() <= max((1 + slack) * average, ceil(average))
        assert counts.min() >= max(1, int((1 - slack) * average))


@methods
@orders
def test_cuts_fewer_edges_than_random_and_more_passes_fewer_still(method: str, order: str) -> None:
    def cut(passes: int) -> float:
        partitioner = StreamingPartitioner(method, passes=passes, order=order)  # type: ignore[arg-type]
        return partitioner(GRAPH, 8, seed=0).report(GRAPH).cut_ratio

    assert cut(passes=1) < 0.75 * RandomPartitioner()(GRAPH, 8, seed=0).report(GRAPH).cut_ratio
    assert cut(passes=5) < cut(passes=1)


@methods
@pytest.mark.parametrize("passes", [1, 3])
def test_every_choice_follows_the_formula(method: str, passes: int) -> None:
    graph, num_parts, slack = random_directed(), 4, 0.3
    partitioner = StreamingPartitioner(method, slack, passes)  # type: ignore[arg-type]
    found = partitioner(graph, num_parts, seed=0).assignment.tolist()
    assert found == by_the_formula(graph, num_parts, slack, passes, fennel=method == "fennel")


def by_the_formula(graph: Graph, num_parts: int, slack: float, passes: int, *, fennel: bool) -> list[int]:
    """The formulas in the plainest Python: every part is scored for every node."""
    num_nodes = graph.num_nodes
    capacity = max(ceil(num_nodes / num_parts), int((1 + slack) * num_nodes / num_parts))
    least = int((1 - slack) * num_nodes / num_parts)
    alpha = sqrt(num_parts) * graph.num_edges / 2 / num_nodes**1.5
    placed: dict[int, int] = {}
    for _ in range(passes):
        size = [0] * num_parts
        for node in range(num_nodes):
            senders = graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()
            links = [sum(u != node and placed.get(u) == p for u in senders) for p in range(num_parts)]
            owed = sum(max(least - s, 0) for s in size)
            limit = capacity if num_nodes - node > owed else least

            def score(p: int, links: list[int] = links, size: list[int] = size) -> float:
                if fennel:
                    return links[p] - float(alpha) * 1.5 * sqrt(size[p])
                return links[p] * (1 - size[p] / capacity)

            open_parts = [p for p in range(num_parts) if size[p] < limit]
            placed[node] = max(open_parts, key=lambda p: (score(p), -size[p], -p))
            size[placed[node]] += 1
    return [placed[node] for node in range(num_nodes)]


def test_natural_order_takes_no_notice_of_the_seed() -> None:
    first, second = (StreamingPartitioner()(GRAPH, 4, seed).assignment for seed in (0, 1))
    assert torch.equal(first, second)
