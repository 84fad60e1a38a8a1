"""Laws of neighbour sampling."""

from collections import Counter
from collections.abc import Callable
from itertools import chain, product
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from torch_geometric.data import HeteroData
from torch_geometric.utils import k_hop_subgraph

import lightning_gnn_dist as lgd
from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine import sample as sample_module
from lightning_gnn_dist.engine.apart import places_of, take_apart
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.weighted import weights_of
from lightning_gnn_dist.sampling.base import Sampler
from tests.graph.typed.graphs import EDGES, small
from tests.samplers import of_extensions
from tests.sampling import reference
from tests.sampling.neighborhoods import PLACE, edge_index_of, one
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


RULES: list[dict[str, Any]] = [{}, {"replace": True}]
RULES += [{"replace": replace, "weight": f"edge_{kind}"} for kind in ("weight", "double") for replace in (False, True)]


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


USELESS = [
    (None, r"has no edge array 'edge_weight'.*\['edge_attr'\]"),
    (torch.full((240,), -1.0), r"holds -1\.0"),
    (torch.full((240,), torch.nan), "holds nan"),
    (torch.ones(240, 2), r"shape \(240, 2\)"),
]


@pytest.mark.parametrize(("weights", "message"), USELESS)
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
    star = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree).long()])
    graph, trials = Graph.from_edge_index(star, degree + 1), 4000
    places = [BatchKey(7, 0, batch) for batch in range(trials)]
    samples = NeighborSampler([fanout]).sample_bulk(graph, [torch.tensor([0])] * trials, places)
    counts = torch.bincount(torch.cat([sample.nodes[1:] for sample in samples]), minlength=degree + 1)[1:]
    expected = trials * fanout / degree
    statistic = ((counts - expected) ** 2).sum() / (expected * (1 - fanout / degree)) * (degree - 1) / degree
    # About chi-square with degree - 1 degrees of freedom, whose 0.9999 quantile this bounds from above.
    assert statistic < degree - 1 + 4 * (2 * (degree - 1)) ** 0.5 + 10


# The weights of some edges, and the one of all others: in a short row, and in two long ones, whose tables give the
# heaviest edge of the last one again and again.
ROWS = [([1.0, 2.0, 4.0, 0.5, 8.0], 0.0, 1), ([8.0, 4.0, 2.0], 1 / 32, 32), ([1000.0, 4.0, 2.0], 1 / 32, 32)]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("heavy", "light", "num_light"), ROWS)
def test_each_draw_is_by_weight_among_all_or_among_those_left(heavy, light, num_light, replace):
    trials, of_kinds = 8000, [*heavy, light]
    drawn = drawn_from_star(heavy + [light] * num_light, 3, trials, replace=replace)
    counts = Counter(tuple(min(edge, len(heavy)) for edge in edges) for edges in drawn)  # the light edges count as one
    statistic, unseen, cells = 0.0, 0.0, 0
    for kinds in product(range(len(of_kinds)), repeat=3):
        chance, left = 1.0, [1] * len(heavy) + [num_light]
        for kind in kinds:
            chance *= left[kind] * of_kinds[kind] / sum(map(mul, left, of_kinds))
            left[kind] -= not replace
        if chance * trials >= 5:
            statistic, cells = statistic + (counts[kinds] - chance * trials) ** 2 / (chance * trials), cells + 1
        else:
            unseen += chance
    assert cells > 2 and unseen < 0.05
    assert statistic < chi2.ppf(0.999, cells)
    lights = np.bincount([edge - len(heavy) for edges in drawn for edge in edges if edge >= len(heavy)], minlength=1)
    assert lights.any() == (light > 0) and (light == 0 or chisquare(lights).pvalue > 0.001)


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


# Laws of neighbour sampling per edge type: the one-page sampler, PyG's subgraph, and keys that decide all.


def many_types(num_types: int, num_edges: int = 200) -> HeteroData:
    """Two node types and so many edge types, of so many edges each, some of them in few rows."""
    generator, data = torch.Generator().manual_seed(0), HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 80, 50
    for number in range(num_types):
        ends = ("a", f"r{number}", "b") if number % 3 else ("b", f"r{number}", "a")
        counts = [80 if end == "a" else 50 for end in ends[::2]]
        data[ends].edge_index = torch.stack([torch.randint(n, (num_edges,), generator=generator) for n in counts])
    return data


