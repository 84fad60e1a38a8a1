"""The whole part as one batch."""

import gc
import weakref

import pytest
import torch

from lightning_gnn_dist import WholePartSampler
from lightning_gnn_dist.batches.source import assemble
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


@pytest.mark.parametrize("num_hops", [2, 3, 4])
def test_each_layer_computes_the_rows_that_the_next_one_reads(num_hops):
    graph = random_graph()
    batch = assemble(graph, whole(graph, num_hops=num_hops))
    receivers, senders = (edge_index_of(graph)[row] for row in (1, 0))
    needed = set(SEEDS.tolist())  # rows of the last layer, then of those before
    for block in reversed(batch.blocks):
        assert set(batch.n_id[: block.num_dst].tolist()) == needed
        read = {s for s, r in zip(senders.tolist(), receivers.tolist(), strict=True) if r in needed}
        assert sorted(batch.n_id[block.edge_index[0]].tolist()) == sorted(
            s for s, r in zip(senders.tolist(), receivers.tolist(), strict=True) if r in needed
        )
        needed |= read
    assert batch.blocks[0].num_dst < 60 or num_hops == 4
    assert batch.blocks[0].num_src == 60
