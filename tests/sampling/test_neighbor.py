"""Laws of neighbour sampling."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import torch
from torch_geometric.utils import k_hop_subgraph

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine import sample as sample_module
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.base import Sampler
from tests.sampling import reference
from tests.sampling.neighborhoods import PLACE, edge_index_of, edges_of, one
from tests.sampling.reference import random_graph


def weighted(graph: Graph) -> Graph:
    """The graph with weights of several types, a third of them 0, and for every tenth node all of them."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(graph.num_edges, generator=generator) * (torch.arange(graph.num_edges) % 3 > 0)
    weight[(edge_index_of(graph)[1] % 10) == 0] = 0
    arrays = {"edge_weight": weight, "edge_double": weight.double().view(-1, 1)}
    return Graph(graph.indptr, graph.indices, graph.node_arrays, graph.edge_arrays | arrays)


@pytest.fixture(params=["direct", "hashed"])
def table(request, monkeypatch):
    """Both tables, whatever the size of the graph."""
    sample_module._THREAD.__dict__.clear()
    if request.param == "hashed":
        monkeypatch.setattr(sample_module, "DIRECT_NODES", 0)
    return request.param


RULES = [
    {},
    {"replace": True},
    *({"replace": replace, "weight": f"edge_{kind}"} for kind in ("weight", "double") for replace in (False, True)),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_is_the_one_page_sampler(table, rule, dtype):
    graph = weighted(random_graph(400, 6000, seed=1))
    graph = Graph(graph.indptr, graph.indices.to(dtype), graph.node_arrays, graph.edge_arrays)
    seeds = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:90].tolist()
    for fanouts in ([3], [20], [4, 2], [2, 1, 3], [4, -1, 3], [-1, 2], [40, 40]):
        sample = NeighborSampler(fanouts, **rule).sample_bulk(graph, [torch.tensor(seeds)], [PLACE])[0]
        nodes, rows, edges = reference.sample(graph, seeds, fanouts, PLACE, **rule)
        assert sample.nodes.tolist() == nodes
        assert sample.indptr.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
        assert sample.indices.tolist() == list(chain(*rows))
        assert sample.edge_ids is not None and sample.edge_ids.tolist() == list(chain(*edges))


@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_without_a_limit_it_is_the_k_hop_subgraph(table, undirected, num_hops, seed):
    graph = random_graph(60, 90, seed, undirected=undirected)
    seeds = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[:6]
    sample = one(graph, seeds.tolist(), *[-1] * num_hops)
    edge_index = edge_index_of(graph)
    nodes, _, _, _ = k_hop_subgraph(seeds, num_hops, edge_index, num_nodes=60)
    assert sample.nodes.sort().values.equal(nodes)
    assert sample.nodes[:6].equal(seeds)
    # Every node within num_hops - 1 of the seeds receives all its messages, the outermost receive none.
    inner, _, _, _ = k_hop_subgraph(seeds, num_hops - 1, edge_index, num_nodes=60) if num_hops > 1 else (seeds, 0, 0, 0)
    expected = edge_index[:, torch.isin(edge_index[1], inner)]
    assert edges_of(sample).equal(expected[:, (expected[0] * 10**6 + expected[1]).argsort()])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"has no edge array 'edge_weight'.*\['edge_attr'\]"),
        (torch.full((240,), -1.0), r"holds -1\.0"),
        (torch.full((240,), torch.nan), "holds nan"),
        (torch.ones(240, 2), r"shape \(240, 2\)"),
    ],
)
def test_useless_weights_are_refused(weights, message):
    graph = random_graph()
    arrays = {} if weights is None else {"edge_weight": weights}
    graph = Graph(graph.indptr, graph.indices, {}, graph.edge_arrays | arrays)
    with pytest.raises(ValueError, match=message):
        NeighborSampler([2], weight="edge_weight").sample_bulk(graph, [torch.tensor([1])], [PLACE])


def test_batches_are_the_same_in_every_process_and_version():
    # Weights trained with a seed depend on these numbers: to change them is to change results.
    receivers = torch.arange(20).repeat_interleave(10)
    senders = (receivers * 7 + torch.arange(10).repeat(20) * 3) % 20
    graph = Graph.from_edge_index(torch.stack([senders, receivers]), 20)
    sample = one(graph, [3, 1, 4], 3, 2, place=BatchKey(0, 0, 0))
    assert sample.nodes.tolist() == [3, 1, 4, 2, 7, 13, 5, 8, 0, 12, 9, 11, 17, 18, 19]
    assert sample.indices.tolist() == [3, 1, 4, 5, 6, 7, 0, 8, 9, 8, 10, 1, 9, 11, 12, 13, 1, 12, 14, 4, 0, 2, 3]


def test_the_arrays_are_small_and_the_batchs_own():
    graph = random_graph(300, 3000, seed=8)
    first = one(graph, [1, 2, 3], 5, 5)
    copies = [tensor.clone() for tensor in (first.nodes, first.indptr, first.indices)]
    one(graph, [250, 251, 252], 9, 9)
    assert all(map(torch.equal, copies, (first.nodes, first.indptr, first.indices)))
    assert (first.nodes.dtype, first.indptr.dtype, first.indices.dtype) == (torch.int64, torch.int32, torch.int32)
    assert one(random_graph(arrays=False), [1], 2).edge_ids is None


def test_the_table_is_cleared_before_its_numbers_run_out(table, monkeypatch):
    graph = random_graph(100, 2000, seed=10)
    expected = one(graph, [1, 2, 3], 4, 4)
    monkeypatch.setattr(sample_module, "ENTRY_LIMIT", 4 * sample_module.scratch_of_thread(np.int32).capacity)
    for _ in range(20):
        again = one(graph, [1, 2, 3], 4, 4)
        assert again.nodes.equal(expected.nodes)
        assert again.indices.equal(expected.indices)


def test_graphs_take_turns_in_one_thread():
    small, large = random_graph(50, 400, seed=11), random_graph(5000, 40_000, seed=12)
    expected = [one(graph, [1, 2, 3], 4, 4).nodes for graph in (small, large)]
    for _ in range(3):
        assert one(small, [1, 2, 3], 4, 4).nodes.equal(expected[0])
        assert one(large, [1, 2, 3], 4, 4).nodes.equal(expected[1])


def test_numbers_may_be_given_as_any_sequence():
    assert NeighborSampler([15, 10]) == NeighborSampler((15, 10)) == NeighborSampler((np.int64(15), 10))
    assert hash(NeighborSampler([15, 10])) == hash(NeighborSampler((15, 10)))
    assert NeighborSampler([15, -1, 3]).num_hops == 3
    assert isinstance(NeighborSampler([1]), Sampler)


def test_a_key_is_three_numbers():
    graph, seeds = random_graph(), torch.tensor([1, 2])
    sample = NeighborSampler([2]).sample_bulk(graph, [seeds], [(0, 1, 2)])[0]
    assert sample.nodes.equal(one(graph, [1, 2], 2).nodes)