def draw(graph: lgd.Graph, seeds: torch.Tensor, numbers: Any, key: BatchKey = PLACE, **more: Any) -> Sample:
    return lgd.NeighborSampler(numbers, **more).sample_bulk(graph, [seeds], [key])[0]


ONE_PAGE = [
    *((1, 200, 12, (3, 2)), (5, 200, 12, (1, 2)), (5, 200, 12, (-1, 1))),
    (4, 3000, 3, (45, 9)),  # pieces of 60 edges and of 37
    pytest.param(300, 200, 2, (1, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("num_types", "num_edges", "num_seeds", "numbers"), ONE_PAGE)
def test_by_types_it_is_the_one_page_sampler(num_types, num_edges, num_seeds, numbers, replace):
    graph = lgd.Graph.from_pyg(many_types(num_types, num_edges))
    seeds = torch.arange(80)[:: 80 // num_seeds]
    sample = draw(graph, seeds, numbers, replace=replace)
    fanouts = np.repeat(np.array(numbers)[:, None], num_types, 1)
    nodes, rows, edges = reference.sample(graph, seeds.tolist(), list(fanouts), PLACE, replace)
    assert sample.nodes.tolist() == nodes
    assert sample.edge_ids is not None and sample.edge_ids.tolist() == list(chain(*edges))
    assert sample.indices.tolist() == list(chain(*rows))
    assert sample.edge_kinds.equal(graph.types.edge_type[sample.edge_ids])


def test_numbers_of_each_type_are_the_one_page_samplers():
    graph = lgd.Graph.from_pyg(small())
    numbers = {kind: [number, 2 - number % 2] for number, kind in enumerate(EDGES)}  # 0 for the first one
    sample = draw(graph, torch.arange(6), numbers)
    nodes, _, edges = reference.sample(graph, list(range(6)), list(np.array(list(numbers.values())).T), PLACE)
    assert sample.nodes.tolist() == nodes
    assert sample.edge_ids is not None and sample.edge_ids.tolist() == list(chain(*edges))
    by_name = {"__".join(kind): of for kind, of in numbers.items()}
    assert draw(graph, torch.arange(6), by_name).nodes.tolist() == nodes
    assert hash(lgd.NeighborSampler(numbers)) == hash(lgd.NeighborSampler(by_name))


def check_is_the_subgraph(data: HeteroData, kind: str, seeds: torch.Tensor, num_hops: int) -> None:
    """With all neighbours, nodes, edges and rows of every type are those of PyG's k-hop subgraph."""
    graph = lgd.Graph.from_pyg(data, edge_ids=True, check_features=False)
    types = graph.types
    apart = take_apart(graph, draw(graph, seeds + types.nodes_of(kind).start, [-1] * num_hops))
    whole = data.to_homogeneous(node_attrs=[], edge_attrs=[], add_node_type=False)
    ids = seeds + types.nodes_of(kind).start
    nodes = k_hop_subgraph(ids, num_hops, whole.edge_index, num_nodes=graph.num_nodes)[0]
    inner = k_hop_subgraph(ids, num_hops - 1, whole.edge_index, num_nodes=graph.num_nodes)[0] if num_hops > 1 else ids
    for name, found in zip(types.node_types, apart.nodes, strict=True):
        of_type = nodes[types.type_of(nodes) == types.node_types.index(name)] - types.nodes_of(name).start
        assert found.sort().values.equal(of_type)
    into = torch.isin(whole.edge_index[1], inner)
    for number, (edge_type, rows) in enumerate(zip(types.edge_types, apart.rows, strict=True)):
        drawn = types.edge_arrays[edge_type]["e_id"][places_of(graph, number, rows.edge_ids)]
        expected = (into[whole.edge_type == number]).nonzero().view(-1)
        assert drawn.sort().values.equal(expected)
        source, _, target = (types.node_types.index(name) if i != 1 else 0 for i, name in enumerate(edge_type))
        receiver = torch.arange(rows.indptr.numel() - 1).repeat_interleave(rows.indptr.diff())
        ends = torch.stack([apart.nodes[source][rows.indices.long()], apart.nodes[target][receiver]])
        assert ends.equal(data[edge_type].edge_index[:, drawn])
        assert sum(rows.num_sampled) == drawn.numel()
    assert apart.nodes[types.node_types.index(kind)][: seeds.numel()].equal(seeds)


@pytest.mark.parametrize("num_hops", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_without_a_limit_it_is_the_k_hop_subgraph(num_hops, seed):
    check_is_the_subgraph(small(seed), "paper", torch.tensor([3, 0, 7]), num_hops)
    check_is_the_subgraph(small(seed), "venue", torch.tensor([2]), num_hops)
    data = lgd.citations(600, 2, seed=seed).to_pyg()
    check_is_the_subgraph(data, "author", torch.arange(40, 60), num_hops)
    check_is_the_subgraph(many_types(7), "a", torch.arange(9), num_hops)


@pytest.mark.slow
def test_without_a_limit_it_is_the_k_hop_subgraph_of_many_types_too():
    check_is_the_subgraph(many_types(300), "b", torch.arange(2), 1)


SUBGRAPHS = [lgd.WholePartSampler(2), *of_extensions("TWO_HOPS")]


@pytest.mark.parametrize("sampler", SUBGRAPHS)
def test_samplers_of_subgraphs_come_apart_too(sampler):
    graph = lgd.Graph.from_pyg(small())
    sample = sampler.sample_bulk(graph, [torch.arange(4)], [PLACE])[0]
    apart = take_apart(graph, sample)
    assert sample.edge_ids is not None
    flat = [graph.types.edge_types[kind] for kind in graph.types.edge_type[sample.edge_ids].tolist()]
    for kind, rows in zip(graph.types.edge_types, apart.rows, strict=True):
        assert rows.indices.numel() == flat.count(kind)
        source, target = (apart.nodes[graph.types.node_types.index(end)] for end in kind[::2])
        receiver = target[torch.arange(rows.indptr.numel() - 1).repeat_interleave(rows.indptr.diff())]
        senders = source[rows.indices.long()] + graph.types.nodes_of(kind[0]).start
        assert senders.equal(graph.indices[rows.edge_ids].long())
        rows_of_graph = torch.searchsorted(graph.indptr, rows.edge_ids, right=True) - 1
        assert (receiver + graph.types.nodes_of(kind[2]).start).equal(rows_of_graph)


def test_a_graph_that_was_damaged_is_refused():
    graph = lgd.Graph.from_pyg(small())
    for kind in (0, 200):
        graph.types.edge_type[:] = kind
        with pytest.raises(ValueError, match="changed after the graph was checked"):
            take_apart(graph, draw(graph, torch.arange(4), [-1, -1]))


W, C = ("author", "writes", "paper"), ("paper", "cites", "paper")
ALL = {kind: [2, 2] for kind in EDGES}
NO_TYPES = "draws from graphs without types"
SHOP = ("venue", "x", "paper")
REFUSED: list[tuple[Callable[[], Sampler], str]] = [
    (lambda: lgd.NeighborSampler({("a", "b"): [2]}), r"by edge types, \(source, name, destination\), got \('a',"),
    (lambda: lgd.NeighborSampler({"author__paper": [2]}), "must be by edge types, .* got 'author__paper'"),
    (lambda: lgd.NeighborSampler({W: [2], C: [2, 1]}), r"hops for each edge type, got lists of \[1, 2\]: write 0"),
    (lambda: lgd.NeighborSampler({W: [1], "author__writes__paper": [1]}), "names the edge type .* twice"),
    (lambda: lgd.NeighborSampler(ALL | {SHOP: [1, 1]}), r"names the edge type \('venue', 'x', 'paper'\), and"),
    (lambda: lgd.NeighborSampler({W: [2, 2]}), r"no numbers for the edge type .*: give it some, or \[0, 0\] to leave"),
    (lambda: lgd.NeighborSampler([2], weight="w"), f"weight .'w'. {NO_TYPES}"),
    (lambda: lgd.LadiesSampler([8]), f"LadiesSampler {NO_TYPES}, and this one has 3 node types: use Neigh"),
    (lambda: lgd.ClusterSampler(2), f"ClusterSampler {NO_TYPES}"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_numbers_and_samplers_that_do_not_fit_the_types_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make().sample_bulk(lgd.Graph.from_pyg(small()), [torch.arange(3)], [PLACE])


def test_numbers_by_type_need_types():
    with pytest.raises(ValueError, match=r"numbers for 5 edge types, and .* has no types: give one number per hop"):
        draw(random_graph(), torch.arange(3), ALL)
