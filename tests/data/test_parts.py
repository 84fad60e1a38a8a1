"""Who holds what, and what parts are: what is read is what the graph has."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Held, Plan, Residency, default_period

ALL = [lgd.Fixed(), lgd.Rotate(), lgd.Redeal(40)]


@pytest.mark.parametrize("residency", ALL, ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_chunk_is_own_on_one_rank(residency: Residency, world_size: int) -> None:
    for super_epoch in range(7):
        held = [residency.held(super_epoch, rank, world_size, seed=3) for rank in range(world_size)]
        assert sorted(chunk for one in held for chunk in one.own) == list(range(residency.num_chunks(world_size)))
        assert all(not set(one.own) & set(one.others) for one in held)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_variable_chunk_is_on_one_rank_and_visits_every_other_one_once_a_sweep(world_size: int) -> None:
    ranks, sweep = range(world_size), lgd.Rotate().sweep(world_size)
    held = [[lgd.Rotate().held(s, rank, world_size, 0).others for s in range(sweep)] for rank in ranks]
    for rank, visited in enumerate(held):
        assert sorted(visited) == [(chunk,) for chunk in ranks if chunk != rank]
    for others in zip(*held, strict=True):
        assert sorted(others) == [(chunk,) for chunk in ranks]


@dataclass(frozen=True)
class Custom(lgd.Fixed):
    """One of two ranks' making."""

    ranks: tuple[Any, Any]

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Any:
        return self.ranks[rank]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0,), (1,)), r"Custom.held\(\) must return Held\(own, others\), got \(0,\)"),
        ((Held((0,)), Held((0,))), r"exactly one rank's own.*\[\(0,\), \(0,\)\]"),
        ((Held((0,), (0,)), Held((1,))), "both as own and as others"),
        ((Held((0,)), Held((2,))), "chunks from 0 to 1"),
    ],
)
def test_what_a_residency_says_is_checked(ranks: Any, message: str) -> None:
    plan = Plan(weighted_graph(), lgd.RandomPartitioner(), lgd.Holding(Custom(ranks)), 2, 0)
    with pytest.raises((TypeError, ValueError), match=message):
        plan.held(0)


def test_redealing_depends_on_seed_and_super_epoch_alone() -> None:
    deals = {(seed, s): lgd.Redeal(40).held(s, 1, 4, seed) for seed in range(3) for s in range(3)}
    assert len(set(deals.values())) == 9
    assert all(lgd.Redeal(40).held(s, 1, 4, seed) == held for (seed, s), held in deals.items())
    assert all(len(held.own) == 10 for held in deals.values())


@pytest.mark.parametrize(
    ("max_epochs", "sweep", "period"), [(50, 7, 7), (7, 7, 1), (3, 7, 1), (None, 7, 1), (-1, 7, 1), (100, 1, 100)]
)
def test_by_default_a_sweep_fits_the_run(max_epochs: Any, sweep: int, period: int) -> None:
    assert default_period(max_epochs, sweep) == period


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_supernodes \(3\) must be at least the number of ranks \(4\)"):
        lgd.Redeal(3).num_chunks(4)
    with pytest.raises(ValueError, match=r"every=2 says how often parts change, and with Fixed\(\) they never do"):
        lgd.Holding(every=2)


RANKS = 4


def weighted_graph(mean_degree: float = 10.0) -> lgd.Graph:
    graph = lgd.communities(500, 4, mean_degree=mean_degree, num_features=6, train_share=0.3, seed=2)
    weights = torch.rand(graph.num_edges, 2, generator=torch.Generator().manual_seed(0))
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_attr": weights})


def reader(graph: lgd.Graph, residency: Residency, rank: int = 1, **options: Any) -> Parts:
    partition = lgd.RandomPartitioner()(graph, residency.num_chunks(RANKS), 0)
    settings: dict[str, Any] = {"boundary": lgd.Isolated(), "coverage": None}
    return Parts(Plan(graph, partition, lgd.Holding(residency), RANKS, 0), rank, **(settings | options))


def edges_of(graph: lgd.Graph) -> set[tuple[int, int, float]]:
    """Every edge by the ids of the whole graph, with what it carries."""
    ids = graph.node_arrays.get("n_id", torch.arange(graph.num_nodes))
    receivers = ids.repeat_interleave(graph.degrees()).tolist()
    carried = graph.edge_arrays["edge_attr"][:, 1].tolist()
    return set(zip(ids[graph.indices.long()].tolist(), receivers, carried, strict=True))


def edges_among(graph: lgd.Graph, senders: Tensor, receivers: Tensor) -> set[tuple[int, int, float]]:
    allowed = set(senders.tolist()), set(receivers.tolist())
    return {edge for edge in edges_of(graph) if edge[0] in allowed[0] and edge[1] in allowed[1]}


@pytest.mark.parametrize("residency", [lgd.Fixed(), lgd.Rotate(), lgd.Redeal(12)], ids=repr)
def test_a_part_is_the_graph_among_its_nodes(residency: Residency) -> None:
    graph, seeds = weighted_graph(), set()
    for rank in range(RANKS):
        ours = reader(graph, residency, rank)
        held = residency.held(3, rank, RANKS, 0)
        own, nodes = ours.plan.nodes_of(held.own), ours.plan.nodes_of(held.own + held.others)
        part = ours.read(3).graph
        ids = part.node_arrays["n_id"]
        assert sorted(ids.tolist()) == nodes.tolist()
        assert edges_of(part) == edges_among(graph, nodes, nodes)
        assert torch.equal(part.node_arrays["x"], graph.node_arrays["x"][ids])
        learned = ids[part.split("train")]
        assert set(learned.tolist()) <= set(own.tolist())
        seeds |= set(learned.tolist())
    assert sorted(seeds) == graph.split("train").tolist()


