"""Splits of edges: nothing is lost, nothing leaks, a saved one is the same, and what is refused."""

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.edge_model import BACK, NODES, RATES, Rater, rated, typed_ratings
from tests.extensions.links.link_model import edges_of
from tests.extensions.links.ratings import KINDS, data_of, graph_of, held_of, labelled, split_of, store_of
from tests.graph.storage.test_store import Damage, another_kind, array, damaged, entry
from tests.graph.storage.test_store import graph_of as any_graph
from tests.placing import most_seeds

Pairs = set[tuple[int, int]]


def pairs(edges: Tensor | tuple[Tensor, Tensor]) -> Pairs:
    return set(zip(edges[0].tolist(), edges[1].tolist(), strict=True))


@KINDS
def test_each_labelled_edge_is_held_or_learned_and_nothing_held_is_shown(kind: EdgeType | None) -> None:
    split = split_of(kind)
    val, test, train = held_of(split, "val"), held_of(split, "test"), labelled(split.graph, kind)
    assert val + test + train == labelled(graph_of(kind), kind) and val and test
    edges = store_of(split.graph, kind)[0]
    there = set(map(tuple, edges.T.tolist()))
    for held in split.edges.values():
        for sender, receiver in held.T.tolist():
            both = {(sender, receiver)} | ({(receiver, sender)} if kind is None else set())
            assert not both & there
    if kind is not None:
        back = split.graph.to_pyg()[BACK]
        assert split.reverse == BACK and "rating" not in back
        assert not set(back.mark.tolist()) & {mark for mark, _ in val + test}


def undirected() -> lgd.Graph:
    edges = torch.randint(30, (2, 120), generator=torch.Generator().manual_seed(1))
    edges = edges[:, edges[0] < edges[1]]
    value = torch.randint(3, (edges.shape[1],))
    both = torch.cat([edges, edges.flip(0)], 1)
    return lgd.Graph.from_pyg(Data(edge_index=both, edge_class=value.repeat(2), num_nodes=30))


def test_of_an_undirected_graph_one_direction_of_each_pair_is_asked_for() -> None:
    graph = undirected()
    split = lgd.split_edges(graph, 0.2, 0.2, labels="edge_class")
    assert split.undirected
    batches = list(data_of(split, batch_size=10_000).train_dataloader())
    asked = batches[0].n_id[batches[0].edge_label_index]
    pairs = Counter(tuple(sorted(pair)) for pair in asked.T.tolist())
    assert len(batches) == 1 and 2 * sum(pairs.values()) == split.graph.num_edges
    assert bool((asked[0] < asked[1]).any()) and bool((asked[0] > asked[1]).any())
    graph.edge_arrays["edge_class"][0] += 1
    assert not lgd.split_edges(graph, 0.2, 0.2, labels="edge_class").undirected
    with pytest.raises(ValueError, match=r"directions of some edge differ in \['edge_class'\]"):
        lgd.split_edges(graph, 0.2, 0.2, labels="edge_class", undirected=True)


def test_both_directions_carry_the_same_rows_as_often() -> None:
    pairs = [(0, 1), (0, 1), (1, 0), (1, 0), (2, 3), (3, 2)]
    for label, attr, same in (
        ([1, 2, 1, 2, 3, 3], [1, 2, 1, 2, 0, 0], True),
        ([1, 2, 2, 1, 3, 3], [1, 2, 2, 1, 0, 0], True),
        ([1, 2, 1, 2, 3, 3], [1, 2, 2, 1, 0, 0], False),  # each array alone is the same
        ([1, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0], False),
    ):
        arrays = {"edge_class": torch.tensor(label), "edge_attr": torch.tensor(attr).float()[:, None]}
        graph = lgd.Graph.from_pyg(Data(edge_index=torch.tensor(pairs).T, num_nodes=4, **arrays))
        assert lgd.split_edges(graph, 0, 0, labels="edge_class").undirected == same
        if not same:
            with pytest.raises(ValueError, match=r"directions of some edge differ in .*edge_class"):
                lgd.split_edges(graph, 0, 0, labels="edge_class", undirected=True)
    once = lgd.Graph.from_pyg(Data(edge_index=torch.tensor(pairs[1:]).T, num_nodes=4, edge_class=torch.ones(5)))
    assert not lgd.split_edges(once, 0, 0, labels="edge_class").undirected
    with pytest.raises(ValueError, match="how often they are there"):
        lgd.split_edges(once, 0, 0, labels="edge_class", undirected=True)


