"""Laws of samplers whose batch is an induced subgraph."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GraphConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource, assemble
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from tests.loaders import over
from tests.samplers import of_extensions
from tests.sampling.reference import random_graph

PLACE = BatchKey(0, 1, 2)
SEEDS = torch.tensor([4, 190, 7, 60, 33])


def with_chunks(graph: lgd.Graph, num_chunks: int = 10) -> lgd.Graph:
    chunk = torch.arange(graph.num_nodes) * 7 % num_chunks
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays | {"chunk": chunk}, graph.edge_arrays)


GRAPH = with_chunks(random_graph(200, 1500, seed=2))
SAMPLERS: list[Sampler] = [lgd.ClusterSampler(2), lgd.ClusterSampler(1), *of_extensions("INDUCED")]


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


@pytest.mark.parametrize("sampler", [*SAMPLERS, *of_extensions("APART")], ids=repr)
def test_a_model_on_blocks_is_the_model_on_all_edges(sampler):
    batch = assemble(GRAPH, one(sampler))
    torch.manual_seed(0)
    conv, x, y = GraphConv(8, 8), batch.x, batch.x
    for block in batch.blocks:
        x = conv((x, x[: block.num_dst]), block.weighted_adj if "edge_weight" in batch else block.adj)
        y = conv(y, batch.edge_index, batch.get("edge_weight"))
    assert torch.allclose(x, y[:5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_all_edges_among_the_nodes_are_there(sampler):
    sample = one(sampler)
    rows = sample.indptr.numel() - 1
    assert rows == (5 if sampler.num_hops == 1 else sample.nodes.numel())
    assert sample.nodes.unique().numel() == sample.nodes.numel()
    expected = whole_matrix(GRAPH)[sample.nodes][:, sample.nodes]
    assert dense(sample)[:rows].equal(expected[:rows])
    assert sample.edge_ids is not None
    assert GRAPH.indices[sample.edge_ids].long().equal(sample.nodes[sample.indices.long()])


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
