"""Laws of neighbour sampling."""

from collections import Counter
from itertools import chain, combinations, product
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine import sample as sample_module
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.engine.weighted import weights_of
from lightning_gnn_dist.sampling.base import Sampler
from tests.sampling import reference
from tests.sampling.neighborhoods import PLACE, edge_index_of, one, star
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


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_it_is_the_one_page_sampler(table, rule):
    graph = weighted(random_graph(400, 6000, seed=1))
    indices = graph.indices.to(torch.int64 if table == "hashed" else torch.int32)
    graph = Graph(graph.indptr, indices, graph.node_arrays, graph.edge_arrays)
    seeds = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:40].tolist()
    for fanouts in ([3], [20], [4, 2], [2, 1, 3], [4, -1, 3], [-1, 2], [40, 40]):
        sample = NeighborSampler(fanouts, **rule).sample_bulk(graph, [torch.tensor(seeds)], [PLACE])[0]
        nodes, rows, edges = reference.sample(graph, seeds, fanouts, PLACE, **rule)
        assert sample.nodes.tolist() == nodes
        assert sample.indptr.tolist() == np.cumsum([0, *map(len, rows)]).tolist()
        assert sample.indices.tolist() == list(chain(*rows))
        assert sample.edge_ids is not None and sample.edge_ids.tolist() == list(chain(*edges))


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


def test_numbers_may_be_given_as_any_sequence():
    assert NeighborSampler([15, 10]) == NeighborSampler((15, 10)) == NeighborSampler((np.int64(15), 10))
    assert hash(NeighborSampler([15, 10])) == hash(NeighborSampler((15, 10)))
    assert NeighborSampler([15, -1, 3]).num_hops == 3
    assert isinstance(NeighborSampler([1]), Sampler)


def drawn_from_star(weights: list[float], fanout: int, trials: int, *, replace: bool) -> list[list[int]]:
    """What the centres of a hundred equal stars draw from edges with these weights, in many batches."""
    degree = len(weights)
    indptr = torch.cat([torch.arange(101) * degree, torch.full((degree,), 100 * degree)])
    graph = Graph(indptr, torch.arange(100, 100 + degree).repeat(100), {}, {"edge_weight": torch.tensor(weights * 100)})
    sampler = NeighborSampler([fanout], replace=replace, weight="edge_weight")
    places = [BatchKey(3, 0, batch) for batch in range(trials // 100)]
    samples = sampler.sample_bulk(graph, [torch.arange(100)] * len(places), places)
    edges = torch.cat([sample.edge_ids for sample in samples if sample.edge_ids is not None])
    return (edges.view(-1, fanout) % degree).tolist()


@pytest.mark.parametrize(("degree", "fanout"), [(20, 5), (40, 35)])
def test_every_neighbour_is_as_likely_as_any_other(degree, fanout):
    graph, trials = star(degree), 4000
    places = [BatchKey(7, 0, batch) for batch in range(trials)]
    samples = NeighborSampler([fanout]).sample_bulk(graph, [torch.tensor([0])] * trials, places)
    counts = torch.bincount(torch.cat([sample.nodes[1:] for sample in samples]), minlength=degree + 1)[1:]
    expected = trials * fanout / degree
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - fanout / degree)) * (degree - 1) / degree
    # About chi-square with degree - 1 degrees of freedom, whose 0.9999 quantile this bounds from above.
    assert statistic < degree - 1 + 4 * (2 * (degree - 1)) ** 0.5 + 10


WEIGHTS = [1.0, 2.0, 4.0, 0.5, 8.0, 0.0]


def test_with_replacement_edges_come_in_proportion_to_their_weights():
    drawn = drawn_from_star(WEIGHTS, 7, 4000, replace=True)
    counts = np.bincount(list(chain(*drawn)), minlength=6)
    expected = 7 * 4000 * np.array(WEIGHTS) / sum(WEIGHTS)
    assert counts[5] == 0
    assert ((counts - expected)[:5] ** 2 / expected[:5]).sum() < 18.5  # 0.999 quantile, 4 degrees of freedom
    pairs = np.bincount([5 * a + b for a, b, *_ in drawn], minlength=25)[:25]  # the draws are independent
    expected = 4000 * np.outer(WEIGHTS[:5], WEIGHTS[:5]).ravel() / sum(WEIGHTS) ** 2
    assert ((pairs - expected) ** 2 / expected).sum() < 51.2  # 0.999 quantile, 24 degrees of freedom