@KINDS
def test_a_saved_split_is_the_same(kind: EdgeType | None, tmp_path: Path) -> None:
    split = split_of(kind)
    split.save(tmp_path / "split")
    again = lgd.LinkSplit.open(tmp_path / "split")
    assert again.fingerprint == split.fingerprint
    assert held_of(again, "test") == held_of(split, "test")
    first, other = (next(iter(data_of(s).train_dataloader())) for s in (split, tmp_path / "split"))
    assert Rater(edge_type=kind).targets(first).edge_label.equal(Rater(edge_type=kind).targets(other).edge_label)
    file = tmp_path / "split" / "links" / "hide.npy"
    np.save(file, np.array([False]))  # as a release before wrote it
    with pytest.raises(ValueError, match=r"shows edges that are asked for\. split_edges\.hide went: "):
        lgd.LinkSplit.open(tmp_path / "split")


def test_arrays_of_any_name_are_saved(tmp_path: Path) -> None:
    graph = rated()
    for name in ("edge_num_edges", "val_edges", "edge_negatives", "labels", "hide"):
        graph.edge_arrays[name] = torch.rand(graph.num_edges)
    split = lgd.split_edges(graph, labels="edge_rating")
    split.save(tmp_path / "split")
    again = lgd.LinkSplit.open(tmp_path / "split")
    assert again.fingerprint == split.fingerprint and again.edges.keys() == split.edges.keys()
    for name, arrays in split.held_arrays.items():
        assert arrays.keys() == again.held_arrays[name].keys() >= {"edge_num_edges", "val_edges"}
        assert all(again.held_arrays[name][array].equal(rows) for array, rows in arrays.items())


def test_what_cannot_work_is_refused() -> None:
    graph, split = rated(), split_of(None)
    graph.edge_arrays["edge_sign"] = torch.where(torch.arange(graph.num_edges) % 2 == 0, 1, -1)
    graph.edge_arrays["edge_score"] = torch.arange(graph.num_edges) - 9
    graph.edge_arrays["edge_class"] = torch.arange(graph.num_edges) % 4
    for options, message in (
        ({"labels": "rating"}, r"labels names 'rating', and edges carry no array of that name \(they have:"),
        ({"labels": "edge_score"}, "hold -9: integers are classes.* floating point"),
        ({"labels": "edge_sign"}, "are of class 1. Number classes from 0"),
        ({"labels": "edge_class", "negatives": 3}, "negatives are for splits without labels"),
        ({"labels": "edge_class", "negatives": 0}, "Leave negatives out"),
    ):
        with pytest.raises(ValueError, match=message):
            lgd.split_edges(graph, **options)
    with pytest.raises(ValueError, match="num_negatives is for splits without labels"):
        data_of(split, num_negatives=1)
    with pytest.raises(ValueError, match=r"edge_rating holds NaN .* no label, .*check_features=False"):
        lgd.Graph.from_pyg(graph.to_pyg())
    alone = torch.zeros(NODES, dtype=torch.int32)
    alone[7] = 1
    number = sum(labelled(split.graph, None).values())
    with pytest.raises(ValueError, match=f"rank 1 of 2 hold none of the {number} training edges"):
        most_seeds(data_of(split, partitioner=lgd.Partition(alone, 2)), 2)
    assert next(iter(data_of(split, sampler=lgd.WholePartSampler(2)).train_dataloader())).num_targets > 20


def test_a_split_of_ones_own_is_checked() -> None:
    split = split_of(None)
    own = {"labels": "edge_rating", "undirected": False}

    def made(
        graph: lgd.Graph = split.graph, edges: Any = split.edges, held: Any = split.held_arrays, **options: Any
    ) -> Any:
        return lgd.LinkSplit(graph, edges, held_arrays=held, **(own | options))

    assert made().fingerprint == split.fingerprint
    arrays = dict(split.held_arrays["val"])
    test = {"test": split.held_arrays["test"]}
    for held, message in (
        (test, "held_arrays for"),
        (test | {"val": {"edge_rating": arrays["edge_rating"]}}, r"held_arrays of val are \['edge_rating'\]"),
        (test | {"val": arrays | {"edge_rating": arrays["edge_rating"][:1]}}, "edge_rating of val must be torch.f"),
        (test | {"val": arrays | {"edge_rating": arrays["edge_rating"] / 0 * 0}}, "some edges of val have no label"),
    ):
        with pytest.raises(ValueError, match=message):
            made(held=held)
    with pytest.raises(ValueError, match="are among the graph's"):
        made(graph_of(None))
    edge, row = split.edges["val"][:, :1], {name: rows[:1] for name, rows in arrays.items()}
    more = split.edges | {"test": torch.cat([split.edges["test"], edge], 1)}  # type: ignore[operator]
    carried = {name: torch.cat([rows, row[name]]) for name, rows in split.held_arrays["test"].items()}
    with pytest.raises(ValueError, match=r"share edges of the same ends and edge_rating \(1 of val\)"):
        made(edges=more, held={"val": arrays, "test": carried})
    other = carried | {"edge_rating": torch.cat([carried["edge_rating"][:-1], row["edge_rating"] + 1])}
    made(edges=more, held={"val": arrays, "test": other})
    with pytest.raises(ValueError, match="held_arrays is for edges with labels"):
        lgd.LinkSplit(split.graph, {}, {}, held_arrays=test)
    with pytest.raises(ValueError, match=r"There are edges for .* and negatives for"):
        made(labels=None)
    with pytest.raises(ValueError, match="negatives are for splits without labels"):
        lgd.LinkSplit(split.graph, split.edges, {"val": torch.zeros(1, 1)}, **own)  # type: ignore[arg-type]


