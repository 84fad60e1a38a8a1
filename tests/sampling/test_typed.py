"""Laws of neighbour sampling per edge type: the one-page sampler, PyG's subgraph, and keys that decide all."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.utils import k_hop_subgraph

import lightning_gnn_dist as lgd
from lightning_gnn_dist.engine.apart import places_of, take_apart
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from tests.conftest import module_of
from tests.graph.typed.graphs import EDGES, small
from tests.samplers import of_extensions
from tests.sampling import reference
from tests.sampling.neighborhoods import PLACE
from tests.sampling.reference import random_graph

GRAPHS = ("acm", "aifb", "baseball", "f1", "openflights", "stackex_quantum", "umls")


def many_types(num_types: int, seed: int = 0, num_edges: int = 200) -> lgd.Graph:
    """Two node types and so many edge types, of so many edges each, some of them in few rows."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 80, 50
    for number in range(num_types):
        ends = ("a", f"r{number}", "b") if number % 3 else ("b", f"r{number}", "a")
        counts = [80 if end == "a" else 50 for end in ends[::2]]
        data[ends].edge_index = torch.stack([torch.randint(n, (num_edges,), generator=generator) for n in counts])
    return lgd.Graph.from_pyg(data)


def draw(graph: lgd.Graph, seeds: torch.Tensor, numbers: Any, key: BatchKey = PLACE, **more: Any) -> Sample:
    return lgd.NeighborSampler(numbers, **more).sample_bulk(graph, [seeds], [key])[0]


ONE_PAGE = [
    *((1, 200, 12, (3, 2)), (5, 200, 12, (1, 2)), (5, 200, 12, (-1, 1))),
    (4, 3000, 3, (45, 9)),  # pieces of 60 edges and of 37
    pytest.param(300, 200, 2, (1, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("num_types", "num_edges", "num_seeds", "numbers"), ONE_PAGE)
def test_it_is_the_one_page_sampler(num_types, num_edges, num_seeds, numbers, replace):
    graph, seeds = many_types(num_types, num_edges=num_edges), torch.arange(80)[:: 80 // num_seeds]
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


@pytest.mark.parametrize("name", GRAPHS)
def test_on_real_graphs_it_is_the_k_hop_subgraph(shared_data, name):
    if not (shared_data / "typed").is_dir():
        pytest.skip("the folder of typed graphs (../shared/data/typed) is not there")
    reader: Any = module_of(shared_data / "typed" / "read_typed.py")
    data = reader.to_hetero(name, split_types=True, reverse=True)
    kind = data.node_types[0]
    seeds = torch.randperm(data[kind].num_nodes, generator=torch.Generator().manual_seed(0))[:20]
    check_is_the_subgraph(data, kind, seeds, 2)


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
    graph.types.edge_type[:] = 0
    with pytest.raises(ValueError, match="changed after the graph was checked"):
        take_apart(graph, draw(graph, torch.arange(4), [-1, -1]))
    graph.types.edge_type[:] = 200
    with pytest.raises(ValueError, match="changed after the graph was checked"):
        draw(graph, torch.arange(4), [-1, -1])


W, C = ("author", "writes", "paper"), ("paper", "cites", "paper")
ALL = {kind: [2, 2] for kind in EDGES}
BAD: dict[str, tuple[Any, str]] = {
    "a pair": ({("author", "paper"): [2]}, r"must be by edge types, \(source, name, destination\), got \('author',"),
    "a name of two words": ({"author__paper": [2]}, "must be by edge types, .* got 'author__paper'"),
    "another length": ({W: [2], C: [2, 1]}, r"as many hops for each edge type, got lists of \[1, 2\]: write 0"),
    "twice": ({W: [1], "author__writes__paper": [1]}, "names the edge type .* twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_useless_numbers_are_refused(case):
    with pytest.raises(ValueError, match=BAD[case][1]):
        lgd.NeighborSampler(BAD[case][0])


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            lgd.NeighborSampler(ALL | {("venue", "x", "paper"): [1, 1]}),
            r"names the edge type \('venue', 'x', 'paper'\), and",
        ),
        (
            lgd.NeighborSampler({W: [2, 2]}),
            r"no numbers for the edge type .*: give it some, or \[0, 0\] to leave it out",
        ),
        (lgd.NeighborSampler([2], weight="edge_weight"), "weight .'edge_weight'. draws from graphs without types"),
        (
            lgd.LadiesSampler([8]),
            "LadiesSampler draws from graphs without types, and this one has 3 node types: use Neigh",
        ),
        (lgd.ClusterSampler(2), "ClusterSampler draws from graphs without types"),
    ],
)
def test_what_does_not_fit_the_types_is_refused(sampler, message):
    with pytest.raises(ValueError, match=message):
        sampler.sample_bulk(lgd.Graph.from_pyg(small()), [torch.arange(3)], [PLACE])


def test_numbers_by_type_need_types():
    with pytest.raises(ValueError, match=r"numbers for 5 edge types, and .* has no types: give one number per hop"):
        lgd.NeighborSampler(ALL).sample_bulk(random_graph(), [torch.arange(3)], [PLACE])
