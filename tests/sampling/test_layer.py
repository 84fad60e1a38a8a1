"""Laws of layer-wise sampling."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import FastGCNSampler, LadiesSampler, NeighborSampler
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.sampling.layer_wise import LayerSampler
from tests.sampling.neighborhoods import PLACE
from tests.sampling.reference import random_graph

KINDS = [LadiesSampler, FastGCNSampler]
SEEDS = torch.tensor([4, 90, 7, 60, 33])


GRAPH = random_graph(120, 1500, seed=3)
GRAPH.edge_arrays["edge_weight"] = torch.rand(1500, generator=torch.Generator().manual_seed(1))


def matrix(weight: str | None, power: int = 1) -> Tensor:
    """A, dense, in double precision. Of its entries a power may be taken, each edge by itself."""
    rows = torch.arange(GRAPH.num_nodes).repeat_interleave(GRAPH.degrees())
    values = 1 / GRAPH.degrees()[rows].double() if weight is None else GRAPH.edge_arrays[weight].double()
    dense = torch.zeros(GRAPH.num_nodes, GRAPH.num_nodes, dtype=torch.float64)
    return dense.index_put_((rows, GRAPH.indices.long()), values**power, accumulate=True)


def one(sampler: LayerSampler, seeds: Tensor = SEEDS) -> Sample:
    return sampler.sample_bulk(GRAPH, [seeds], [PLACE])[0]


def drawn(sample: Sample, hop: int) -> Tensor:
    """The nodes that the edges of a hop come from."""
    low = sum(sample.num_sampled_edges[:hop])
    return sample.nodes[sample.indices[low : low + sample.num_sampled_edges[hop]].long().unique()]


def chances(kind: type[LayerSampler], weight: str | None, frontier: Tensor, size: int) -> Tensor:
    """The probability that a node is drawn, by bisection."""
    squares = matrix(weight, power=2)
    reached = squares[frontier].sum(0)
    importance = reached if kind is LadiesSampler else squares.sum(0)
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        if (middle * importance).clamp(max=1).sum() < size:
            low = middle
        else:
            high = middle
    return (low * importance).clamp(max=1) * (reached > 0)


@pytest.mark.parametrize("weight", [None, "edge_weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_nodes_are_drawn_with_the_probability_that_their_weight_is_corrected_by(kind, weight):
    expected = chances(kind, weight, SEEDS, 20)
    counts = torch.zeros(120).double()
    keys = [BatchKey(5, 0, batch) for batch in range(3000)]
    for sample in kind([20], weight).sample_bulk(GRAPH, [SEEDS] * 3000, keys):
        counts[drawn(sample, 0)] += 1
    certain, possible = expected == 1, (expected > 0) & (expected < 1)
    assert counts[certain].eq(3000).all()
    assert counts[expected == 0].eq(0).all()
    p = expected[possible]
    statistic = ((counts[possible] - 3000 * p) ** 2 / (3000 * p * (1 - p))).sum()
    dof = float(possible.sum())
    assert dof > 10
    assert statistic < dof + 4 * (2 * dof) ** 0.5 + 10  # above the 0.9999 quantile of chi-square

    sample = one(kind([20], weight))
    rows = torch.arange(5).repeat_interleave(sample.indptr.diff())
    senders = sample.nodes[sample.indices.long()]
    sums = torch.zeros(5, 120).double()
    sums.index_put_((rows, senders), sample.edge_weight.double(), accumulate=True)
    chosen = senders.unique()
    assert torch.allclose(sums[:, chosen], (matrix(weight)[SEEDS] / expected)[:, chosen], rtol=1e-5)


@pytest.mark.parametrize("weight", [None, "edge_weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_where_all_fit_they_are_all_taken_with_the_weights_of_the_graph(kind, weight):
    sample = one(kind([1000, 1000], weight))
    every = NeighborSampler([-1, -1]).sample_bulk(GRAPH, [SEEDS], [PLACE])[0]
    for name in ("nodes", "indices", "indptr"):
        assert getattr(sample, name).equal(getattr(every, name))
    assert sample.num_sampled_nodes == every.num_sampled_nodes
    expected = GRAPH.edge_arrays["edge_weight"][every.edge_ids]
    if weight is None:
        degrees = every.indptr.diff()
        expected = 1 / degrees.repeat_interleave(degrees)
    assert torch.allclose(sample.edge_weight, expected)


@pytest.mark.parametrize("sampler", [LadiesSampler([30, 10, 20]), FastGCNSampler([60, 60, 60])], ids=repr)
def test_every_node_of_a_frontier_sees_all_drawn_nodes_among_its_neighbours(sampler):
    sample = one(sampler)
    assert sample.nodes.unique().numel() == sample.nodes.numel() == sum(sample.num_sampled_nodes)
    assert sample.indptr.numel() - 1 == sum(sample.num_sampled_nodes[:-1])
    ends = torch.tensor(sample.num_sampled_nodes).cumsum(0)
    for hop in range(3):
        chosen = set(drawn(sample, hop).tolist())
        for row in range(int(ends[hop]) - sample.num_sampled_nodes[hop], int(ends[hop])):
            low, high = sample.indptr[row : row + 2].tolist()
            node = int(sample.nodes[row])
            neighbours = GRAPH.indices[GRAPH.indptr[node] : GRAPH.indptr[node + 1]].tolist()
            found = sample.nodes[sample.indices[low:high].long()].tolist()
            assert found == [sender for sender in neighbours if sender in chosen]
            assert sample.indices[low:high].numel() == 0 or sample.indices[low:high].max() < ends[hop + 1]


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_rows_sum_to_those_of_the_matrix(kind):
    sampler = kind([15, 15], "edge_weight", normalize=True)
    sample = one(sampler)
    rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff())
    sums = torch.zeros(sample.indptr.numel() - 1).index_add_(0, rows, sample.edge_weight)
    full = matrix("edge_weight").sum(1)[sample.nodes[: sums.numel()]].float()
    has_edges = sample.indptr.diff() > 0
    assert torch.allclose(sums[has_edges], full[has_edges], rtol=1e-5)
    plain = one(replace(sampler, normalize=False))
    assert plain.indices.equal(sample.indices)
    assert not torch.allclose(plain.edge_weight, sample.edge_weight)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_seeds_does_not_matter(kind):
    left, right = one(kind([30, 20])), one(kind([30, 20]), seeds=SEEDS.flip(0))
    assert set(left.nodes.tolist()) == set(right.nodes.tolist())
    assert left.num_sampled_edges == right.num_sampled_edges
