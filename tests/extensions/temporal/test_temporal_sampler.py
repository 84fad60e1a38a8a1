"""Laws of sampling by time: a seed's tree has no event that it must not see, and with all neighbours all others."""

import copy
import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, TemporalSampler
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.temporal import times as times_module
from lightning_gnn_dist.extensions.temporal.times import time_order
from lightning_gnn_dist.graph import rows
from tests.extensions.temporal.temporal_graphs import GRAPHS, KEY, plain, typed


class Event(NamedTuple):
    """An edge, as it stands in the graph."""

    position: int
    sender: int
    kind: int
    time: float | None


SIGHTS: list[dict[str, Any]] = [{}, {"equal": True}]


def events_into(graph: Graph, name: str) -> dict[int, list[Event]]:
    """The edges into each node, with their times: of the edge, else of the node that sends."""
    found, seen = defaultdict(list), Counter[int]()
    types = graph.types
    for receiver in range(graph.num_nodes):
        for position in range(int(graph.indptr[receiver]), int(graph.indptr[receiver + 1])):
            sender = int(graph.indices[position])
            kind = int(types.edge_type[position])
            if not types.have_names:
                of_edges, of_nodes, local = graph.edge_arrays, graph.node_arrays, sender
            else:
                of_edges = types.edge_arrays[types.edge_types[kind]]
                source = types.edge_types[kind][0]
                of_nodes, local = types.node_arrays[source], sender - types.nodes_of(source).start
            place = seen[kind]
            time = of_edges[name][place] if name in of_edges else of_nodes[name][local] if name in of_nodes else None
            found[receiver].append(Event(position, sender, kind, None if time is None else float(time)))
            seen[kind] += 1
    return found


def is_seen(event: Event, time: float, equal: bool = False) -> bool:
    if event.time is None:
        return True
    return event.time <= time if equal else event.time < time


def in_order(event: Event) -> tuple[float, int]:
    return 0.0 if event.time is None else event.time, event.position


def seeds_of(graph: Graph) -> tuple[Tensor, list[float]]:
    """All nodes of the first type, in some order, and their times."""
    times = graph.node_arrays["time"] if not graph.types.have_names else graph.types.node_arrays["a"]["time"]
    seeds = torch.randperm(len(times), generator=torch.Generator().manual_seed(0))
    return seeds, times[seeds].tolist()


