"""From ``HeteroData``: real graphs come back as they were, and what cannot be right is refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph
from tests.conftest import module_of
from tests.graph.typed.graphs import check_same, small

NAN = float("nan")
CITES = ("paper", "cites", "paper")


def changed(**settings: Any) -> Callable[[], HeteroData]:
    """The small graph with other arrays: ``paper__x=...`` for nodes, ``cites__time=...`` for edges."""

    def make() -> HeteroData:
        data = small()
        for name, value in settings.items():
            kind, _, array = name.partition("__")
            data[CITES if kind == "cites" else kind][array] = value
        return data

    return make


def with_edges(edge_type: tuple[str, str, str], index: Any) -> Callable[[], HeteroData]:
    def make() -> HeteroData:
        data = small()
        data[edge_type].edge_index = index
        return data

    return make


def without(kind: Any, name: str) -> Callable[[], HeteroData]:
    def make() -> HeteroData:
        data = small()
        del data[kind][name]
        return data

    return make


def named(kind: str) -> Callable[[], HeteroData]:
    return lambda: small().rename(name="author", new_name=kind)


def of_two_names(first: tuple[str, str, str], second: tuple[str, str, str]) -> HeteroData:
    data = HeteroData()
    for kind in {first[0], first[2], second[0], second[2]}:
        data[kind].num_nodes = 2
    data[first].edge_index = data[second].edge_index = torch.tensor([[0], [1]])
    return data


PAIR = torch.tensor([[0], [1]])
NO_PAIR = torch.empty(2, 0, dtype=torch.int64)
BAD: dict[str, tuple[Callable[[], HeteroData], dict[str, Any], str]] = {
    "no node count": (
        without("venue", "num_nodes"),
        {},
        r"data\['venue'\]: nothing says .* set data\['venue'\].num_nodes",
    ),
    "odd node count": (changed(venue__num_nodes=2.5), {}, r"data\['venue'\]: num_nodes must be an integer .* got 2.5"),
    "no nodes": (changed(venue__num_nodes=0), {}, r"data\['venue'\]: there are no nodes of this type: leave it out"),
    "lengths differ": (changed(paper__z=torch.ones(11)), {}, r"data\['paper'\]: z has shape \(11,\), but .* 12 nodes"),
    "a number": (changed(paper__z=torch.tensor(1)), {}, r"data\['paper'\]: z has shape \(\), but"),
    "too many edge values": (changed(cites__w=torch.ones(41)), {}, r"w has shape \(41,\), but the graph has 40 edges"),
    "sender of another type": (
        with_edges(("author", "edits", "paper"), torch.tensor([[7], [0]])),
        {},
        r"names the sender 7, but there are 7 nodes of type 'author': their ids count from 0, .* \[0, 7\)",
    ),
    "receiver out of range": (with_edges(("venue", "by", "paper"), torch.tensor([[0], [12]])), {}, "the receiver 12"),
    "no edge_index": (
        without(CITES, "edge_index"),
        {},
        r"there is no edge_index: set data\['paper', 'cites', 'paper'\]",
    ),
    "unknown end": (
        with_edges(("paper", "by", "x"), PAIR),
        {},
        r"names the node type 'x', which is not there .*num_nodes",
    ),
    "empty node type": (named(""), {}, "'' cannot be the name of a type"),
    "line end in a type": (named("a\nb"), {}, r"'a\\nb' cannot be the name of a type"),
    "slash in an edge type": (with_edges(("paper", "a/b", "paper"), PAIR), {}, "'a/b' cannot be the name of a type"),
    "long type": (named("x" * 201), {}, "The name of the type 'xxx.* has more than 200 bytes: shorten it"),
    "one folder for two": (
        lambda: of_two_names(("a", "b__c", "d"), ("a__b", "c", "d")),
        {},
        r"\('a__b', 'c', 'd'\) and \('a', 'b__c', 'd'\) would have one folder, a__b__c__d: rename one",
    ),
    "no types": (HeteroData, {}, "A typed graph needs a node type and an edge type at least"),
    "an array of no type": (
        lambda: HeteroData(small().to_dict() | {"z": torch.ones(3)}),
        {},
        r"\['z'\] belong to no type",
    ),
    "time is NaN": (
        changed(cites__time=torch.tensor([NAN] + [0.0] * 39)),
        {"time": "time", "check_features": False},
        r"\['paper', 'cites', 'paper'\]: time of edge 0 is NaN, and edges are ordered by it",
    ),
    "node time is NaN": (
        changed(paper__time=torch.tensor([0.0] * 11 + [NAN])),
        {"time": "time"},
        r"data\['paper'\]: time of node 11 is NaN, and nodes are ordered by it",
    ),
    "time in columns": (
        changed(cites__time=torch.ones(40, 2)),
        {"time": "time"},
        "time must hold one number for each edge",
    ),
    "no such time": (small, {"time": "when"}, "time names the array 'when', and no node type and no edge type has it"),
    "time is no name": (small, {"time": 3}, "time must be a name such as 'time', got 3"),
    "features are NaN": (changed(author__x=torch.full((7, 1), NAN)), {}, r"data\['author'\]: x holds NaN .* at node 0"),
    "mask of numbers": (
        changed(paper__val_mask=torch.zeros(12)),
        {},
        r"val_mask must be boolean, got torch.float32: data\['paper'\].val_mask = data\['paper'\].val_mask.bool\(\)",
    ),
    "regression of classes": (small, {"float_labels": True}, "no node type has a y of fractions"),
    "split twice": (changed(author__train_idx=torch.tensor([5])), {}, r"`del data\['author'\].train_idx`"),
    "time of a Data": (lambda: Data(edge_index=PAIR, num_nodes=2), {"time": "t"}, "leave it out for a Data"),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize(("make", "options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_right_is_refused(
    make: Callable[[], HeteroData], options: dict[str, Any], message: str, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        Graph.from_pyg(make(), **options)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 400
    recwarn.clear()  # PyG's, of what it guesses


def test_a_type_without_edges_and_one_without_arrays_are_right() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 2, 1
    data["a", "to", "b"].edge_index = NO_PAIR
    graph = Graph.from_pyg(data)
    assert graph.num_nodes == 3 and graph.num_edges == 0 and graph.to_pyg()["a", "to", "b"].edge_index.shape == (2, 0)


def test_labels_that_are_missing_leave_the_masks() -> None:
    data = small()
    data["author"].y = torch.tensor([0.5, NAN, 1.0, 2.0, NAN, 0.0, 1.0])
    graph = Graph.from_pyg(data, float_labels=True)  # the papers' classes stay what they are
    assert graph.types.node_arrays["author"]["train_mask"].tolist() == [True] + [False] * 6


def test_ids_of_a_split_become_the_mask_of_its_type() -> None:
    data = small()
    data["author"].valid_idx = torch.tensor([6, 3])
    assert Graph.from_pyg(data).split("val").tolist() == [15, 18]


WAYS = [{}, *(pytest.param({way: True}, marks=pytest.mark.slow) for way in ("split_types", "reverse"))]


@pytest.mark.parametrize("options", WAYS, ids=["plain", "split", "reverse"])
def test_real_graphs_come_back_as_they_were(shared_data: Path, options: dict[str, bool], tmp_path: Path) -> None:
    if not (shared_data / "typed").is_dir():
        pytest.skip("the folder of typed graphs (../shared/data/typed) is not there")
    reader = module_of(shared_data / "typed" / "read_typed.py")
    for name in reader.names():
        data = reader.to_hetero(name, **options)
        has_time = any("time" in store for store in data.stores)
        graph = Graph.from_pyg(data, edge_ids=True, time="time" if has_time else None)
        check_same(graph.to_pyg(), data)
        graph.save(tmp_path / name)
        opened = Graph.open(tmp_path / name)
        assert opened.fingerprint == graph.fingerprint
        check_same(opened.to_pyg(), data)
