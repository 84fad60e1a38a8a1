"""Splits of edges with labels or by masks: nothing is lost, nothing leaks, a saved one is the same; what is refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Graph,
    LinkDataModule,
    LinkSplit,
    NeighborSampler,
    Partition,
    WholePartSampler,
    split_edges,
)
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.edge_model import BACK, NODES, RATES, Rater, rated, typed_ratings
from tests.extensions.links.ratings import KINDS, data_of, graph_of, held_of, labelled, split_of, store_of
from tests.graph.typed.graphs import small
from tests.placing import most_seeds


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


def undirected() -> Graph:
    edges = torch.randint(30, (2, 120), generator=torch.Generator().manual_seed(1))
    edges = edges[:, edges[0] < edges[1]]
    value = torch.randint(3, (edges.shape[1],))
    both = torch.cat([edges, edges.flip(0)], 1)
    return Graph.from_pyg(Data(edge_index=both, edge_class=value.repeat(2), num_nodes=30))


def test_of_an_undirected_graph_one_direction_of_each_pair_is_asked_for() -> None:
    graph = undirected()
    split = split_edges(graph, 0.2, 0.2, labels="edge_class")
    assert split.undirected
    batches = list(data_of(split, batch_size=10_000).train_dataloader())
    asked = batches[0].n_id[batches[0].edge_label_index]
    pairs = Counter(tuple(sorted(pair)) for pair in asked.T.tolist())
    assert len(batches) == 1 and 2 * sum(pairs.values()) == split.graph.num_edges
    assert bool((asked[0] < asked[1]).any()) and bool((asked[0] > asked[1]).any())
    graph.edge_arrays["edge_class"][0] += 1
    assert not split_edges(graph, 0.2, 0.2, labels="edge_class").undirected
    with pytest.raises(ValueError, match=r"directions of some edge differ in \['edge_class'\]"):
        split_edges(graph, 0.2, 0.2, labels="edge_class", undirected=True)


def test_both_directions_carry_the_same_rows_as_often() -> None:
    pairs = [(0, 1), (0, 1), (1, 0), (1, 0), (2, 3), (3, 2)]
    for label, attr, same in (
        ([1, 2, 1, 2, 3, 3], [1, 2, 1, 2, 0, 0], True),
        ([1, 2, 2, 1, 3, 3], [1, 2, 2, 1, 0, 0], True),
        ([1, 2, 1, 2, 3, 3], [1, 2, 2, 1, 0, 0], False),  # each array alone is the same
        ([1, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0], False),
    ):
        graph = Graph.from_pyg(
            Data(
                edge_index=torch.tensor(pairs).T,
                num_nodes=4,
                edge_class=torch.tensor(label),
                edge_attr=torch.tensor(attr).float()[:, None],
            )
        )
        assert split_edges(graph, 0, 0, labels="edge_class").undirected == same
        if not same:
            with pytest.raises(ValueError, match=r"directions of some edge differ in .*edge_class"):
                split_edges(graph, 0, 0, labels="edge_class", undirected=True)
    once = Graph.from_pyg(Data(edge_index=torch.tensor(pairs[1:]).T, num_nodes=4, edge_class=torch.ones(5)))
    assert not split_edges(once, 0, 0, labels="edge_class").undirected
    with pytest.raises(ValueError, match="how often they are there"):
        split_edges(once, 0, 0, labels="edge_class", undirected=True)


@KINDS
def test_a_saved_split_is_the_same(kind: EdgeType | None, tmp_path: Path) -> None:
    split = split_of(kind)
    split.save(tmp_path / "split")
    again = LinkSplit.open(tmp_path / "split")
    assert again.fingerprint == split.fingerprint
    assert held_of(again, "test") == held_of(split, "test")
    first, other = (next(iter(data_of(s).train_dataloader())) for s in (split, tmp_path / "split"))
    assert Rater(edge_type=kind).targets(first).edge_label.equal(Rater(edge_type=kind).targets(other).edge_label)
    file = tmp_path / "split" / "links" / "hide.npy"
    np.save(file, np.array([False]))  # as a release before wrote it
    with pytest.raises(ValueError, match=r"shows edges that are asked for\. split_edges\.hide went: "):
        LinkSplit.open(tmp_path / "split")


def test_arrays_of_any_name_are_saved(tmp_path: Path) -> None:
    graph = rated()
    for name in ("edge_num_edges", "val_edges", "edge_negatives", "labels", "hide"):
        graph.edge_arrays[name] = torch.rand(graph.num_edges)
    split = split_edges(graph, labels="edge_rating")
    split.save(tmp_path / "split")
    again = LinkSplit.open(tmp_path / "split")
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
            split_edges(graph, **options)
    with pytest.raises(ValueError, match="num_negatives is for splits without labels"):
        data_of(split, num_negatives=1)
    with pytest.raises(ValueError, match=r"edge_rating holds NaN .* no label, .*check_features=False"):
        Graph.from_pyg(graph.to_pyg())
    alone = torch.zeros(NODES, dtype=torch.int32)
    alone[7] = 1
    number = sum(labelled(split.graph, None).values())
    with pytest.raises(ValueError, match=f"rank 1 of 2 hold none of the {number} training edges"):
        most_seeds(data_of(split, partitioner=Partition(alone, 2)), 2)
    assert next(iter(data_of(split, sampler=WholePartSampler(2)).train_dataloader())).num_targets > 20


def test_a_split_of_ones_own_is_checked() -> None:
    split = split_of(None)
    own = {"labels": "edge_rating", "undirected": False}

    def made(
        graph: Graph = split.graph, edges: Any = split.edges, held: Any = split.held_arrays, **options: Any
    ) -> Any:
        return LinkSplit(graph, edges, held_arrays=held, **(own | options))

    assert made().fingerprint == split.fingerprint
    arrays = dict(split.held_arrays["val"])
    test = {"test": split.held_arrays["test"]}
    for held, message in (
        (test, "held_arrays for"),
        (test | {"val": {"edge_rating": arrays["edge_rating"]}}, r"held_arrays of val are \['edge_rating'\]"),
        (
            test | {"val": arrays | {"edge_rating": arrays["edge_rating"][:1]}},
            "edge_rating of val must be torch.float64",
        ),
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
        LinkSplit(split.graph, {}, {}, held_arrays=test)
    with pytest.raises(ValueError, match=r"There are edges for .* and negatives for"):
        made(labels=None)
    with pytest.raises(ValueError, match="negatives are for splits without labels"):
        LinkSplit(split.graph, split.edges, {"val": torch.zeros(1, 1)}, **own)  # type: ignore[arg-type]


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
        graph = Graph.from_pyg(more, check_features=False)
        for reverse in ("auto", None):
            with pytest.raises(ValueError, match=f"{kind[1]}.* have an array 'rating', too, .*{way_out}"):
                split_edges(graph, labels="rating", edge_type=RATES, reverse=reverse)
        del more[kind].rating
        split = split_edges(Graph.from_pyg(more, check_features=False), labels="rating", edge_type=RATES)
        assert split.reverse is None
        split.graph.types.edge_arrays[kind]["rating"] = torch.zeros(150)  # type: ignore[union-attr,index]
        with pytest.raises(ValueError, match="have an array 'rating', too"):
            LinkSplit(split.graph, split.edges, edge_type=RATES, labels="rating", held_arrays=split.held_arrays)
        if kind[0] == "film":
            assert split_edges(graph, labels="rating", edge_type=RATES, reverse=kind).reverse == kind


WRITES, REV_WRITES = ("author", "writes", "paper"), ("paper", "rev_writes", "author")


def pairs(edges: torch.Tensor) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.T}


def typed(**masks: torch.Tensor) -> tuple[Graph, torch.Tensor]:
    """The small graph with a rating and masks on what authors write, and the type turned round; and these edges."""
    data = small()
    edges = torch.stack([torch.arange(7).repeat_interleave(5), torch.arange(35) * 5 % 12])
    edges = edges.T.unique(dim=0).T
    count = edges.shape[1]
    data[WRITES].edge_index, data[WRITES].edge_attr = edges, torch.rand(count, 2)
    data[WRITES].share = torch.rand(count)
    data[REV_WRITES].edge_index = edges.flip(0)
    for name, mask in {"val_mask": torch.arange(count) % 5 == 1, "test_mask": torch.arange(count) % 5 == 2}.items():
        data[WRITES][name] = mask
    data[WRITES].update(masks)
    return Graph.from_pyg(data), edges


@pytest.mark.parametrize("labels", [None, "share"])
def test_marked_edges_are_held_and_no_others(labels: str | None) -> None:
    graph, edges = typed()
    number = torch.arange(edges.shape[1])
    split = split_edges(graph, "val_mask", "test_mask", edge_type=WRITES, labels=labels)
    assert split.reverse == REV_WRITES
    for name, rest in (("val", 1), ("test", 2)):
        assert pairs(split.edges[name]) == pairs(edges[:, number % 5 == rest])
    left = split.graph.to_pyg()
    assert pairs(left[WRITES].edge_index) == pairs(edges[:, number % 5 > 2]) | pairs(edges[:, number % 5 == 0])
    assert pairs(left[REV_WRITES].edge_index.flip(0)) == pairs(left[WRITES].edge_index)
    assert sorted(left[WRITES].keys()) == sorted(["edge_index", "edge_attr", "share"])
    if labels is None:
        rivals = zip(split.edges["val"][0].tolist(), split.negatives["val"].tolist(), strict=True)
        assert not pairs(edges) & {(sender, receiver) for sender, receivers in rivals for receiver in receivers}
    else:
        places = {pair: i for i, pair in enumerate(zip(*edges.tolist(), strict=True))}
        rows = [places[int(a), int(b)] for a, b in split.edges["test"].T]
        assert split.held_arrays["test"]["share"].equal(shares_of(graph, edges)[rows])
    batch: Any = next(iter(LinkDataModule(split, sampler=NeighborSampler([2, 2])).train_dataloader()))
    assert batch[WRITES].edge_label_index.shape[0] == 2


def shares_of(graph: Graph, edges: torch.Tensor) -> torch.Tensor:
    """The shares in the order of ``edges``, found by their ends."""
    found = graph.to_pyg()[WRITES]
    of = {(int(a), int(b)): share for (a, b), share in zip(found.edge_index.T, found.share, strict=True)}
    return torch.stack([of[int(a), int(b)] for a, b in edges.T])


def test_a_pair_of_nodes_goes_together_where_there_are_no_types() -> None:
    """One direction is marked: both are held, and one of them, the same each time, is asked for."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]])
    marks = torch.tensor([True] + [False] * 7), torch.tensor([False] * 3 + [True] + [False] * 4)
    graph = Graph.from_edge_index(edges, 6, {}, {"edge_val": marks[0], "edge_test": marks[1]})
    split = split_edges(graph, "edge_val", "edge_test", negatives=2)
    assert {frozenset(pair) for pair in pairs(split.edges["val"])} == {frozenset((0, 1))}
    assert {frozenset(pair) for pair in pairs(split.edges["test"])} == {frozenset((1, 2))}
    assert split.edges["val"].shape == split.edges["test"].shape == (2, 1) and not split.graph.edge_arrays
    assert pairs(split.graph.to_pyg().edge_index) == {(2, 3), (3, 2), (3, 0), (0, 3)}
    alone = split_edges(graph, 0, "edge_test", negatives=2)
    assert list(alone.edges) == ["test"] and alone.graph.num_edges == 6