def trees_of(sample: Sample) -> list[dict[int, list[int]]]:
    """For each tree, the positions of the edges drawn for each node; the trees share nothing."""
    tree_of, nodes = sample.extra["batch"], sample.nodes
    pairs = list(zip(tree_of.tolist(), nodes.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)  # a node stands in a tree once
    trees: list[dict[int, list[int]]] = [{} for _ in range(sample.num_sampled_nodes[0])]
    assert sample.edge_ids is not None
    for row in range(sample.indptr.numel() - 1):
        at = slice(int(sample.indptr[row]), int(sample.indptr[row + 1]))
        assert bool((tree_of[sample.indices[at].long()] == tree_of[row]).all())
        trees[int(tree_of[row])][int(nodes[row])] = sample.edge_ids[at].tolist()
    return trees


def by_hand(into: dict[int, list[Event]], seed: int, time: float, num_hops: int, **sight: Any) -> dict[int, list[int]]:
    """The events that a seed sees, of each node within so many hops but the last."""
    tree, frontier = dict[int, list[int]](), [seed]
    for _ in range(num_hops):
        senders = []
        for node in frontier:
            seen = [event for event in into[node] if is_seen(event, time, **sight)]
            tree[node] = sorted(event.position for event in seen)
            senders += [event.sender for event in seen]
        frontier = list(dict.fromkeys(node for node in senders if node not in tree))
    return tree


@pytest.mark.parametrize("sight", SIGHTS, ids=repr)
@pytest.mark.parametrize("name", GRAPHS)
def test_with_all_neighbours_a_tree_is_that_by_hand(name: str, sight: dict[str, Any]) -> None:
    graph, time = GRAPHS[name](0)
    into, (seeds, times) = events_into(graph, time), seeds_of(graph)
    sampler = TemporalSampler([-1, -1, -1], time, "time", **sight)
    (sample,) = sampler.sample_bulk(graph, [seeds], [KEY])
    assert sample.extra["seed_time"].tolist() == times
    found = [{node: sorted(edges) for node, edges in tree.items()} for tree in trees_of(sample)]
    assert found == [by_hand(into, *of, 3, **sight) for of in zip(seeds.tolist(), times, strict=True)]


@pytest.mark.parametrize("sight", SIGHTS, ids=repr)
@pytest.mark.parametrize("name", GRAPHS)
def test_no_tree_has_an_event_that_its_seed_must_not_see(name: str, sight: dict[str, Any]) -> None:
    """Of those that it may see, each node has as many of each type as it draws, or all; the latest are the latest."""
    graph, time = GRAPHS[name](1)
    into, (seeds, times) = events_into(graph, time), seeds_of(graph)
    for how in ({}, {"pick": "latest"}):
        sampler = TemporalSampler([2, 2, 2], time, "time", **sight, **how)
        (sample,) = sampler.sample_bulk(graph, [seeds], [KEY])
        for tree, seed_time in zip(trees_of(sample), times, strict=True):
            for node, drawn in tree.items():
                of_kind = defaultdict(list)
                for event in into[node]:
                    if is_seen(event, seed_time, **sight):
                        of_kind[event.kind].append(event)
                seen = [event.position for events in of_kind.values() for event in events]
                assert set(drawn) <= set(seen)
                latest = [sorted(events, key=in_order)[-2:] for events in of_kind.values()]
                if "pick" in how:
                    assert sorted(drawn) == sorted(event.position for events in latest for event in events)
                else:
                    assert len(drawn) == len(set(drawn)) == sum(map(len, latest))


def star(num_edges: int, num_hidden: int) -> Graph:
    """Two seeds at time 5 with one neighbour, whose row has so many edges before that time, and so many from it on."""
    sender = torch.arange(3, 3 + num_edges + num_hidden)
    edges = torch.cat([torch.tensor([[2, 2], [0, 1]]), torch.stack([sender, torch.full_like(sender, 2)])], 1)
    times = torch.cat([torch.tensor([0, 0]), torch.arange(num_edges) % 5, torch.arange(num_hidden) % 3 + 5])
    order = torch.randperm(times.numel(), generator=torch.Generator().manual_seed(0))
    at = torch.full((3 + num_edges + num_hidden,), 5)
    return Graph.from_edge_index(edges[:, order], at.numel(), {"at": at}, {"edge_time": times[order]})


@pytest.mark.parametrize("num", [1, 2])
def test_each_event_that_is_seen_is_drawn_as_often_whatever_other_trees_draw(num: int) -> None:
    """Chi-square tests: of single events, and of the pairs that the two seeds of a batch draw of their neighbour."""
    graph, seeds, num_batches = star(8, 9), torch.tensor([0, 1]), 2000
    sampler = TemporalSampler([1, num], "edge_time", "at")
    samples = sampler.sample_bulk(graph, [seeds] * num_batches, [BatchKey(0, 0, i) for i in range(num_batches)])
    drawn = torch.stack([sample.nodes[sample.indices[2:].long()].view(2, num) for sample in samples]) - 3
    assert int(drawn.max()) < 8
    assert chi_square(drawn.reshape(-1), 8) < 24.3  # 7 degrees of freedom: one in a thousand is above
    if num == 1:
        assert chi_square(drawn[:, 0, 0] * 8 + drawn[:, 1, 0], 64) < 103.4  # 63 degrees of freedom
    else:
        assert bool((drawn[..., 0] != drawn[..., 1]).all())


def chi_square(drawn: Tensor, num_kinds: int) -> float:
    counts, expected = torch.bincount(drawn, minlength=num_kinds).double(), drawn.numel() / num_kinds
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("name", GRAPHS)
def test_the_order_does_not_depend_on_how_much_is_read_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, time = GRAPHS[name](0)
    whole = time_order(graph, time)
    monkeypatch.setattr(rows, "EDGES_PER_PIECE", 13)
    monkeypatch.setattr(times_module, "EDGES_AT_ONCE", 7)
    pieces = time_order(Graph.from_pyg(graph.to_pyg(), time="time" if name == "types in order" else None), time)
    assert all((one == other).all() for one, other in zip(whole, pieces, strict=True))
    assert (whole.places.size == 0) == (name == "types in order")


@pytest.mark.parametrize("name", GRAPHS)
def test_times_that_change_give_another_order(name: str) -> None:
    """Whether an array is written to or replaced, of edges or of nodes, all draws are as of a graph that is new."""
    (changed, time), sampler = GRAPHS[name](0), TemporalSampler([-1, 3], GRAPHS[name](0)[1], "time")
    for arrays in all_arrays(changed):
        for key in {time, "time"} & set(arrays):
            for replaces in (False, True):
                sampler.sample_bulk(changed, [seeds_of(changed)[0]], [KEY])
                later = arrays[key].flip(0)
                if replaces:
                    arrays[key] = later
                else:
                    arrays[key].copy_(later[later.argsort()])
                new = copy.copy(changed)
                samples = [sampler.sample_bulk(of, [seeds_of(changed)[0]], [KEY])[0] for of in (changed, new)]
                assert trees_of(samples[0]) == trees_of(samples[1])
                assert samples[0].extra["seed_time"].tolist() == seeds_of(changed)[1]


def all_arrays(graph: Graph) -> list[dict[str, Tensor]]:
    types = graph.types
    if not types.have_names:
        return [graph.edge_arrays, graph.node_arrays]  # type: ignore[list-item]
    return [*types.edge_arrays.values(), *types.node_arrays.values()]  # type: ignore[list-item]


@pytest.mark.parametrize("graph", [plain(0, "edges"), typed(0, False), plain(0, "edges", num_edges=3000)], ids=repr)
def test_a_tree_does_not_depend_on_the_other_seeds_of_its_batch(graph: Graph) -> None:
    """So the slices of a correction batch draw what the whole batch draws, also if that needs more room."""
    seeds, _ = seeds_of(graph)
    num_neighbors = [3, 2] if graph.num_edges < 1000 else [-1, -1]
    sampler = TemporalSampler(num_neighbors, "time" if graph.types.have_names else "edge_time", "time")
    (whole,) = sampler.sample_bulk(graph, [seeds], [KEY])
    slices = sampler.sample_bulk(graph, seeds.tensor_split(9), [KEY] * 9)
    assert trees_of(whole) == [tree for sample in slices for tree in trees_of(sample)]
    assert graph.num_edges < 1000 or whole.indices.numel() > 20_480 > max(one.indices.numel() for one in slices)


def test_a_batch_tells_trees_and_times_as_pyg_does() -> None:
    graph, time = GRAPHS["types"](0)
    seeds, times = seeds_of(graph)
    (sample,) = TemporalSampler([3, 2], time).sample_bulk(graph, [seeds], [KEY])
    batch = assemble(graph, sample)
    assert batch["a"].seed_time.tolist() == times and batch["a"].batch[: seeds.numel()].equal(torch.arange(25))
    for (source, _, target), store in batch.edge_items():
        sender, receiver = store.edge_index
        assert batch[source].batch[sender].equal(batch[target].batch[receiver])
    assert all(store.batch.numel() == store.num_nodes for store in batch.node_stores)


def test_names_of_nodes_in_trees_may_need_more_than_32_bits() -> None:
    """Each node sends to the next one, and all trees of a batch are asked for at once: 2**13 of 2**20 nodes."""
    num_nodes = 1 << 20
    sender, time = torch.arange(num_nodes - 1), torch.ones(num_nodes, dtype=torch.uint8)
    graph = Graph.from_edge_index(torch.stack([sender, sender + 1]), num_nodes, {"at": time}, {"time": time[1:] - 1})
    seeds = torch.arange(num_nodes - (1 << 13), num_nodes).flip(0)
    (sample,) = TemporalSampler([-1, -1], "time", "at").sample_bulk(graph, [seeds], [KEY])
    assert sample.nodes.equal(torch.cat([seeds, seeds - 1, seeds - 2]))
    assert sample.extra["batch"].equal(torch.arange(1 << 13).repeat(3))


# Times compare exactly, and those that do not are refused, as are graphs and settings without any.


def num_seen(edge_time: Any, time: Any, **sampler: Any) -> int:
    """How many of two edges into it node 1 sees."""
    arrays = {"time": torch.as_tensor(time)}, {"edge_time": torch.as_tensor(edge_time)}
    graph = Graph.from_edge_index(torch.tensor([[0, 2], [1, 1]]), 3, *arrays)
    (sample,) = TemporalSampler([-1], "edge_time", "time", **sampler).sample_bulk(graph, [torch.tensor([1])], [KEY])
    return sample.num_sampled_edges[0]


LEAST, MOST, NAN = -(2**63), 2**63 - 1, math.nan
EXTREMES: list[tuple[Any, Any, dict[str, Any], int]] = [
    ([LEAST + 1, MOST], [0, MOST, 0], {"equal": True}, 2),
    ([LEAST + 1, MOST], [0, LEAST + 1, 0], {}, 0),
    ([2**53, 2**53 + 1], [0, 2**53 + 1, 0], {}, 1),  # as floating point numbers they are equal
]


@pytest.mark.parametrize(("edge_time", "time", "sampler", "count"), EXTREMES)
def test_extreme_times_compare_exactly(edge_time: Any, time: Any, sampler: dict[str, Any], count: int) -> None:
    assert num_seen(edge_time, time, **sampler) == count


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "fractions": (
        [1.5, 2.0],
        [1, 1, 1],
        {},
        r": data\.edge_time = \(1000 \* data\.edge_time\)\.round\(\)\.long\(\) .* in tables",
    ),
    "fractions of a node": ([1, 1], [NAN, 1.0, 1.0], {}, "time must hold one integer for each node"),
    "no time of pandas": ([1, LEAST], [1, 1, 1], {}, r"edge_time of edge 1 is -2\*\*63, which pandas writes"),
    "vectors": ([[1, 2], [1, 2]], [1, 1, 1], {}, "edge_time must hold one integer for each edge"),
    "flags": ([True, False], [1, 1, 1], {}, "edge_time must hold one integer for each edge"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_times_are_refused(case: str) -> None:
    edge_time, time, sampler, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        num_seen(edge_time, time, **sampler)


def test_errors_about_times_name_a_way_out_that_shows_nothing_new() -> None:
    """An event at 0 would lie before all seeds; a node of two times is two nodes."""
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, edge_time=torch.tensor([NAN]), time=torch.ones(2))
    later = "leave the edge out, or give it a time later than those of all seeds: 0 may lie before them"
    with pytest.raises(ValueError, match=rf"nan_to_num\(edge_time\)\. .* If these are times, {later}"):
        Graph.from_pyg(data)
    with pytest.raises(TypeError, match=r"Make it one: torch\.as_tensor\(\(\.\.\.\)\.astype\('int64'\)\)"):
        Graph.from_pyg(Data(edge_index=data.edge_index, time=np.zeros(2, "datetime64[s]"), num_nodes=2))
    with pytest.raises(ValueError, match=r"node 1 is given 2 times\. To ask for a node at several times, give it a"):
        TemporalSampler([2], "time").sample_bulk(plain(0, "nodes"), [torch.tensor([1, 1])], [KEY])


def mixed() -> Graph:
    data = typed(0, in_order=False).to_pyg()
    data["b"].time = data["b"].time.double()
    return Graph.from_pyg(data)


GRAPHS_WITHOUT: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "no such time": (lambda: plain(0, "edges"), {"time": "when"}, 0, "time names the array 'when', and neither edges"),
    "times of edges alone": (lambda: plain(0, "edges"), {"time": "edge_time"}, 0, "Nodes have no 'edge_time' to say"),
    "seeds of a type without": (
        lambda: typed(0, in_order=False),
        {"time": "time"},
        55,
        r"Nodes of type 'c' have no 'time' to say .* set it in data\['c'\] as a tensor .* of theirs as seed_time",
    ),
    "fractions": (mixed, {"time": "time"}, 0, "time must hold one integer for each node"),
    "unknown types": (
        lambda: typed(0, in_order=False),
        {"time": "time", "num_neighbors": {("a", "r0", "b"): [1]}},
        0,
        "no numbers for the edge type",
    ),
}


@pytest.mark.parametrize("case", GRAPHS_WITHOUT)
def test_graphs_without_the_times_are_refused(case: str) -> None:
    make, settings, seed, message = GRAPHS_WITHOUT[case]
    with pytest.raises(ValueError, match=message):
        TemporalSampler(**({"num_neighbors": [2]} | settings)).sample_bulk(make(), [torch.tensor([seed])], [KEY])
