"""In torch operators, on any device, the batches are those of the compiled samplers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gnn_dist import FastGCNSampler, Graph, LadiesSampler, NeighborSampler, ShadowSampler
from lightning_gnn_dist.batches.source import GraphSource, assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory import device_sampler as module
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import DeviceSampler, drawn_there, draws_anywhere
from lightning_gnn_dist.extensions.larger_than_memory.device_stream import DeviceStream
from lightning_gnn_dist.extensions.links.link_sampler import HeldLinks, LinkSampler, OwnLinks
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.graph.graph import typed_graph
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.sampling.base import Sampler
from tests.loaders import over
from tests.samplers import graph_for_all
from tests.sampling.neighborhoods import CHANGES, assert_same, damaged
from tests.sampling.reference import random_graph


def weighted_graph(num_nodes: int, num_edges: int, seed: int) -> Graph:
    """A random graph with loops, repeated edges, isolated nodes, a hub, and weights, some of them 0."""
    graph = random_graph(num_nodes, num_edges, seed=seed, arrays=False)
    receivers = torch.arange(num_nodes).repeat_interleave(graph.degrees())
    hub = torch.stack([torch.randperm(num_nodes)[: num_nodes // 2], torch.full((num_nodes // 2,), 3)])
    edge_index = torch.cat([torch.stack([graph.indices.long(), receivers]), hub], dim=1)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(edge_index.size(1), generator=generator)
    weight[:: 3 + seed] = 0
    x = torch.randn(num_nodes, 4, generator=generator)
    return Graph.from_edge_index(edge_index, num_nodes, {"x": x}, {"edge_weight": weight})


GRAPHS = [weighted_graph(400, 5000, 0), weighted_graph(300, 500, 1), weighted_graph(60, 4000, 2)]
SAMPLERS: list[Sampler] = [
    *(
        NeighborSampler(numbers, replace=replace)
        for numbers in ([1], [3, 2], [15, 10, 5], [5, -1, 2], [-1, 60], [200, 1])
        for replace in (False, True)
    ),
    *(
        kind(numbers, weight, normalize)
        for kind in (LadiesSampler, FastGCNSampler)
        for numbers in ([20], [30, 20, 10], [400, 50])
        for weight in (None, "edge_weight")
        for normalize in (False, True)
    ),
]


@pytest.mark.parametrize("sampler", [NeighborSampler([-1, -1]), LadiesSampler([40])], ids=repr)
def test_edges_that_point_out_of_the_graph_are_refused(sampler: Sampler) -> None:
    for change in CHANGES:
        graph = damaged(graph_for_all(), *change)
        with pytest.raises(ValueError, match=r"indptr|indices"):
            DeviceSampler(sampler).sample_bulk(graph, [torch.arange(400)], [BatchKey(1, 2, 0)])


def bulk(graph: Graph, k: int) -> tuple[list[Tensor], list[BatchKey]]:
    """Batches of unequal size, the hub and isolated nodes among them."""
    seeds = [torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(i)) for i in range(k)]
    return [ids[: 5 * i + 1] for i, ids in enumerate(seeds)], [BatchKey(1, 2, 3 * i) for i in range(k)]


check_same = partial(assert_same, rtol=1e-6)


def on(device: str, graph: Graph) -> Graph:
    """A copy on a device, as the package makes its own: a user's graph lies in RAM."""
    nodes = {name: array.to(device) for name, array in graph.node_arrays.items()}
    edges = {name: array.to(device) for name, array in graph.edge_arrays.items()}
    rows = graph.indptr.to(device), graph.indices.to(device)
    return typed_graph(*rows, GraphTypes.of_one(*rows, nodes, edges))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_batches_are_those_of_the_compiled_sampler(sampler, device):
    same = DeviceSampler(sampler)
    assert isinstance(same, Sampler)
    assert same.num_hops == sampler.num_hops
    for graph in GRAPHS:
        found = same.sample_bulk(on(device, graph), *bulk(graph, 7))
        assert found[0].nodes.device.type == device
        check_same(sampler.sample_bulk(graph, *bulk(graph, 7)), found)


