"""Edges as seeds: what is removed, what stays, and false edges, which are never true."""

import torch

from lightning_gnn_dist import Graph, NeighborSampler, communities
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler
from lightning_gnn_dist.extensions.links.negatives import Candidates, draw_receivers, has_edges
from lightning_gnn_dist.extensions.links.targets import (
    HeldLinks,
    OwnLinks,
    edges_at,
    positions_of_links,
    without_targets,
)

KEY = BatchKey(0, 0, 0)
OWN = OwnLinks(2, Candidates(range(80)), undirected=True)


def weighted() -> Graph:
    """Edges that know their ends."""
    graph = communities(80, 2, num_features=2)
    sender, receiver = edges_at(graph, torch.arange(graph.num_edges))
    return Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_attr": torch.stack([sender, receiver], 1)})


def sampled(sample: Sample) -> list[tuple[int, int]]:
    rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff())
    ends = sample.nodes[torch.stack([sample.indices.long(), rows])]
    return list(zip(*ends.tolist(), strict=True))


def test_positions_and_edges_are_two_names_of_the_same() -> None:
    graph = Graph.from_edge_index(torch.tensor([[4, 0, 2, 2], [1, 3, 3, 1]]), 6)  # rows 0, 2, 4 and 5 are empty
    assert edges_at(graph, torch.arange(4)).tolist() == [[2, 4, 0, 2], [1, 1, 3, 3]]


def test_links_are_those_of_one_owner_once_a_pair() -> None:
    edge_index = torch.tensor([[0, 1, 1, 2, 3, 3, 4, 3], [1, 0, 2, 1, 3, 4, 3, 4]])
    graph, owner = Graph.from_edge_index(edge_index, 5), torch.tensor([0, 0, 1, 1, 1])
    links = edges_at(graph, positions_of_links(graph, owner, True))
    assert links.T.tolist() == [[0, 1], [3, 4], [3, 4]]  # no loop, both copies
    assert edges_at(graph, positions_of_links(graph, owner, False)).shape[1] == 5
    assert edges_at(graph, positions_of_links(graph, torch.tensor([0, 0, -1, -1, -1]), True)).T.tolist() == [[0, 1]]


def test_edge_arrays_follow_what_is_removed() -> None:
    graph = weighted()
    seeds = positions_of_links(graph, torch.zeros(80, dtype=torch.int64), True)[:20]
    (sample,) = LinkSampler(NeighborSampler([-1, 3]), OWN).sample_bulk(graph, [seeds], [KEY])
    batch = assemble(graph, sample)
    assert torch.equal(batch.n_id[batch.edge_index].T, batch.edge_attr)
    assert batch.blocks[1].num_edges == batch.num_sampled_edges[0]
    assert batch.edge_label.tolist() == [1.0] * 20 + [0.0] * 40
    assert batch.batch_size == batch.edge_label_index.unique().numel()


def test_only_the_targets_go() -> None:
    graph = weighted()
    (sample,) = NeighborSampler([-1, -1]).sample_bulk(graph, [torch.arange(30)], [KEY])
    before = sampled(sample)
    (first, *_) = [(s, r) for s, r in before if s < 30 and r < 30]
    after = sampled(without_targets(graph, sample, torch.tensor([[first[0]], [first[1]]])))
    assert sorted(before) == sorted([*after, first, first[::-1]])
    assert sampled(without_targets(graph, sample, torch.empty((2, 0), dtype=torch.int64))) == before


def test_no_seeds_are_an_empty_batch() -> None:
    graph, none = weighted(), torch.empty(0, dtype=torch.int64)
    (sample,) = LinkSampler(NeighborSampler([2, 2]), OWN).sample_bulk(graph, [none], [KEY])
    assert assemble(graph, sample).batch_size == 0


def test_held_edges_come_with_their_negatives() -> None:
    graph = weighted()
    edges, negatives = torch.tensor([[0, 5, 9], [7, 8, 2]]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    sampler = LinkSampler(NeighborSampler([-1]), HeldLinks(edges, negatives))
    (sample,) = sampler.sample_bulk(graph, [torch.tensor([2, 0])], [KEY])
    batch = assemble(graph, sample)
    pairs = batch.n_id[batch.edge_label_index].T.tolist()
    assert pairs == [[9, 2], [0, 7], [9, 5], [9, 6], [0, 1], [0, 2]]


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
