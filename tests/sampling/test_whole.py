"""The whole part as one batch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lightning_gnn_dist import WholePartSampler
from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from tests.sampling.neighborhoods import edge_index_of, edges_of
from tests.sampling.reference import random_graph

SEEDS = torch.tensor([44, 3, 58, 17])


def whole(graph, seeds=SEEDS, num_hops=2, epoch=0) -> Sample:
    return WholePartSampler(num_hops).sample_bulk(graph, [seeds], [BatchKey(0, epoch, 0)])[0]


@pytest.mark.parametrize("num_hops", [2, 3])
def test_it_has_every_node_and_every_edge_the_seeds_first(num_hops):
    graph = random_graph()
    sample = whole(graph, num_hops=num_hops)
    assert sample.nodes[:4].equal(SEEDS.sort().values)
    assert sample.nodes.sort().values.equal(torch.arange(60))
    expected = edge_index_of(graph)
    assert edges_of(sample).equal(expected[:, (expected[0] * 10**6 + expected[1]).argsort()])
    assert sum(sample.num_sampled_nodes) == 60
    assert sum(sample.num_sampled_edges) == graph.num_edges
    assert len(sample.num_sampled_nodes) == num_hops + 1
    assert len(sample.num_sampled_edges) == num_hops


def test_with_one_layer_only_the_seeds_receive():
    graph = random_graph()
    sample = whole(graph, num_hops=1)
    assert sample.indptr.numel() == 5
    assert sample.num_sampled_edges == [int(graph.degrees()[SEEDS].sum())]
    assert sample.num_sampled_nodes == [4, 56]


def test_arrays_follow_their_nodes_and_edges():
    graph = random_graph()
    batch = assemble(graph, whole(graph))
    assert batch.x.equal(graph.node_arrays["x"][batch.n_id])
    positions = whole(graph).edge_ids
    assert positions is not None
    assert batch.edge_attr.equal(graph.edge_arrays["edge_attr"][positions])
    assert graph.indices[positions].long().equal(batch.n_id[batch.edge_index[0]])


def test_it_is_built_once_for_a_set_of_seeds():
    graph = random_graph()
    first = whole(graph)
    assert whole(graph, epoch=7) is first
    assert whole(graph, SEEDS.flip(0)) is first
    assert whole(graph, SEEDS[:2]) is not first
    assert whole(graph, num_hops=3) is not first
    assert whole(random_graph()) is not first


def test_it_lives_no_longer_than_its_graph():
    graph = random_graph()
    nodes = weakref.ref(whole(graph).nodes)
    assert nodes() is not None
    del graph
    gc.collect()
    assert nodes() is None
