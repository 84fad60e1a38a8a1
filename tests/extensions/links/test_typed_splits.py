"""Splits of one edge type: nothing shows a held edge, nothing false is true, other types stay, saved ones are equal."""

from functools import cache
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.extensions.links.test_splits import Pairs, pairs
from tests.graph.typed.graphs import data_with

WRITES: EdgeType = ("author", "writes", "paper")
CITES: EdgeType = ("paper", "cites", "paper")
BACK: EdgeType = ("paper", "rev_writes", "author")


@cache
def graph() -> lgd.Graph:
    return lgd.citations(200, 2)


def turned(edges: Pairs) -> Pairs:
    return {(receiver, sender) for sender, receiver in edges}


def renamed(name: str) -> HeteroData:
    """The citations, where another type than `rev_writes` has the links of `writes` turned round."""
    data = graph().to_pyg()
    for kind, store in graph().to_pyg().edge_items():
        data[kind].time = store.time + 0  # of its own
    data["paper", name, "author"].edge_index = data[BACK].edge_index
    del data[BACK]
    return data


def test_what_is_held_is_nowhere_to_be_seen_and_the_rest_stays() -> None:
    whole, split = graph().to_pyg(), lgd.split_edges(graph(), 0.1, 0.2, negatives=7, edge_type=WRITES)
    rest = split.graph.to_pyg()
    held = {name: pairs(edges) for name, edges in split.edges.items()}
    every, kept = pairs(whole[WRITES].edge_index), pairs(rest[WRITES].edge_index)
    assert (split.reverse, split.undirected) == (BACK, False)
    assert [len(held[name]) for name in ("val", "test")] == [round(share * len(every)) for share in (0.1, 0.2)]
    assert kept | held["val"] | held["test"] == every and len(kept) + sum(map(len, held.values())) == len(every)
    assert pairs(rest[BACK].edge_index) == turned(kept)
    for name, edges in split.edges.items():
        false = split.negatives[name]
        assert false.shape == (edges.shape[1], 7) and 0 <= int(false.min()) <= int(false.max()) < 200
        assert not pairs(torch.stack([edges[0].repeat_interleave(7), false.view(-1)])) & every
    for kind, store in whole.edge_items():
        if kind in (WRITES, BACK):  # the arrays follow their edges: here, times are those of the papers
            day = rest["paper"].time[rest[kind].edge_index[kind.index("paper") // 2]]
            assert rest[kind].time.equal(day)
        else:
            assert rest[kind].edge_index.equal(store.edge_index) and rest[kind].time.equal(store.time)
    assert "train_mask" not in rest["paper"] and rest["paper"].y.equal(whole["paper"].y)
    split.graph.check_edges()


def test_edges_of_one_type_of_nodes_go_alone_or_in_both_directions() -> None:
    split = lgd.split_edges(graph(), 0.1, 0.1, negatives=3, edge_type=CITES)
    assert (split.reverse, split.undirected) == (None, False)
    data = graph().to_pyg()
    data[CITES].edge_index = torch.cat([data[CITES].edge_index, data[CITES].edge_index.flip(0)], 1)
    del data[CITES].time
    split = lgd.split_edges(lgd.Graph.from_pyg(data), 0.1, 0.1, negatives=3, edge_type=CITES)
    kept = pairs(split.graph.to_pyg()[CITES].edge_index)
    assert split.undirected and split.reverse is None and turned(kept) == kept
    for edges in split.edges.values():
        assert not (pairs(edges) | turned(pairs(edges))) & kept
    disputes = ("paper", "disputes", "paper")
    assert split.graph.to_pyg()[disputes].edge_index.equal(data[disputes].edge_index)


def test_copies_go_together_and_other_types_do_not_make_false_what_is_false() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 4, 6
    data["a", "to", "b"].edge_index = torch.tensor([[0, 0, 1, 2, 3, 3], [0, 0, 1, 2, 3, 3]])
    data["a", "near", "b"].edge_index = torch.cartesian_prod(torch.arange(4), torch.arange(6)).T
    split = lgd.split_edges(lgd.Graph.from_pyg(data), 0.25, 0.25, negatives=5, edge_type=("a", "to", "b"))
    kept = pairs(split.graph.to_pyg()["a", "to", "b"].edge_index)
    assert len(kept) == 2 and not kept & (pairs(split.edges["val"]) | pairs(split.edges["test"]))
    for name, edges in split.edges.items():  # all other nodes are false, though they are near
        assert set(split.negatives[name].flatten().tolist()) <= set(range(6)) - set(edges[1].tolist())
    assert split.graph.to_pyg()["a", "near", "b"].edge_index.shape == (2, 24)


def test_a_reverse_of_another_name_is_named() -> None:
    some, by = renamed("by"), ("paper", "by", "author")
    some["paper", "apart", "author"].edge_index = torch.tensor([[199], [99]])
    with pytest.raises(ValueError, match=r"'by', .* has (\d+) of the \1 links of .* reverse=None says"):
        lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES)
    split = lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by)
    kept = pairs(split.graph.to_pyg()[WRITES].edge_index)
    assert split.reverse == by and pairs(split.graph.to_pyg()[by].edge_index) == turned(kept)
    assert lgd.split_edges(graph(), negatives=2, edge_type=BACK).reverse == WRITES
    of_all = some[by].edge_index
    some[by].edge_index = of_all[:, of_all.shape[1] // 2 + 9 :]  # fewer than half, so these are others
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES).reverse is None
    some[by].edge_index = of_all[:, 5:]
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=by).reverse == by
    assert lgd.split_edges(lgd.Graph.from_pyg(some), negatives=2, edge_type=WRITES, reverse=None).reverse is None
    said = r"reverse=\('paper', 'apart', 'author'\) has none of the links of .* turned round: name the type that has"
    with pytest.raises(ValueError, match=said):
        lgd.split_edges(lgd.Graph.from_pyg(some), edge_type=WRITES, reverse=("paper", "apart", "author"))


