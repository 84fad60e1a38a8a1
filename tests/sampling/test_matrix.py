"""The literal matrix form draws the batches of the compiled samplers."""

from functools import partial

import numpy as np
import pytest
import torch

from lightning_gnn_dist import FastGCNSampler, Graph, LadiesSampler, NeighborSampler, RandomWalkSampler
from lightning_gnn_dist.engine import rng, tensors
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import checked_graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from tests.sampling import reference
from tests.sampling.neighborhoods import assert_same
from tests.sampling.reference import random_graph


def simple_graph(num_nodes: int = 300, num_edges: int = 5000) -> Graph:
    """A random graph without repeated edges, with weights, some of them 0."""
    graph = random_graph(num_nodes, num_edges, seed=2)
    receivers = torch.arange(num_nodes).repeat_interleave(graph.degrees())
    edge_index = torch.stack([graph.indices.long(), receivers]).unique(dim=1)
    weight = torch.rand(edge_index.size(1), generator=torch.Generator().manual_seed(0))
    weight[::5] = 0
    return Graph.from_edge_index(edge_index, num_nodes, {}, {"edge_weight": weight})


GRAPH = simple_graph()
SEEDS = [torch.randperm(300, generator=torch.Generator().manual_seed(i))[: 7 * i + 1] for i in range(5)]
PLACES = [BatchKey(1, 2, 3 * i) for i in range(5)]

SAMPLERS: list[Sampler] = [
    *(
        NeighborSampler(numbers, replace=replace, weight=weight)
        for numbers in ([3], [5, -1, 2], [-1, 30])
        for replace in (False, True)
        for weight in (None, "edge_weight")
    ),
    *(
        kind(numbers, weight, normalize)
        for kind in (LadiesSampler, FastGCNSampler)
        for numbers in ([20], [60, 30, 10], [400, 50])
        for weight in (None, "edge_weight")
        for normalize in (False, True)
    ),
]


check_same = partial(assert_same, rtol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_sampler_is_its_matrix_form(sampler):
    matrix = MatrixSampler(sampler)
    assert isinstance(matrix, Sampler)
    assert matrix.num_hops == sampler.num_hops
    check_same(sampler.sample_bulk(GRAPH, SEEDS, PLACES), matrix.sample_bulk(GRAPH, SEEDS, PLACES))


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_on_a_device_the_batches_are_those_of_the_cpu(sampler):
    arrays = {name: array.cuda() for name, array in GRAPH.edge_arrays.items()}
    graph = checked_graph(GRAPH.indptr.cuda(), GRAPH.indices.cuda(), {}, arrays)
    found = MatrixSampler(sampler).sample_bulk(graph, SEEDS, PLACES)
    assert found[0].nodes.is_cuda
    check_same(sampler.sample_bulk(GRAPH, SEEDS, PLACES), found)


def test_a_repeated_edge_is_refused():
    graph = Graph.from_edge_index(torch.tensor([[0, 0], [1, 1]]), 2)
    with pytest.raises(ValueError, match=r"holds an edge twice.*coalesce"):
        MatrixSampler(NeighborSampler([1])).sample_bulk(graph, [torch.tensor([1])], PLACES[:1])


@pytest.mark.parametrize("sampler", [3, NeighborSampler, RandomWalkSampler(2)], ids=repr)
def test_other_samplers_have_no_matrix_form(sampler):
    with pytest.raises(TypeError, match="NeighborSampler, LadiesSampler or FastGCNSampler, got"):
        MatrixSampler(sampler)


def test_tensors_draw_the_words_of_kernels():
    keys = tensors.keys_of(PLACES, 4, torch.device("cpu"))[3, :-1]
    nodes, steps = torch.arange(40, 90), torch.arange(3)
    words = tensors.draw(keys[:, None, None], nodes[:, None], steps)
    expected = [
        [[reference.draw(int(rng.key(*place, 3)), int(node), i) for i in range(3)] for node in nodes]
        for place in PLACES
    ]
    assert (words.numpy().view("uint64") == np.array(expected, np.uint64)).all()
    assert tensors.draw(keys, nodes[:5], 2).equal(words[torch.arange(5), torch.arange(5), 2])
    flat = [word for row in expected for cell in row for word in cell]
    assert tensors.unit(words).view(-1).tolist() == [reference.unit(word) for word in flat]
    assert tensors.below(words, torch.tensor(9)).view(-1).tolist() == [((word >> 32) * 9) >> 32 for word in flat]