def test_labels_on_other_types_between_the_same_nodes_are_refused() -> None:
    data = typed_ratings().to_pyg()
    back, own = data[BACK].edge_index, data[RATES]
    del data[BACK]
    for kind, ends, way_out in (
        (("film", "liked_by", "user"), back, r"reverse=\('film', 'liked_by'.*another name"),
        (("user", "likes", "film"), own.edge_index, r": give that array another name"),
    ):
        more = data.clone()
        more[kind].edge_index, more[kind].rating = ends[:, :150], own.rating[:150]
        graph = lgd.Graph.from_pyg(more, check_features=False)
        for reverse in ("auto", None):
            with pytest.raises(ValueError, match=f"{kind[1]}.* have an array 'rating', too, .*{way_out}"):
                lgd.split_edges(graph, labels="rating", edge_type=RATES, reverse=reverse)
        del more[kind].rating
        split = lgd.split_edges(lgd.Graph.from_pyg(more, check_features=False), labels="rating", edge_type=RATES)
        assert split.reverse is None
        split.graph.types.edge_arrays[kind]["rating"] = torch.zeros(150)  # type: ignore[union-attr,index]
        with pytest.raises(ValueError, match="have an array 'rating', too"):
            lgd.LinkSplit(split.graph, split.edges, edge_type=RATES, labels="rating", held_arrays=split.held_arrays)
        if kind[0] == "film":
            assert lgd.split_edges(graph, labels="rating", edge_type=RATES, reverse=kind).reverse == kind


# Splits without labels: nothing leaks, nothing false is true, and a saved one is the same.


def whole_graph() -> lgd.Graph:
    return lgd.communities(300, 4, num_features=3, seed=1)


def both(edges: Pairs) -> Pairs:
    return edges | {(r, s) for s, r in edges}


def test_pairs_are_split_with_both_directions() -> None:
    whole = whole_graph()
    split = lgd.split_edges(whole, 0.1, 0.2, negatives=7)
    everything, kept = pairs(edges_of(whole)), pairs(edges_of(split.graph))
    val, test = pairs(split.edges["val"]), pairs(split.edges["test"])
    assert split.undirected
    assert both(kept) == kept
    assert kept | both(val) | both(test) == everything
    assert len(kept) + 2 * len(val) + 2 * len(test) == len(everything)
    assert len(val) == round(0.05 * len(everything)) and len(test) == round(0.1 * len(everything))
    assert 0.3 < sum(s < r for s, r in test) / len(test) < 0.7
    for name, edges in split.edges.items():
        false = split.negatives[name]
        assert false.shape == (edges.shape[1], 7)
        asked = pairs((edges[0].repeat_interleave(7), false.view(-1)))
        assert not asked & everything and all(s != r for s, r in asked)


def test_a_seed_decides() -> None:
    first, again, other = (lgd.split_edges(whole_graph(), seed=seed, negatives=3) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first.negatives["test"], again.negatives["test"])
    assert pairs(first.edges["test"]) != pairs(other.edges["test"])


def test_directed_edges_are_split_alone() -> None:
    nodes = torch.arange(50)
    edge_index = torch.cat([torch.stack([nodes, (nodes + step) % 50]) for step in (1, 3)], 1)
    whole = lgd.Graph.from_pyg(Data(edge_index=torch.cat([edge_index, edge_index[:, :5]], 1), num_nodes=50))
    split = lgd.split_edges(whole, 0.2, 0.2, negatives=4)
    assert not split.undirected
    kept, held = pairs(edges_of(split.graph)), pairs(split.edges["val"]) | pairs(split.edges["test"])
    assert kept | held == pairs(edge_index) and not kept & held  # copies go together
    false = pairs((split.edges["val"][0].repeat_interleave(4), split.negatives["val"].view(-1)))
    assert not false & pairs(edge_index)