def test_a_split_of_ones_own_is_looked_at_in_both_types() -> None:
    split = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES)
    own = lgd.LinkSplit(split.graph, split.edges, split.negatives, edge_type=WRITES)
    assert own.fingerprint == split.fingerprint
    by_name = lgd.split_edges(graph(), 0.1, 0.0, negatives=3, edge_type=WRITES, reverse=None).graph
    alone: dict[str, Any] = {"negatives": 3, "edge_type": WRITES, "reverse": None}
    by_links = lgd.split_edges(lgd.Graph.from_pyg(renamed("by")), 0.1, 0.0, **alone).graph
    among = r"val: \d+ of \d+ edges are among the graph's .*asked for what it was"
    for careless, message in ((by_name, among), (by_links, r"'by', .* links of .* turned round")):
        with pytest.raises(ValueError, match=message):
            lgd.LinkSplit(careless, split.edges, split.negatives, edge_type=WRITES)
    with pytest.raises(ValueError, match=among):
        lgd.LinkSplit(by_links, split.edges, split.negatives, edge_type=WRITES, reverse=("paper", "by", "author"))
    edges, false = torch.tensor([[99], [0]]), torch.tensor([[199]])
    lgd.LinkSplit(split.graph, {"val": edges}, {"val": false}, edge_type=WRITES)
    for odd in (edges + torch.tensor([[1], [0]]), edges + torch.tensor([[0], [200]])):
        with pytest.raises(ValueError, match=r"val: edges and negatives hold node ids, integers in \[0, \d+00\)"):
            lgd.LinkSplit(split.graph, {"val": odd}, {"val": false}, edge_type=WRITES)
    with pytest.raises(ValueError, match=r"\['paper/train_mask', .*which split nodes"):
        lgd.LinkSplit(graph(), {}, {}, edge_type=WRITES)


REFUSED_SPLITS: dict[str, tuple[dict[str, Any], str]] = {
    "no type": ({}, r"links of one edge type are predicted at a time: name it, as in edge_type=\('paper', 'cites'"),
    "another type": ({"edge_type": ("author", "cites", "paper")}, "edge_type must be one of .*, got"),
    "its name alone": ({"edge_type": "writes"}, r"got 'writes'\. Its three names, \('author', .*, say"),
    "a reverse that is none": ({"edge_type": WRITES, "reverse": CITES}, r"from 'paper' to 'author'"),
    "itself": ({"edge_type": CITES, "reverse": CITES}, "it must be another edge type"),
    "an unknown reverse": ({"edge_type": WRITES, "reverse": "back"}, "reverse must be one of .*, got 'back'"),
    "both directions": ({"edge_type": WRITES, "undirected": True}, "their ends are of two types: leave it out"),
    "both directions of citations": ({"edge_type": CITES, "undirected": True}, "some edges have no reverse"),
}


@pytest.mark.parametrize("case", REFUSED_SPLITS)
def test_useless_arguments_are_refused(case: str) -> None:
    options, message = REFUSED_SPLITS[case]
    with pytest.raises(ValueError, match=message):
        lgd.split_edges(graph(), **options)


def test_a_graph_without_types_has_no_edge_types() -> None:
    plain = lgd.communities(100, 2, num_features=1)
    for option in ({"edge_type": WRITES}, {"reverse": WRITES}):
        with pytest.raises(ValueError, match=r"is for a graph with types, and this one has none"):
            lgd.split_edges(plain, **option)  # type: ignore[arg-type]


def test_links_of_a_split_are_compared_with_other_edges_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    data = data_with(cites_time=1_700_000_000_000 + torch.arange(40))
    data[WRITES].time = 1_700_000_000 + torch.arange(data[WRITES].num_edges)
    split = lgd.split_edges(lgd.Graph.from_pyg(data), edge_type=WRITES, val=0.25, test=0.25, time="time")
    lgd.LinkDataModule(split)
    assert any(line.startswith("No seed sees edges of these types, by their time: paper__cites") for line in told)
