"""Laws of samplers whose batch is an induced subgraph."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv
from torch_geometric.utils import k_hop_subgraph

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource, assemble
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from tests.loaders import over
from tests.sampling.reference import random_graph

PLACE = BatchKey(0, 1, 2)
SEEDS = torch.tensor([4, 190, 7, 60, 33])


def with_chunks(graph: lgd.Graph, num_chunks: int = 10) -> lgd.Graph:
    chunk = torch.arange(graph.num_nodes) * 7 % num_chunks
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays | {"chunk": chunk}, graph.edge_arrays)


GRAPH = with_chunks(random_graph(200, 1500, seed=2))
SAMPLERS: list[Sampler] = [
    lgd.RandomWalkSampler(2, walk_length=3, visits=0),
    lgd.RandomWalkSampler(3, walk_length=3, visits=2),
    lgd.RandomWalkSampler(1, walk_length=3, visits=0),
    lgd.ClusterSampler(2),
    lgd.ClusterSampler(1),
    lgd.ShadowSampler([4, 2], num_hops=3),
    lgd.ShadowSampler([-1], num_hops=1),
]


def one(sampler: Sampler, graph: lgd.Graph = GRAPH, seeds: Tensor = SEEDS, place: BatchKey = PLACE) -> Sample:
    return sampler.sample_bulk(graph, [seeds], [place])[0]


def dense(sample: Sample, weight: Tensor | None = None) -> Tensor:
    """How many edges, or how much weight, runs between positions of the batch."""
    rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff())
    weight = torch.ones(rows.numel()) if weight is None else weight
    count = sample.nodes.numel()
    return torch.zeros(count, count).index_put_((rows, sample.indices.long()), weight, accumulate=True)


def whole_matrix(graph: lgd.Graph) -> Tensor:
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    count = graph.num_nodes
    return torch.zeros(count, count).index_put_((rows, graph.indices.long()), torch.ones(rows.numel()), accumulate=True)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_model_on_blocks_is_the_model_on_all_edges(sampler):
    batch = assemble(GRAPH, one(sampler))
    torch.manual_seed(0)
    conv, x, y = GraphConv(8, 8), batch.x, batch.x
    for block in batch.blocks:
        x = conv((x, x[: block.num_dst]), block.weighted_adj if "edge_weight" in batch else block.adj)
        y = conv(y, batch.edge_index, batch.get("edge_weight"))
    assert torch.allclose(x, y[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if not isinstance(s, lgd.ShadowSampler)], ids=repr)
def test_all_edges_among_the_nodes_are_there(sampler):
    sample = one(sampler)
    rows = sample.indptr.numel() - 1
    assert rows == (5 if sampler.num_hops == 1 else sample.nodes.numel())
    assert sample.nodes.unique().numel() == sample.nodes.numel()
    expected = whole_matrix(GRAPH)[sample.nodes][:, sample.nodes]
    assert dense(sample)[:rows].equal(expected[:rows])
    assert sample.edge_ids is not None
    assert GRAPH.indices[sample.edge_ids].long().equal(sample.nodes[sample.indices.long()])


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
        assert found[mine][:, mine].equal(whole_matrix(GRAPH)[ids][:, ids])
        found[mine[:, None], mine] = 0
        at += size
    assert at == sample.nodes.numel()
    assert found.sum() == 0  # no edges between the graphs


def test_a_shadow_draws_what_neighbour_sampling_draws():
    sample = one(lgd.ShadowSampler([3, 2], num_hops=2), seeds=SEEDS[:1])
    drawn = lgd.NeighborSampler([3, 2]).sample_bulk(GRAPH, [SEEDS[:1]], [PLACE])[0]
    assert sample.nodes.equal(drawn.nodes)
    assert sample.indices.numel() > drawn.indices.numel()


def test_a_cluster_batch_is_the_chunks_of_its_seeds():
    sample = one(lgd.ClusterSampler(2))
    chunk = GRAPH.node_arrays["chunk"]
    assert sample.nodes.sort().values.equal(torch.isin(chunk, chunk[SEEDS]).nonzero().view(-1))


def test_the_loader_deals_seeds_chunk_by_chunk():
    sampler = lgd.ClusterSampler(2)
    assert isinstance(sampler, OrdersSeeds)
    assert not isinstance(lgd.NeighborSampler([2]), OrdersSeeds)
    loader = over(GraphSource(GRAPH, sampler), torch.arange(200), 5, seed=0)
    groups = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = list(loader)
        seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
        assert seeds.sort().values.equal(torch.arange(200))
        groups.append([tuple(batch.chunk.unique().tolist()) for batch in batches])
        assert all(len(group) == 2 for group in groups[-1])  # chunks of 20, batches of 40
        assert all(batch.num_nodes == 40 for batch in batches)
    assert groups[0] != groups[1] != groups[2]


@pytest.mark.parametrize("name", ["group", "x"])
def test_chunks_are_integers(name):
    with pytest.raises(ValueError, match=f"no array '{name}' of integers"):
        one(lgd.ClusterSampler(2, name))