def test_copies_of_one_direction_do_not_make_a_graph_directed() -> None:
    sender, receiver = edges_of(whole_graph())
    edge_index = torch.stack([sender, receiver])
    whole = lgd.Graph.from_pyg(Data(edge_index=torch.cat([edge_index, edge_index[:, :5]], 1), num_nodes=300))
    split = lgd.split_edges(whole, 0.1, 0.2, negatives=2)
    assert split.undirected
    kept = pairs(edges_of(split.graph))
    for edges in split.edges.values():
        assert not both(pairs(edges)) & kept


def test_loops_and_arrays_stay_and_masks_do_not() -> None:
    whole = whole_graph()
    sender, receiver = edges_of(whole)
    nodes = torch.arange(300)
    edge_index = torch.stack([torch.cat([sender, nodes]), torch.cat([receiver, nodes])])
    data = Data(x=torch.randn(300, 2), edge_index=edge_index, edge_weight=edge_index[0] * 1000.0 + edge_index[1])
    data.train_mask = torch.ones(300, dtype=torch.bool)
    split = lgd.split_edges(lgd.Graph.from_pyg(data), negatives=2)
    sender, receiver = edges_of(split.graph)
    assert int((sender == receiver).sum()) == 300
    assert torch.equal(split.graph.edge_arrays["edge_weight"], sender * 1000.0 + receiver)
    assert set(split.graph.node_arrays) == {"x"}


def test_a_saved_split_without_labels_is_the_same(tmp_path: Path) -> None:
    split = lgd.split_edges(whole_graph(), 0.1, 0.0, negatives=5)
    split.save(tmp_path / "split")
    opened = lgd.LinkSplit.open(tmp_path / "split")
    assert opened.fingerprint == split.fingerprint
    assert set(opened.edges) == {"val"} and opened.undirected
    assert torch.equal(opened.negatives["val"], split.negatives["val"])
    assert lgd.Graph.open(tmp_path / "split").fingerprint == split.graph.fingerprint
    assert repr(opened) == f"LinkSplit({opened.graph}, val={split.edges['val'].shape[1]})"
    with pytest.raises(FileExistsError):
        split.save(tmp_path / "split")
    split.graph.save(tmp_path / "graph")
    with pytest.raises(ValueError, match=r"edges are not split: save split_edges"):
        lgd.LinkSplit.open(tmp_path / "graph")


def test_a_directed_graph_is_not_taken_for_an_undirected_one() -> None:
    nodes = torch.arange(50)
    ring = lgd.Graph.from_pyg(Data(edge_index=torch.stack([nodes, (nodes + 1) % 50]), num_nodes=50))
    edges, false = {"val": torch.tensor([[0], [7]])}, {"val": torch.tensor([[9]])}
    with pytest.raises(ValueError, match=r"has \d+ -> \d+ and not its reverse: give LinkSplit\(..., undirected=False"):
        lgd.LinkSplit(ring, edges, false)
    assert lgd.LinkSplit(ring, edges, false, undirected=False).graph is ring


def ring(num_nodes: int) -> lgd.Graph:
    nodes = torch.arange(num_nodes)
    there = torch.stack([nodes, (nodes + 1) % num_nodes])
    return lgd.Graph.from_edge_index(torch.cat([there, there.flip(0)], 1), num_nodes)