def test_without_replacement_each_is_drawn_by_weight_among_those_left():
    drawn = drawn_from_star(WEIGHTS, 2, 8000, replace=False)
    total, counts, expected = sum(WEIGHTS), [], []
    for a, b in combinations(range(5), 2):
        counts.append(sum(sorted(pair) == [a, b] for pair in drawn))
        p, q = WEIGHTS[a] / total, WEIGHTS[b] / total
        expected.append(8000 * (p * q / (1 - p) + q * p / (1 - q)))
    assert sum(counts) == 8000
    statistic = ((np.array(counts) - expected) ** 2 / expected).sum()
    assert statistic < 27.9  # 0.999 quantile, 9 degrees of freedom


@pytest.mark.parametrize("heaviest", [8.0, 1000.0])  # the tables of long rows give the second one again and again
def test_long_rows_draw_by_weight_among_those_left_too(heaviest):
    weights, trials = [heaviest, 4.0, 2.0] + [1 / 32] * 32, 8000
    drawn = drawn_from_star(weights, 3, trials, replace=False)
    counts = Counter(tuple(min(edge, 3) for edge in edges) for edges in drawn)  # the light edges count as one
    statistic, unseen, cells = 0.0, 0.0, 0
    for kinds in product(range(4), repeat=3):
        left, chance, of_kind = sum(weights), 1.0, [1, 1, 1, 32]
        for kind in kinds:
            chance *= of_kind[kind] * weights[kind] / left
            left, of_kind[kind] = left - weights[kind], of_kind[kind] - 1
        if chance * trials >= 5:
            statistic, cells = statistic + (counts[kinds] - chance * trials) ** 2 / (chance * trials), cells + 1
        else:
            unseen += chance
    assert cells > 6 and unseen < 0.02
    assert statistic < chi2.ppf(0.999, cells)
    light = np.bincount([edge - 3 for edges in drawn for edge in edges if edge >= 3], minlength=32)
    assert chisquare(light).pvalue > 0.001


def test_edges_of_weight_0_come_when_no_others_are_left():
    for drawn in drawn_from_star([0.0, 1.0, 0.0, 2.0, 0.0], 3, 200, replace=False):
        assert {1, 3} < set(drawn) and len(set(drawn)) == 3
    counts = np.bincount(list(chain(*drawn_from_star([0.0] * 5, 2, 3000, replace=True))), minlength=5)
    assert ((counts - 1200) ** 2 / 1200).sum() < 18.5


@pytest.mark.parametrize("replace", [False, True])
def test_weights_in_a_file_draw_the_same_and_take_no_memory(replace: bool, tmp_path: Path) -> None:
    graph = random_graph(100, 4000)
    graph.edge_arrays["weight"] = torch.randn(4000, generator=torch.Generator().manual_seed(0)).mul_(2).exp_()
    graph.save(tmp_path / "graph")
    sampler, mapped = NeighborSampler([9, 4], replace=replace, weight="weight"), Graph.open(tmp_path / "graph")
    samples = [sampler.sample_bulk(one, [torch.arange(20)], [PLACE])[0] for one in (graph, mapped)]
    assert samples[0].edge_ids is not None and samples[1].edge_ids is not None
    assert samples[0].edge_ids.equal(samples[1].edge_ids)
    assert weights_of(graph, "weight", draws=True).table.nbytes == 8 * 4000
    assert weights_of(mapped, "weight", draws=True).table.nbytes == 0


def test_weights_that_have_changed_are_drawn_by() -> None:
    weights = [torch.randn(4000, generator=torch.Generator().manual_seed(seed)).exp() for seed in (0, 1)]
    changed, fresh = random_graph(100, 4000), random_graph(100, 4000)
    changed.edge_arrays["weight"], fresh.edge_arrays["weight"] = weights[0], weights[1].clone()
    sampler = NeighborSampler([9, 4], weight="weight")
    before = sampler.sample_bulk(changed, [torch.arange(20)], [PLACE])[0].edge_ids
    weights[0].copy_(weights[1])
    after, expected = (sampler.sample_bulk(one, [torch.arange(20)], [PLACE])[0].edge_ids for one in (changed, fresh))
    assert before is not None and after is not None and expected is not None
    assert after.equal(expected) and not after.equal(before)
