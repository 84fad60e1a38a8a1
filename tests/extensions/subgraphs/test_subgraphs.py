"""Laws of walks and shadows."""

import pytest
import torch
from torch_geometric.utils import k_hop_subgraph

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.sample import BatchKey
from tests.graph.typed.graphs import small
from tests.loaders import over
from tests.sampling.reference import random_graph
from tests.sampling.test_subgraph import GRAPH, PLACE, SEEDS, dense, one


def test_walks_follow_the_messages_backwards():
    ring = lgd.Graph.from_edge_index(torch.stack([torch.arange(1, 50), torch.arange(49)]), 50)  # i + 1 sends to i
    sample = one(lgd.RandomWalkSampler(2, walk_length=3, visits=0), ring, torch.tensor([0, 20, 48]))
    assert sample.nodes.tolist() == [0, 20, 48, 1, 2, 3, 21, 22, 23, 49]  # node 49 has no senders, and stays


def test_each_sender_is_as_likely_as_any_other():
    star = lgd.Graph.from_edge_index(torch.stack([torch.arange(1, 13), torch.zeros(12).long()]), 13)
    sampler, places = lgd.RandomWalkSampler(1, walk_length=1, visits=0), [BatchKey(0, 0, i) for i in range(4000)]
    samples = sampler.sample_bulk(star, [torch.tensor([0])] * 4000, places)
    counts = torch.bincount(torch.cat([sample.nodes[1:] for sample in samples]), minlength=13)[1:]
    assert ((counts - 4000 / 12) ** 2 / (4000 / 12)).sum() < 31.3  # 0.999 quantile, 11 degrees of freedom


@pytest.mark.slow
def test_normalised_sums_are_right_on_average():
    graph = random_graph(80, 900, seed=1)
    weight = torch.rand(900, generator=torch.Generator().manual_seed(0))
    graph = lgd.Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_weight": weight})
    rows = torch.arange(80).repeat_interleave(graph.degrees())
    x = graph.node_arrays["x"]
    for name in (None, "edge_weight"):
        values = 1 / graph.degrees()[rows] if name is None else weight
        full = torch.zeros(80, 8).index_add_(0, rows, values[:, None] * x[graph.indices.long()])
        sampler = lgd.RandomWalkSampler(2, 2, name, visits=1500)
        sums, met, loss = torch.zeros(80, 8), torch.zeros(80), torch.zeros(80)
        loader = over(GraphSource(graph, sampler), torch.arange(80), 4, seed=0, num_threads=0)
        for epoch in range(600):
            loader.set_epoch(epoch)
            for batch in loader:
                out = batch.blocks[0].weighted_adj @ batch.x
                sums.index_add_(0, batch.n_id, out)
                met[batch.n_id] += 1
                loss.index_add_(0, batch.n_id, batch.node_norm)
        known = met > 300
        assert known.sum() > 70
        error = ((sums / met[:, None]) - full)[known]
        assert error.abs().mean() < 0.05 * full.abs().mean()
        assert (loss / 2400 * 80 - 1).abs().max() < 0.15  # the mean of the loss over all nodes


def test_norms_are_counted_once_and_belong_to_the_sampler():
    graph = random_graph(80, 900, seed=1)
    sampler = lgd.RandomWalkSampler(2, visits=3)
    first, second = one(sampler, graph, SEEDS % 80), one(sampler, graph, SEEDS % 80)
    assert first.edge_weight is not None
    assert first.node_norm is not None
    assert first.edge_weight.equal(second.edge_weight)
    other = one(lgd.RandomWalkSampler(2, visits=4), graph, SEEDS % 80)
    assert first.nodes.equal(other.nodes)
    assert not first.edge_weight.equal(other.edge_weight)
    assert one(lgd.RandomWalkSampler(2, visits=0), graph, SEEDS % 80).edge_weight is None


def test_walks_are_counted_from_the_training_nodes():
    graph = random_graph(80, 900, seed=1)
    mask = torch.arange(80) < 20
    graph = lgd.Graph(graph.indptr, graph.indices, {"train_mask": mask}, {})
    norm = one(lgd.RandomWalkSampler(2, 1, visits=20), graph, torch.arange(10)).node_norm
    assert norm is not None
    assert torch.allclose(norm[:10] * 80, torch.tensor(2.0), atol=0.5)  # a half of the 20 begin a batch


def test_walks_are_counted_in_passes_over_the_training_nodes():
    graph = lgd.Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 80)
    norm = one(lgd.RandomWalkSampler(2, visits=3), graph, torch.arange(40)).node_norm
    assert torch.allclose(norm * 80, torch.tensor(2.0))  # every node is in one of two batches


def test_walks_are_not_counted_from_nowhere():
    graph = lgd.Graph(GRAPH.indptr, GRAPH.indices, {"train_mask": torch.zeros(GRAPH.num_nodes, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"train_mask marks none: .* visits=0"):
        one(lgd.RandomWalkSampler(2), graph)
    assert one(lgd.RandomWalkSampler(2, visits=0), graph).num_sampled_nodes[0] == SEEDS.numel()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shadow_is_the_graph_around_each_seed(depth):
    sample = one(lgd.ShadowSampler([-1] * depth, num_hops=2))
    rows = torch.arange(200).repeat_interleave(GRAPH.degrees())
    edge_index = torch.stack([GRAPH.indices.long(), rows])
    found = dense(sample)
    of_seed = [set(k_hop_subgraph(int(s), depth, edge_index, num_nodes=200)[0].tolist()) for s in SEEDS]
    sizes = [len(nodes) - 1 for nodes in of_seed]
    at = 5
    for seed, nodes, size in zip(range(5), of_seed, sizes, strict=True):
        mine = torch.tensor([seed, *range(at, at + size)])
        assert set(sample.nodes[mine].tolist()) == nodes
        ids = sample.nodes[mine]
        assert found[mine][:, mine].equal(dense(GRAPH)[ids][:, ids])
        found[mine[:, None], mine] = 0
        at += size
    assert at == sample.nodes.numel()
    assert found.sum() == 0  # no edges between the graphs


def test_a_shadow_draws_what_neighbour_sampling_draws():
    sample = one(lgd.ShadowSampler([3, 2], num_hops=2), seeds=SEEDS[:1])
    drawn = lgd.NeighborSampler([3, 2]).sample_bulk(GRAPH, [SEEDS[:1]], [PLACE])[0]
    assert sample.nodes.equal(drawn.nodes)
    assert sample.indices.numel() > drawn.indices.numel()


def test_graphs_with_types_have_no_weights_of_walks():
    with pytest.raises(ValueError, match=r"RandomWalkSampler\(visits=50\) draws from graphs without types"):
        lgd.RandomWalkSampler(2).sample_bulk(lgd.Graph.from_pyg(small()), [torch.arange(3)], [PLACE])