@pytest.mark.parametrize("residency", [lgd.Rotate(), lgd.Redeal(12)], ids=repr)
@pytest.mark.parametrize("boundary", [lgd.Isolated(), lgd.Halo(2), lgd.Halo(2, bytes=5000)], ids=repr)
def test_a_switch_on_disk_gives_the_part_of_the_graph_in_ram(residency, boundary, tmp_path) -> None:
    graph = weighted_graph()
    graph.save(tmp_path / "graph")
    options: dict[str, Any] = {"boundary": boundary, "coverage": lgd.Coverage()}
    in_ram = reader(graph, residency, **options)
    on_disk = reader(lgd.Graph.open(tmp_path / "graph"), residency, **options, in_background=True)
    for super_epoch in range(5):
        switched, fresh = on_disk.at(super_epoch), in_ram.read(super_epoch).graph
        assert torch.equal(switched.indptr, fresh.indptr) and torch.equal(switched.indices, fresh.indices)
        assert switched.arrays.keys() == fresh.arrays.keys()
        assert all(torch.equal(switched.arrays[name], array) for name, array in fresh.arrays.items())
    on_disk.close()


@pytest.mark.parametrize("boundary", [lgd.Isolated(), lgd.Halo()], ids=repr)
def test_bytes_of_switches_are_those_of_nodes_and_of_their_rows(boundary: lgd.Isolated | lgd.Halo) -> None:
    graph, read = weighted_graph(), 0
    ours = reader(graph, lgd.Rotate(), boundary=boundary)
    per_node = sum(array[:1].nbytes for array in graph.node_arrays.values())
    for super_epoch in range(3):
        part, (residents, _) = ours.at(super_epoch), ours.plan.residents(1, super_epoch)
        edges = int(graph.degrees()[residents].sum())  # a halo of one hop receives nothing
        read += part.num_nodes * per_node + edges * (graph.indices.element_size() + 8)
        assert ours.figures["data/switch_bytes"] == read


def hops_around(graph: lgd.Graph, nodes: Tensor, hops: int) -> list[set[int]]:
    """The nodes, and those that are one hop away, two hops, and so on."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees()).tolist()
    edges = list(zip(graph.indices.tolist(), receivers, strict=True))
    found, seen = [set(nodes.tolist())], set(nodes.tolist())
    for _ in range(hops):
        found.append({sender for sender, receiver in edges if receiver in found[-1]} - seen)
        seen |= found[-1]
    return found


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_halo_has_every_edge_into_all_but_its_last_hop(hops: int) -> None:
    graph = weighted_graph(1.5)  # three hops do not reach everything
    ours = reader(graph, lgd.Fixed(), boundary=lgd.Halo(hops), coverage=lgd.Coverage())
    own = ours.plan.nodes_of((1,))
    part, expected = ours.read(0).graph, hops_around(graph, own, hops)
    sizes = [len(nodes) for nodes in expected]
    assert [set(ids.tolist()) for ids in part.node_arrays["n_id"].split(sizes)] == expected
    inner = torch.tensor(sorted(set().union(*expected[:-1])))
    assert edges_of(part) == edges_among(graph, torch.arange(graph.num_nodes), inner)
    assert torch.equal(part.node_arrays["x"], graph.node_arrays["x"][part.node_arrays["n_id"]])
    assert torch.equal(part.node_arrays["coverage"][: own.numel()], torch.ones(own.numel()))
    assert not part.node_arrays["train_mask"][own.numel() :].any()


def test_a_halo_ends_where_the_graph_does() -> None:
    graph = weighted_graph(1.5)  # three hops do not reach everything
    everything = reader(graph, lgd.Fixed(), boundary=lgd.Halo(1000)).read(0).graph
    assert everything.num_nodes == sum(map(len, hops_around(graph, reader(graph, lgd.Fixed()).plan.nodes_of((1,)), 50)))


def test_a_halo_stays_within_its_bytes_and_keeps_what_is_asked_for_most() -> None:
    graph = weighted_graph()
    per_node = sum(array[:1].numel() * array.element_size() for array in graph.node_arrays.values())
    own = reader(graph, lgd.Fixed()).plan.nodes_of((1,))
    part = reader(graph, lgd.Fixed(), boundary=lgd.Halo(bytes=40 * per_node + 3)).read(0).graph
    leaves = set(part.node_arrays["n_id"][own.numel() :].tolist())
    asked = dict.fromkeys(graph.halo(own).tolist(), 0)
    for sender, _, _ in edges_among(graph, graph.halo(own), own):
        asked[sender] += 1
    assert len(leaves) == 40
    assert min(asked[node] for node in leaves) >= max(asked[node] for node in asked.keys() - leaves)


def test_nearer_hops_come_first_within_the_bytes() -> None:
    graph = weighted_graph(1.5)  # three hops do not reach everything
    own = reader(graph, lgd.Fixed()).plan.nodes_of((1,))
    hops = hops_around(graph, own, 2)
    limit = (len(hops[1]) + 9) * sum(array[:1].nbytes for array in graph.node_arrays.values())
    ids = reader(graph, lgd.Fixed(), boundary=lgd.Halo(3, bytes=limit)).read(0).graph.node_arrays["n_id"]
    assert set(ids[own.numel() : own.numel() + len(hops[1])].tolist()) == hops[1]
    assert ids.numel() == sum(map(len, hops[:2])) + 9 and set(ids[-9:].tolist()) <= hops[2]