@pytest.mark.parametrize(
    ("edges", "negatives", "message"),
    [
        ({"val": [[0, 3], [2, 5]]}, {"val": [[4], [0]]}, None),
        ({"val": [[0], [2]], "test": [[4], [2]]}, {"val": [[4]], "test": [[7]]}, None),
        ({"val": [[0], [1]]}, {"val": [[4]]}, "val: 1 of 1 edges are among the graph's"),
        ({"val": [[1], [0]]}, {"val": [[4]]}, "val: 1 of 1 edges are among the graph's"),
        ({"val": [[0], [2]]}, {"val": [[1]]}, "val: 1 of 1 negatives .* are edges, such as 0 -> 1"),
        ({"val": [[0], [2]]}, {"val": [[2]]}, r"val: 1 of 1 .*the first is 0 -> 2\)"),
        ({"val": [[0, 0], [2, 4]]}, {"val": [[4], [5]]}, "negatives .* are edges, such as 0 -> 4"),
        ({"val": [[0], [2]], "test": [[2], [4]]}, {"val": [[4]], "test": [[0]]}, "are edges, such as 2 -> 0"),
        ({"val": [[0, 0], [2, 2]]}, {"val": [[4], [5]]}, "val: some edges are there twice"),
        ({"val": [[0], [2]], "test": [[2], [0]]}, {"val": [[4]], "test": [[5]]}, "val and test share edges"),
        ({"val": [[], []]}, {"val": torch.empty(0, 1)}, "val: there are no edges to judge by"),
        ({"val": [[0], [2]]}, {"val": [[]]}, "leave each edge without a rival"),
        ({"val": [[0], [2]]}, {}, r"edges for \['val'\] and negatives for \[\]"),
        ({"valid": [[0], [2]]}, {"valid": [[4]]}, r"not for \['valid'\]"),
        ({"val": [[0], [2]]}, {"val": [[4, 4, 4], [5, 5, 5]]}, r"got \(2, 1\) and \(2, 3\)"),
        ({"val": [[0], [9]]}, {"val": [[4]]}, r"integers in \[0, 9\)"),
    ],
)
def test_what_is_judged_is_true_once_and_its_rivals_are_false(
    edges: dict[str, Any], negatives: dict[str, Any], message: str | None
) -> None:
    held, false = ({name: torch.as_tensor(ends).long() for name, ends in of.items()} for of in (edges, negatives))
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        lgd.LinkSplit(ring(9), held, false)


def path_of(num_edges: int) -> lgd.Graph:
    nodes = torch.arange(num_edges)
    return lgd.Graph.from_edge_index(torch.stack([nodes, nodes + 1]), 9)


COMPLETE = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])


@pytest.mark.parametrize(
    ("graph", "options", "message"),
    [
        (ring(9), {"val": 0.5, "test": 0.5}, r"shares that leave edges to train on, got 0\.5 and 0\.5"),
        (ring(9), {"val": "edge_val"}, r"shares .*, got 'edge_val' and 0\.1\. A split of your own is LinkSplit"),
        (ring(9), {"val": "0.1"}, r"got '0\.1' and 0\.1"),
        (path_of(1), {"undirected": True}, "some edges have no reverse"),
        (lgd.Graph.from_edge_index(COMPLETE, 3), {"val": 0.4, "test": 0.0}, r"Node \d has an edge to every other"),
        (path_of(0), {}, "There are no edges to hold back"),
        (path_of(1), {}, "val=0.05 of 1 edges"),
        (path_of(1), {"val": 0}, "test=0.1 of 1 edges"),
        (path_of(1), {"val": 0, "test": 0.9}, "val and test would hold all 1 edges"),
        (path_of(2), {"val": 0.5, "test": 0.45}, "val and test would hold all 2 edges"),
    ],
)
def test_useless_arguments_are_refused(graph: lgd.Graph, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.split_edges(graph, **({"negatives": 1} | options))
    assert lgd.split_edges(graph, 0, 0).graph.num_edges == graph.num_edges


def test_masks_of_nodes_do_not_split_edges() -> None:
    with pytest.raises(ValueError, match=r"'train_mask', .*which split nodes"):
        lgd.LinkSplit(whole_graph(), {}, {})


def test_a_graph_that_is_nearly_undirected_is_told_of() -> None:
    ends, number = edges_of(whole_graph()), whole_graph().num_edges
    nearly = lgd.Graph.from_edge_index(ends[:, 1:], 300)
    with pytest.raises(ValueError, match=rf"^1 of {number - 1} edges have no reverse.*undirected=False, which"):
        lgd.split_edges(nearly)
    assert lgd.split_edges(nearly, 0.0, 0.1, undirected=False).edges["test"].shape[1] == round((number - 1) / 10)


# Files of a split that were damaged, or do not fit, are refused in a sentence before a loop runs on them.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, graph = tmp_path_factory.mktemp("saved"), any_graph(0)
    lgd.split_edges(graph, negatives=3).save(root / "mine" / "links")
    return root


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("links/val_edges.npy", another_kind(str)),
        ("links/val_edges.npy", array(lambda ends: ends + 1000)),
        ("links/undirected.npy", array(lambda flag: flag.astype(np.int64))),
        ("links/undirected.npy", array(np.zeros_like)),
        ("links/val_edges.npy", array(np.zeros_like)),
        ("indices.npy", entry(7, 10**9)),
    ],
)
def test_files_that_do_not_fit_are_refused(saved: Path, tmp_path: Path, file: str, damage: Damage) -> None:
    path = damaged(saved, tmp_path, "links", file, damage)
    with pytest.raises(ValueError, match=str(path)):
        lgd.LinkSplit.open(path)