class Launches(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_more_batches_cost_few_launches_more():
    graph, counts = GRAPHS[0], []
    for k in (1, 8, 16):
        with Launches() as launches:
            DeviceSampler(NeighborSampler([15, 10, 5])).sample_bulk(graph, *bulk(graph, k))
        counts.append(launches.count)
    assert counts[2] - counts[1] < 8 * 20  # for checking seeds, and for arrays of its own, views included
    assert counts[2] < 2 * counts[0]


@pytest.mark.parametrize("sampler", SAMPLERS[4:6] + SAMPLERS[-20:], ids=repr)
def test_every_tensor_is_made_where_the_graph_is(sampler):
    (seeds, keys), graph = bulk(GRAPHS[0], 3), on("cpu", GRAPHS[0])  # a graph that no cache knows
    expected = sampler.sample_bulk(GRAPHS[0], seeds, keys)
    with torch.device("meta"):  # where tensors are made that nobody says a place for
        samples = DeviceSampler(sampler).sample_bulk(graph, seeds, keys)
        batches = [assemble(graph, sample) for sample in samples]
    check_same(expected, samples)
    assert all(batch.x.equal(graph.node_arrays["x"][batch.n_id]) for batch in batches)


def links(graph: Graph, sampler: NeighborSampler) -> list[LinkSampler]:
    """Both kinds of targets: edges of the graph, and others with false ends of their own."""
    generator = torch.Generator().manual_seed(0)
    held = torch.randint(graph.num_nodes, (2, graph.num_edges), generator=generator)
    false = torch.randint(graph.num_nodes, (graph.num_edges, 3), generator=generator)
    own = OwnLinks(2, Candidates(range(graph.num_nodes)), undirected=False)
    return [LinkSampler(sampler, own), LinkSampler(sampler, HeldLinks(held, false))]


def assert_same_links(sampler: LinkSampler, home: Graph, graph: Graph) -> None:
    seeds, keys = bulk(home, 5)  # positions of edges, or columns
    expected, found = sampler.sample_bulk(home, seeds, keys), drawn_there(sampler, home).sample_bulk(graph, seeds, keys)
    check_same(expected, found)
    for one, other in zip(expected, found, strict=True):
        assert one.extra.keys() == other.extra.keys() == {"edge_label_index", "edge_label"}
        assert all(array.equal(other.extra[name].cpu()) for name, array in one.extra.items())
        assert {array.device.type for array in other.extra.values()} == {graph.indices.device.type}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", [NeighborSampler([4, 3]), NeighborSampler([-1, 2])], ids=repr)
def test_links_are_those_of_the_compiled_sampler(nodes, device):
    for graph in GRAPHS:
        for sampler in links(graph, nodes):
            assert draws_anywhere(sampler)
            assert_same_links(sampler, graph, on(device, graph))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("padded", "numbers", "expected"), [(None, [5, 3, 2], 1), (None, [5, -1, 2], 2), (400, [2, 4], 2)]
)
@pytest.mark.parametrize("replace", [False, True])
def test_the_host_waits_once_for_a_bulk(padded, numbers, expected, replace, monkeypatch):
    notes = pytest.importorskip("pretend", reason="only pretended devices count how often the host waits").notes
    graph, same = on("cuda", GRAPHS[0]), DeviceSampler(NeighborSampler(numbers, replace=replace))
    if padded is not None:
        monkeypatch.setattr(module, "PADDED", padded)
    same.sample_bulk(graph, *bulk(graph, 7))  # checks the graph
    notes.clear()
    same.sample_bulk(graph, *bulk(graph, 7))
    assert sum(times for (kind, _, _), times in notes.items() if kind == "sync") == expected, notes


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 2]), LadiesSampler([9, 9]), FastGCNSampler([9])], ids=repr)
def test_a_bulk_is_its_batches_however_many_are_sampled_together(sampler, monkeypatch):
    graph, same = GRAPHS[0], DeviceSampler(sampler)
    seeds, keys = bulk(graph, 5)
    whole = same.sample_bulk(graph, seeds, keys)
    alone = [same.sample_bulk(graph, [ids], [key])[0] for ids, key in zip(seeds, keys, strict=True)]
    check_same(alone, whole)
    monkeypatch.setattr(module, "NODES_AT_ONCE", 2 * graph.num_nodes)
    check_same(alone, same.sample_bulk(graph, seeds, keys))
    assert same.sample_bulk(graph, [], []) == []


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 3, 2]), NeighborSampler([4, 3], replace=True)], ids=repr)
def test_batches_are_the_same_without_much_padding(sampler, monkeypatch):
    monkeypatch.setattr(module, "PADDED", 1)
    graph = GRAPHS[0]
    check_same(sampler.sample_bulk(graph, *bulk(graph, 7)), DeviceSampler(sampler).sample_bulk(graph, *bulk(graph, 7)))


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 2]), LadiesSampler([9, 9]), FastGCNSampler([9, 9])], ids=repr)
def test_nodes_without_edges(sampler):
    graph = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 6)
    for seeds in ([[5, 4], [2]], [[5], [4, 0]], [[3]]):
        ids, keys = [torch.tensor(nodes) for nodes in seeds], [BatchKey(0, 0, i) for i in range(len(seeds))]
        check_same(sampler.sample_bulk(graph, ids, keys), DeviceSampler(sampler).sample_bulk(graph, ids, keys))
    empty = Graph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 6)
    check_same(sampler.sample_bulk(empty, ids, keys), DeviceSampler(sampler).sample_bulk(empty, ids, keys))


