"""False edges: never true, uniform, and each a function of its own id."""

from __future__ import annotations

import torch

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.sampling.negatives import Candidates, draw_receivers, has_edges


def test_edges_are_found() -> None:
    graph = Graph.from_edge_index(torch.tensor([[0, 2, 1], [1, 1, 3]]), 4)
    asked = torch.tensor([[0, 1, 2, 1, 3], [1, 0, 1, 3, 3]])
    assert has_edges(graph, asked).tolist() == [True, False, True, True, False]


def test_draws_avoid_edges_and_the_node_itself_and_are_uniform() -> None:
    graph = communities(50, 2, mean_degree=20, num_features=1)
    senders = torch.arange(50)
    drawn, failed = draw_receivers(graph, senders[None], senders, 2000, key(0, 0, 0, -1))
    pairs = torch.stack([senders.repeat_interleave(2000), drawn.view(-1)])
    assert not failed.numel() and not has_edges(graph, pairs).any() and not (pairs[0] == pairs[1]).any()
    for sender in (0, 31):
        neighbours = {int(node) for node in range(50) if has_edges(graph, torch.tensor([[sender], [node]]))}
        counts = torch.bincount(drawn[sender], minlength=50)
        free = torch.tensor([node for node in range(50) if node not in neighbours | {sender}])
        assert counts.sum() == counts[free].sum() == 2000
        assert (counts[free] > 0.5 * 2000 / free.numel()).all() and (counts[free] < 1.7 * 2000 / free.numel()).all()


def test_a_draw_depends_on_its_own_id_alone() -> None:
    graph = communities(100, 2, num_features=1)
    senders, ids = torch.randint(100, (30,)), torch.randperm(1000)[:30]
    together, _ = draw_receivers(graph, senders[None], ids, 3, key(1, 2, 3, -1))
    alone, _ = draw_receivers(graph, senders[None, 7:9], ids[7:9], 3, key(1, 2, 3, -1))
    assert torch.equal(together[7:9], alone)
    assert not torch.equal(together, draw_receivers(graph, senders[None], ids, 3, key(1, 2, 4, -1))[0])
    few, _ = draw_receivers(graph, senders[None], ids, 3, key(1, 2, 3, -1), Candidates(range(10)))
    assert int(few.max()) < 10


def test_the_only_free_node_is_found_and_none_is_reported() -> None:
    others = [node for node in range(1, 500) if node != 321]
    graph = Graph.from_edge_index(torch.tensor([[0] * len(others), others]), 500)
    drawn, failed = draw_receivers(graph, torch.tensor([[0]]), torch.tensor([5]), 4, key(0, 0, 0, 0))
    assert drawn.tolist() == [[321] * 4] and not failed.numel()
    _, failed = draw_receivers(
        graph, torch.tensor([[400, 0]]), torch.tensor([1, 2]), 4, key(0, 0, 0, 0), Candidates(range(300))
    )
    assert failed.tolist() == [1]


def test_bits_are_fair_and_belong_to_ids() -> None:
    ids = torch.arange(4000)
    bits = draw_bits(key(3, 0, 0, -2), ids)
    assert 0.45 < bits.float().mean() < 0.55
    assert torch.equal(draw_bits(key(3, 0, 0, -2), ids[1000:1500]), bits[1000:1500])
    assert not torch.equal(draw_bits(key(4, 0, 0, -2), ids), bits)
