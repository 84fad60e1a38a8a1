"""Draws that the nodes of a hop share: each node draws by the law of its own, and together they take fewer nodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import log
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.sampling.device import bytes_of_tables
from tests.conftest import module_of
from tests.graph.typed.graphs import EDGES, small
from tests.sampling.neighborhoods import PLACE, star
from tests.sampling.reference import draw, random_graph


def taken(word: int, senders: list[int], weights: list[float], fanout: int) -> list[int]:
    """The places in a piece of a row that are taken: those whose senders arrive first."""
    if fanout < 0 or len(senders) <= fanout:
        return list(range(len(senders)))
    arrivals, times = [], 0
    for i, (sender, weight) in enumerate(zip(senders, weights, strict=True)):
        times = times + 1 if i and senders[i - 1] == sender else 0
        arrivals.append(-log(((draw(word, sender, times) >> 11) + 1) * 2.0**-53) / max(weight, 1e-290))
    return sorted(range(len(senders)), key=arrivals.__getitem__)[:fanout]


def by_hand(
    graph: Graph, seeds: list[int], fanouts: Sequence[Sequence[int]], place: BatchKey, weight: str | None
) -> Any:
    """The nodes of a batch and its edges; ``fanouts`` has a number for each hop and edge type."""
    nodes, edges, begin, kinds = list(seeds), [], 0, graph.types.edge_type.tolist() or [0] * graph.num_edges
    weights = torch.ones(graph.num_edges) if weight is None else graph.edge_arrays[weight]
    for hop, of_hop in enumerate(fanouts):
        frontier, begin = nodes[begin:], len(nodes)
        for node in frontier:
            row = range(*graph.indptr[node : node + 2].tolist())
            for kind, fanout in enumerate(of_hop):
                piece = [edge for edge in row if kinds[edge] == kind]
                senders, likely = graph.indices[piece].tolist(), weights[piece].tolist()
                edges += [piece[i] for i in taken(int(key(*place, hop)), senders, likely, fanout)]
        nodes = list(dict.fromkeys([*nodes, *graph.indices[edges].tolist()]))
    return nodes, edges


def shared(graph: Graph, seeds: Sequence[int], numbers: Any, place: BatchKey = PLACE, **more: Any) -> Sample:
    sampler = NeighborSampler(numbers, shared=True, **more)
    return sampler.sample_bulk(graph, [torch.tensor(seeds, dtype=torch.int64)], [place])[0]


@pytest.mark.parametrize("weight", [None, "edge_weight"])
@pytest.mark.parametrize("fanouts", [[20], [4, -1, 3], [40, 40]])
def test_it_is_the_one_page_sampler(fanouts, weight):
    graph = random_graph(400, 6000, seed=1)  # some edges are there twice
    generator = torch.Generator().manual_seed(0)
    graph.edge_arrays["edge_weight"] = torch.rand(6000, generator=generator) * (torch.arange(6000) % 3 > 0)
    seeds = torch.randperm(400, generator=generator)[:90].tolist()
    sample = shared(graph, seeds, fanouts, weight=weight)
    nodes, edges = by_hand(graph, seeds, [[fanout] for fanout in fanouts], PLACE, weight)
    assert sample.nodes.tolist() == nodes
    assert sample.edge_ids is not None and sample.edge_ids.tolist() == edges


def test_of_types_too_which_share_the_numbers_of_a_sender():
    graph = Graph.from_pyg(small())
    numbers = {kind: [1 + number % 3, 2 - number % 2] for number, kind in enumerate(EDGES)}
    sample = shared(graph, range(6), numbers)
    nodes, edges = by_hand(graph, list(range(6)), np.array(list(numbers.values())).T.tolist(), PLACE, None)
    assert sample.nodes.tolist() == nodes
    assert sample.edge_ids is not None and sample.edge_ids.tolist() == edges


TRIALS = 4000
KEYS = [BatchKey(7, 0, batch) for batch in range(TRIALS)]


def counts_of(graph: Graph, fanout: int, **more: Any) -> torch.Tensor:
    """How often node 0 takes each edge under many keys."""
    samples = NeighborSampler([fanout], shared=True, **more).sample_bulk(graph, [torch.tensor([0])] * TRIALS, KEYS)
    return torch.bincount(
        torch.cat([edges for s in samples if (edges := s.edge_ids) is not None]), minlength=graph.num_edges
    )


def with_ids(graph: Graph) -> Graph:
    return Graph(
        graph.indptr, graph.indices, {}, {"edge_weight": torch.tensor([1.0, 2, 4, 0.5, 8] * 8)[: graph.num_edges]}
    )


@pytest.mark.parametrize(("degree", "fanout"), [(20, 5), (6, 5), (12, 1), (40, 33)])
def test_each_edge_is_taken_as_often_as_by_a_node_alone(degree, fanout):
    p = fanout / degree
    counts = counts_of(with_ids(star(degree)), fanout)
    assert int(counts.sum()) == fanout * TRIALS
    assert (counts / TRIALS - p).abs().max() < 4 * (p * (1 - p) / TRIALS) ** 0.5


def test_an_edge_that_is_there_three_times_counts_three_times():
    graph = Graph.from_edge_index(torch.tensor([[1, 1, 1, 2, 3], [0] * 5]), 4, {}, {"edge_weight": torch.ones(5)})
    assert (counts_of(graph, 2) / TRIALS - 0.4).abs().max() < 4 * (0.24 / TRIALS) ** 0.5


def test_by_weight_the_law_is_that_of_a_node_alone():
    weights = [1.0, 2.0, 4.0, 0.5, 8.0]
    samples = NeighborSampler([2], weight="edge_weight", shared=True).sample_bulk(
        with_ids(star(5)), [torch.tensor([0])] * TRIALS, KEYS
    )
    pairs = [tuple(sorted(sample.edge_ids.tolist())) for sample in samples if sample.edge_ids is not None]
    for a, b in combinations(range(5), 2):
        p, q = weights[a] / 15.5, weights[b] / 15.5
        chance = p * q / (1 - p) + q * p / (1 - q)
        assert abs(pairs.count((a, b)) / TRIALS - chance) < 4 * (chance * (1 - chance) / TRIALS) ** 0.5


def test_means_and_scaled_sums_of_drawn_rows_are_right_on_average():
    graph = random_graph(60, 900, seed=3)
    x = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keys, seeds = [BatchKey(0, i, 0) for i in range(3000)], torch.arange(55)
    found = []
    for sample in NeighborSampler([4], shared=True).sample_bulk(graph, [seeds] * 3000, keys):
        rows = x[sample.nodes[sample.indices.long()]]
        degrees = sample.indptr.diff()
        found.append(torch.segment_reduce(rows, "mean", lengths=degrees.long()))
    means = torch.stack(found)
    expected = torch.stack([x[graph.indices[a:b].long()].mean() for a, b in graph.indptr[:56].unfold(0, 2, 1).tolist()])
    assert ((means.mean(0) - expected).abs() < 4 * means.std(0) / 3000**0.5 + 1e-12).all()
    sums, degrees = means * graph.degrees()[:55], graph.degrees()[:55]  # each drawn edge stands for degree / 4 of them
    assert ((sums.mean(0) - expected * degrees).abs() < 4 * sums.std(0) / 3000**0.5 + 1e-12).all()


@pytest.mark.parametrize("weight", [None, "edge_weight"])
def test_nodes_of_a_hop_prefer_the_same_senders(weight):
    """Of two senders, no node takes only the first and another only the second, where edges weigh the same."""
    graph = random_graph(40, 800, seed=5)
    graph.edge_arrays["edge_weight"] = (1 + graph.indices % 3).float()
    rows = [set(graph.indices[a:b].tolist()) for a, b in graph.indptr.unfold(0, 2, 1).tolist()]
    single = Graph.from_edge_index(
        torch.tensor([(sender, node) for node, of_row in enumerate(rows) for sender in of_row]).T, 40
    )
    single.edge_arrays["edge_weight"] = (1 + single.indices % 3).float()
    sample = shared(single, range(40), [6], weight=weight)
    took = [set(part.tolist()) for part in sample.nodes[sample.indices.long()].tensor_split(sample.indptr[1:-1].long())]
    for one, other in combinations(range(40), 2):
        both = rows[one] & rows[other]
        assert not ((took[one] - took[other]) & both and (took[other] - took[one]) & both)


@pytest.mark.parametrize("name", ["amazon_computers", "musae_github"])
def test_batches_have_fewer_nodes_at_as_many_edges_of_a_node(shared_data, name):
    if not (shared_data / f"{name}.npz").is_file():
        pytest.skip("the folder of graphs (../shared/data) is not there")
    reader: Any = module_of(shared_data / "read.py")
    edge_index = torch.from_numpy(reader.read(shared_data / f"{name}.npz")["edge_index"]).long()
    graph = Graph.from_edge_index(edge_index, int(edge_index.max()) + 1)
    seeds = [torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(i))[:256] for i in range(4)]
    one, other = (
        NeighborSampler([15, 10], shared=together).sample_bulk(graph, seeds, [BatchKey(0, 0, i) for i in range(4)])
        for together in (False, True)
    )
    for alone, joint in zip(one, other, strict=True):
        assert alone.num_sampled_edges[0] == joint.num_sampled_edges[0]
        assert joint.nodes.numel() < alone.nodes.numel() / 1.15


def test_draws_differ_between_seeds_epochs_batches_and_hops():
    graph = star(1000)
    assert (
        len({tuple(shared(graph, [0], [10], BatchKey(*place)).nodes.tolist()) for place in np.ndindex(3, 3, 3)}) == 27
    )
    line = torch.stack([torch.arange(2, 1002).repeat(2), torch.arange(2).repeat_interleave(1000)])
    both = Graph.from_edge_index(torch.cat([line, torch.tensor([[1], [0]])], 1), 1002)  # 1 sends to 0
    sample = shared(both, [0], [1001, 10])
    first, second = shared(both, [1], [10]), sample.indices[sample.indptr[1] :][:10]
    assert set(first.nodes[1:].tolist()) != set(sample.nodes[second.long()].tolist())


def test_no_tables_are_made_of_weights():
    graph = with_ids(star(40))
    drawn = NeighborSampler([3], weight="edge_weight")
    assert bytes_of_tables(drawn, graph) == 8 * 40
    assert bytes_of_tables(NeighborSampler([3], weight="edge_weight", shared=True), graph) == 0


def test_with_replacement_they_are_refused():
    with pytest.raises(ValueError, match="shared draws take each neighbour once: leave replace or shared out"):
        NeighborSampler([3], replace=True, shared=True)