def test_a_repeated_seed_is_refused():
    with pytest.raises(ValueError, match="node 7 is given 2 times"):
        DeviceSampler(NeighborSampler([2])).sample_bulk(GRAPHS[0], [torch.tensor([7, 1, 7])], [BatchKey(0, 0, 0)])


def test_other_samplers_are_refused():
    @dataclass(frozen=True)
    class Own(NeighborSampler):
        pass

    assert not draws_anywhere(links(GRAPHS[0], Own([2]))[0])
    for sampler in (ShadowSampler([2], num_hops=1), Own([2]), NeighborSampler([2], weight="edge_weight")):
        assert not draws_anywhere(sampler)
        with pytest.raises(TypeError, match="one of NeighborSampler without weight, LadiesSampler, FastGCNSampler"):
            DeviceSampler(sampler)


# Of batches on their way to a device none is overwritten.


@pytest.mark.gpu
@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
def test_no_batch_changes_while_others_are_made(made_on):
    cuda, sampler = torch.device("cuda", 0), NeighborSampler([10, 10])
    whole = random_graph(20_000, 400_000, seed=1)
    x = torch.arange(20_000.0)[:, None].expand(-1, 128).contiguous()
    graph = Graph(whole.indptr, whole.indices, {"x": x})
    options: dict[str, Any] = {"seed": 0, "bulk_size": 4, "num_threads": 2}
    plain = over(GraphSource(graph, sampler), torch.arange(10_000), 50, **options)
    where, drawn = (graph, sampler) if made_on == "cpu" else (on("cuda:0", graph), DeviceSampler(sampler))
    loader = over(GraphSource(where, drawn, stream=DeviceStream(cuda)), torch.arange(10_000), 50, **options)
    weight, is_right, kept = torch.randn(128, 128, device=cuda), [], []
    for _ in range(3):  # buffers come round
        for batch, same in zip(loader, plain, strict=True):
            for _ in range(20):  # the training stream is behind all the time
                weight = (weight @ weight).tanh()
            is_right.append((batch.x == batch.n_id[:, None]).all())
            kept.append((batch.n_id, same.n_id, batch.edge_index, same.edge_index))
    assert all(map(bool, is_right))
    assert all(ids.cpu().equal(same) and edges.cpu().equal(others) for ids, same, edges, others in kept)