ALL, NONE = torch.ones(35, dtype=torch.bool), torch.zeros(35, dtype=torch.bool)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a name and a share": ({}, {"test": 0.1}, "two shares, or two names of edge arrays .* got 'val_mask' and 0.1"),
    "no such mask": ({}, {"test": "tst"}, r"test names 'tst', and edges of type .* carry no array of that name"),
    "numbers": (
        {"val_mask": torch.ones(35)},
        {},
        r"val: val_mask must hold one boolean for each edge, got a tensor of",
    ),
    "none": ({"val_mask": NONE}, {}, "val marks no edge that can be held back"),
    "twice": ({"test_mask": ALL}, {}, r"val and test both mark edges between the same two nodes \(7 such pairs\)"),
    "all": ({"val_mask": ALL}, {"test": 0}, "mark all edges, and none is left to train on"),
    "time": (
        {"time": torch.arange(35)},
        {"time": "time"},
        "time='time' decides which edges are held: give val and test",
    ),
}


@pytest.mark.parametrize(("masks", "options", "message"), BAD.values(), ids=BAD)
def test_masks_that_hold_nothing_are_refused(masks: dict[str, Any], options: dict[str, Any], message: str) -> None:
    graph, edges = typed(**masks)
    assert edges.shape[1] == 35
    with pytest.raises(ValueError, match=message):
        split_edges(graph, **({"val": "val_mask", "test": "test_mask", "edge_type": WRITES} | options))
