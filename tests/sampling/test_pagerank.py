"""The nodes of a batch are those of largest personalised PageRank, pushed by hand."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, PageRankSampler
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling import pagerank as module
from lightning_gnn_dist.sampling.pagerank import room_for
from tests.sampling.reference import random_graph

SEEDS = torch.tensor([4, 190, 7, 60, 33])
KEY = BatchKey(0, 1, 2)


def pushed(graph: Graph, seed: int, alpha: float, eps: float) -> tuple[dict[int, float], dict[int, float]]:
    """What rests at each node, and what still waits, first come first served."""
    mass: dict[int, float] = {}
    rest, queue = {seed: 1.0}, deque([seed])
    while queue:
        node = queue.popleft()
        left, rest[node] = rest[node], 0.0
        senders = graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist()
        mass[node] = mass.get(node, 0.0) + (alpha * left if senders else left)
        for sender in senders:
            rest[sender] = rest.get(sender, 0.0) + (1.0 - alpha) * left / len(senders)
            degree = int(graph.indptr[sender + 1] - graph.indptr[sender])
            if sender not in queue and rest[sender] > eps * max(degree, 1):
                queue.append(sender)
    return mass, rest


def by_hand(graph: Graph, seeds: Tensor, sampler: PageRankSampler) -> set[int]:
    nodes = set(seeds.tolist())
    for seed in seeds.tolist():
        mass = pushed(graph, seed, sampler.alpha, sampler.eps)[0]
        order = sorted((-value, node) for node, value in mass.items() if node != seed and value > 0)
        nodes |= {node for _, node in order[: sampler.num_neighbors]}
    return nodes


@pytest.mark.parametrize("room", [1, 8, 1 << 12])
@pytest.mark.parametrize(
    ("count", "alpha", "eps"), [(5, 0.25, 1e-4), (12, 0.1, 1e-3), (300, 0.5, 1e-5), (3, 0.25, 0.1)]
)
def test_a_batch_has_the_nodes_of_a_push_by_hand(
    count: int, alpha: float, eps: float, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROOM", room)
    graph, sampler = random_graph(200, 900, seed=2), PageRankSampler(count, 2, alpha, eps)
    (sample,) = sampler.sample_bulk(graph, [SEEDS], [KEY])
    assert sample.nodes[: len(SEEDS)].equal(SEEDS)
    assert set(sample.nodes.tolist()) == by_hand(graph, SEEDS, sampler)


def test_a_push_by_hand_is_close_to_the_equation() -> None:
    graph = random_graph(60, 400, seed=1)
    step = torch.zeros(60, 60, dtype=torch.float64)
    rows = torch.arange(60).repeat_interleave(graph.degrees())
    step.index_put_((rows, graph.indices.long()), 1.0 / graph.degrees()[rows].double(), accumulate=True)
    step += torch.diag((graph.degrees() == 0).double())  # a walk that cannot go on stays
    exact = 0.25 * torch.linalg.inv(torch.eye(60, dtype=torch.float64) - 0.75 * step)
    for seed in (0, 17):
        mass, rest = pushed(graph, seed, 0.25, 1e-6)
        assert sum(mass.values()) + sum(rest.values()) == pytest.approx(1.0)
        assert all(abs(float(exact[seed, node]) - value) < 1e-3 for node, value in mass.items())


def test_equal_nodes_are_taken_by_their_ids() -> None:
    star = Graph.from_edge_index(torch.stack([torch.arange(1, 13), torch.zeros(12).long()]), 13)
    (sample,) = PageRankSampler(4, 1).sample_bulk(star, [torch.tensor([0])], [KEY])
    assert sample.nodes.tolist() == [0, 1, 2, 3, 4]
    (alone,) = PageRankSampler(4, 1).sample_bulk(star, [torch.tensor([5])], [KEY])
    assert alone.nodes.tolist() == [5]


def test_what_is_farther_than_the_layers_may_be_reached() -> None:
    ring = Graph.from_edge_index(torch.stack([torch.arange(1, 50), torch.arange(49)]), 50)  # i + 1 sends to i
    (sample,) = PageRankSampler(6, 2).sample_bulk(ring, [torch.tensor([10])], [KEY])
    assert sample.nodes.tolist() == [10, *range(11, 17)]


def test_nothing_of_an_earlier_seed_stays() -> None:
    graph, sampler = random_graph(200, 900, seed=2), PageRankSampler(5, 2)
    alone = [sampler.sample_bulk(graph, [ids], [KEY])[0].nodes for ids in SEEDS.split(1)]
    (both,) = sampler.sample_bulk(graph, [SEEDS], [BatchKey(7, 7, 7)])
    assert set(both.nodes.tolist()) == set(torch.cat(alone).tolist())
    assert np.all(room_for(4).slots == -1)


def test_a_damaged_graph_is_refused() -> None:
    graph = random_graph(200, 900, seed=2)
    wrong = graph.indices.clone()
    damaged = Graph(graph.indptr, wrong, graph.node_arrays)
    wrong[:] = 1 << 20
    with pytest.raises(ValueError, match="changed after the graph was checked"):
        PageRankSampler(5, 2).sample_bulk(damaged, [SEEDS], [KEY])
