"""Laws of samplers whose batch is an induced subgraph."""

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from tests.loaders import over
from tests.samplers import of_extensions
from tests.sampling.reference import random_graph

PLACE = BatchKey(0, 1, 2)
SEEDS = torch.tensor([4, 190, 7, 60, 33])


GRAPH = random_graph(200, 1500, seed=2)
GRAPH.node_arrays["chunk"] = torch.arange(200) * 7 % 10
SAMPLERS: list[Sampler] = [lgd.ClusterSampler(2), lgd.ClusterSampler(1), *of_extensions("INDUCED")]
SAMPLERS += [lgd.WholePartSampler(2), lgd.WholePartSampler(3)]


def one(sampler: Sampler, graph: lgd.Graph = GRAPH, seeds: Tensor = SEEDS, place: BatchKey = PLACE) -> Sample:
    return sampler.sample_bulk(graph, [seeds], [place])[0]


def dense(of: Sample | lgd.Graph) -> Tensor:
    """How many edges run between positions of a batch, or nodes of a graph."""
    count = len(of.nodes) if isinstance(of, Sample) else of.num_nodes
    rows = torch.arange(len(of.indptr) - 1).repeat_interleave(of.indptr.diff())
    return torch.zeros(count, count).index_put_((rows, of.indices.long()), torch.ones(len(rows)), accumulate=True)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_all_edges_among_the_nodes_are_there(sampler):
    sample = one(sampler)
    rows = sample.indptr.numel() - 1
    assert rows == (5 if sampler.num_hops == 1 else sample.nodes.numel())
    assert sample.nodes.unique().numel() == sample.nodes.numel()
    expected = dense(GRAPH)[sample.nodes][:, sample.nodes]
    assert dense(sample)[:rows].equal(expected[:rows])
    assert sample.edge_ids is not None
    assert GRAPH.indices[sample.edge_ids].long().equal(sample.nodes[sample.indices.long()])


def test_a_batch_is_the_chunks_of_its_seeds_or_the_whole_part():
    sample, chunk = one(lgd.ClusterSampler(2)), GRAPH.node_arrays["chunk"]
    assert sample.nodes.sort().values.equal(torch.isin(chunk, chunk[SEEDS]).nonzero().view(-1))
    assert one(lgd.WholePartSampler(2)).nodes.sort().values.equal(torch.arange(200))


def test_a_whole_part_is_built_once_for_a_set_of_seeds():
    sampler, first = lgd.WholePartSampler(2), one(lgd.WholePartSampler(2))
    assert one(sampler, place=BatchKey(0, 7, 2)) is one(sampler, seeds=SEEDS.flip(0)) is first
    others = one(sampler, seeds=SEEDS[:2]), one(lgd.WholePartSampler(3)), one(sampler, random_graph(200, 1500, seed=2))
    assert all(other is not first for other in others)


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
