"""From ``HeteroData``: real graphs come back as they were, and what cannot be right is refused in one sentence."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph, citations
from lightning_gnn_dist.graph import rows as rows_module
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed import build as build_module
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


def two_names() -> HeteroData:
    data = HeteroData()
    for kind in ("a", "d", "a__b"):
        data[kind].num_nodes = 2
    for kind in (("a", "b__c", "d"), ("a__b", "c", "d")):
        data[kind].edge_index = torch.tensor([[0], [1]])
    return data


PAIR, IN_TIME = torch.tensor([[0], [1]]), {"time": "time"}
SENDER_7 = with_edges(("author", "edits", "paper"), torch.tensor([[7], [0]]))
DATES = np.zeros(12, "datetime64[s]")
NO_TIME, LAST_NAN = torch.tensor([NAN] + [0.0] * 39), torch.tensor([0.0] * 11 + [NAN])
BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no node count": (without("venue", "num_nodes"), {}, r"data\['venue'\]: nothing says .* set data\['venue'\].num_n"),
    "no nodes": (changed(venue__num_nodes=0), {}, r"data\['venue'\]: there are no nodes of this type: leave it out"),
    "lengths differ": (changed(paper__z=torch.ones(11)), {}, r"data\['paper'\]: z has shape \(11,\), but .* 12 nodes"),
    "sender of another type": (SENDER_7, {}, r"the sender 7, but there are 7 nodes of type 'author': .* \[0, 7\)"),
    "no edge_index": (
        without(CITES, "edge_index"),
        {},
        r"there is no edge_index: set data\['paper', 'cites', 'paper'\]",
    ),
    "unknown end": (with_edges(("paper", "by", "x"), PAIR), {}, r"the node type 'x', which is not there .*num_nodes"),
    "empty node type": (named(""), {}, "'' cannot be the name of a type"),
    "long type": (named("x" * 201), {}, "The name of the type 'xxx.* has more than 200 bytes: shorten it"),
    "one folder for two": (two_names, {}, r"\('a__b', 'c', 'd'\) and .* would have one folder, a__b__c__d: rename one"),
    "no types": (HeteroData, {}, "A typed graph needs a node type and an edge type at least"),
    "an array of no type": (lambda: HeteroData(small().to_dict() | {"z": PAIR}), {}, r"\['z'\] belong to no type"),
    "time is NaN": (
        changed(cites__time=NO_TIME),
        IN_TIME | {"check_features": False},
        r"'paper'\]: time of edge 0 is NaN",
    ),
    "node time is NaN": (
        changed(paper__time=LAST_NAN),
        IN_TIME,
        r"\['paper'\]: time of node 11 is NaN, and .* ordered",
    ),
    "time in columns": (changed(cites__time=torch.ones(40, 2)), IN_TIME, "time must hold one number for each edge"),
    "no such time": (small, {"time": "when"}, "time names the array 'when', and no node type and no edge type has it"),
    "time is no name": (small, {"time": 3}, "time must be a name such as 'time', got 3"),
    "regression of classes": (small, {"float_labels": True}, "no node type has a y of fractions"),
    "times in words": (changed(paper__time=["monday"] * 12), IN_TIME, r"\['paper'\]\.time must be a tensor .*'monday'"),
    "words nobody named": (changed(cites__time=["2099"] * 40), {}, "paper'.*time must .*2099.*Turn .* or remove it"),
    "times as dates": (changed(paper__time=DATES), IN_TIME, r"a numpy array of datetime64\[s\] .*astype\('int64'\)"),
    "time of a Data": (lambda: Data(edge_index=PAIR, num_nodes=2), {"time": "t"}, "leave it out for a Data"),
}


@pytest.mark.parametrize(("make", "options", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_right_is_refused(make, options, message, recwarn) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        Graph.from_pyg(make(), **options)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text and len(text) < 400
    recwarn.clear()  # PyG's, of what it guesses


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


# A saved typed graph: the same after opening, refused when its files do not fit each other.


@pytest.fixture
def graph() -> Graph:
    return Graph.from_pyg(small(), edge_ids=True, time="time")


def test_everything_comes_back(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "graph")
    opened = Graph.open(tmp_path / "graph")
    check_same(opened.to_pyg(), small())
    assert opened.fingerprint == graph.fingerprint and opened.num_bytes == graph.num_bytes
    assert opened.types.about == graph.types.about
    assert len(pickle.dumps(opened)) < 500 and store.verify(tmp_path / "graph") == []
    assert (tmp_path / "graph" / "nodes" / "author" / "x.npy").exists()
    assert (tmp_path / "graph" / "edges" / "paper__cites__paper" / "time.npy").exists()


def test_the_fingerprint_knows_types_and_their_masks() -> None:
    def changed(**arrays: Any) -> HeteroData:
        data = small()
        data["author"].update(arrays)
        return data

    prints = [Graph.from_pyg(data).fingerprint for data in (small(), small().rename("author", "writer"))]
    prints += [Graph.from_pyg(changed(train_mask=torch.arange(7) < 3)).fingerprint]
    assert len({*prints}) == 3 and Graph.from_pyg(changed(x=torch.ones(7, 1))).fingerprint == prints[0]


def test_a_graph_without_types_is_saved_as_older_releases_read_it(tmp_path: Path) -> None:
    Graph.from_edge_index(torch.tensor([[0], [1]]), 2).save(tmp_path / "graph")
    meta = json.loads((tmp_path / "graph" / "meta.json").read_text())
    assert meta["version"] == 1 and "types" not in meta
    Graph.from_pyg(small()).save(tmp_path / "graph", overwrite=True)
    assert json.loads((tmp_path / "graph" / "meta.json").read_text())["version"] == 2


def write(graph: Graph, path: Path, arrays: dict[str, torch.Tensor], **about: Any) -> None:
    store.write(path, graph.arrays | arrays, graph.fingerprint, overwrite=True, types=graph.types.about | about)


@pytest.mark.parametrize(
    ("arrays", "about", "message"),
    [
        ({"edge_type": torch.zeros(99, dtype=torch.uint8)}, {}, "is said to be of type"),
        ({"edge_type": torch.full((99,), 5, dtype=torch.uint8)}, {}, r"edge_type must lie in \[0, 5\), got 5 to 5"),
        ({"edge_type": torch.zeros(99, dtype=torch.int32)}, {}, r"edge_type must hold torch.uint8|meta.json"),
        ({"nodes/paper/x": torch.ones(3, 2)}, {}, r"data\['paper'\]: x has shape \(3, 2\)"),
        (
            {"nodes/paper/x": torch.ones(12, 2, dtype=torch.int8), "nodes/paper/x_scale": torch.ones(12)},
            {},
            r"so store \(x \* x_scale\.view\(-1, 1\)\)\.half\(\) as x and leave x_scale out\)",
        ),
        ({}, {"nodes": [["paper", 12], ["author", 7]]}, "names the node type 'venue', which is not there"),
        ({}, {"nodes": [["paper", 12], ["author", 6], ["venue", 4]]}, r"data\['author'\]: x has shape"),
        ({}, {"nodes": [["paper", "x"]]}, "meta.json does not fit"),
        ({}, {"nodes": 3}, "damaged"),
        ({}, {"nodes": [["paper", 12], ["author", 11], ["venue", -1]]}, "No type has fewer than 0 nodes"),
        ({"nodes/film/x": torch.ones(2)}, {}, r"\['nodes/film/x'\] belong to no type"),
        ({"nodes/x": torch.ones(2)}, {}, r"\['nodes/x'\] belong to no type"),
        ({}, {"time": 3}, "damaged"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(graph, arrays, about, message, tmp_path) -> None:
    write(graph, tmp_path / "graph", arrays, **about)
    for _ in range(2):  # nor does a first refusal leave a mark
        with pytest.raises(ValueError, match=message):
            Graph.open(tmp_path / "graph")


def test_a_row_that_is_not_in_order_of_types_is_refused(graph: Graph) -> None:
    types = graph.types
    row = next(v for v in range(12) if types.edge_type[graph.indptr[v] : graph.indptr[v + 1]].unique().numel() > 1)
    at = torch.arange(graph.num_edges)
    at[graph.indptr[row] : graph.indptr[row + 1]] = at[graph.indptr[row] : graph.indptr[row + 1]].flip(0)
    with pytest.raises(ValueError, match="or the row is not in order of types"):
        replace(types, edge_type=types.edge_type[at]).check_edges(graph.indptr, graph.indices[at])


def test_types_cost_less_than_a_third_of_the_edges(tmp_path: Path) -> None:
    typed = citations(2000)
    plain = Graph(typed.indptr, typed.indices)
    typed.save(tmp_path / "typed")
    plain.save(tmp_path / "plain")
    edges = [tmp_path / "typed" / f"{name}.npy" for name in ("indptr", "indices", "edge_type")]
    size = sum(file.stat().st_size for file in edges)
    assert size < 1.3 * sum(file.stat().st_size for file in (tmp_path / "plain").glob("*.npy"))


# One id space, rows in order of types, arrays by type: against loops over a small graph.


def row_by_hand(data: HeteroData, kind: str, node: int, time: str | None) -> list[tuple[int, int]]:
    """The senders of a node, by their ids in the graph, with the number of the edge type."""
    first = {"paper": 0, "author": 12, "venue": 19}
    row = []
    for number, (source, _, target) in enumerate(data.edge_types):
        store = data.edge_stores[number]
        for place, (sender, receiver) in enumerate(store.edge_index.T.tolist()):
            if (target, receiver) != (kind, node):
                continue
            when = 0.0
            if time:
                times = store.get(time, data[source].get(time))
                when = 0.0 if times is None else float(times[place if time in store else sender])
            row.append((number, when, first[source] + sender))
    return [(sender, number) for number, _, sender in sorted(row)]


@pytest.mark.parametrize("time", [None, "time"])
def test_rows_are_in_order_of_type_time_and_sender(time: str | None) -> None:
    data = small()
    graph = Graph.from_pyg(data, time=time)
    types = graph.types
    for node in range(graph.num_nodes):
        number, local = (int(found) for found in types.to_local(torch.tensor([node])))
        row = slice(int(graph.indptr[node]), int(graph.indptr[node + 1]))
        found = list(zip(graph.indices[row].tolist(), types.edge_type[row].tolist(), strict=True))
        assert found == row_by_hand(data, types.node_types[number], local, time)
    assert types.edge_type.dtype == torch.uint8 and types.time == time


def test_ids_of_a_type_and_of_the_graph() -> None:
    types = Graph.from_pyg(small()).types
    assert types.num_nodes == {"paper": 12, "author": 7, "venue": 3} and types.offsets == (0, 12, 19, 22)
    assert types.nodes_of("author") == range(12, 19)
    number, local = types.to_local(torch.tensor([18, 0, 21]))
    assert (number.tolist(), local.tolist()) == ([1, 0, 2], [6, 0, 2])
    assert types.metadata == small().metadata()
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 22\), got 22"):
        types.to_local(torch.tensor([22]))
    with pytest.raises(ValueError, match=r"node_type must be one of \['paper', 'author', 'venue'\], got 'film'"):
        types.nodes_of("film")


def test_splits_and_arrays_belong_to_a_type() -> None:
    graph = Graph.from_pyg(small())
    types = graph.types
    assert graph.split("train").tolist() == [0, 2, 4, 6, 8, 10, 12, 13]
    assert types.node_arrays["author"]["x"].dtype == torch.float16 and types.node_arrays["venue"] == {}
    assert types.edges_of(("paper", "in", "venue")).numel() == 0
    with pytest.raises(ValueError, match=r"No node type has a val_mask: set data\['paper'\].val_mask"):
        graph.split("val")


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_the_part_of_some_nodes_is_pygs_subgraph(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows_module, build_module):
        monkeypatch.setattr(module, "EDGES_PER_PIECE", at_once)
    data = small()
    graph = Graph.from_pyg(data, edge_ids=True)
    types, picked = graph.types, {"paper": torch.tensor([1, 2, 5, 6, 11]), "author": torch.tensor([0, 3, 4, 6])}
    nodes = torch.cat([ids + types.nodes_of(kind).start for kind, ids in picked.items()])
    part = graph.induced(nodes)
    part.check_edges()
    found, expected = part.to_pyg(), data.subgraph(picked | {"venue": torch.empty(0, dtype=torch.int64)})
    assert isinstance(found, HeteroData)
    for kind, ids in picked.items():
        assert torch.equal(found[kind].x, data[kind].x[ids]) and torch.equal(found[kind].n_id, ids)
    for edge_type in data.edge_types:
        ours, theirs = found[edge_type], expected[edge_type]
        assert sorted(ours.edge_index.T.tolist()) == sorted(theirs.edge_index.T.tolist())
        for name in set(theirs.keys()) - {"edge_index"}:
            assert torch.equal(ours[name], data[edge_type][name][ours.e_id]), name
        ends = [picked.get(end, torch.empty(0))[ids] for end, ids in zip(edge_type[::2], ours.edge_index, strict=True)]
        assert torch.equal(torch.stack(ends).long(), data[edge_type].edge_index[:, ours.e_id])
    with pytest.raises(ValueError, match="in the order of their types"):
        graph.induced(nodes.flip(0))


def test_degrees_and_halo_are_those_of_the_one_graph() -> None:
    data = small()
    graph, merged = Graph.from_pyg(data), data.to_homogeneous(add_node_type=False, add_edge_type=False)
    plain = Graph.from_edge_index(merged.edge_index, 22)
    assert torch.equal(graph.degrees(), plain.degrees())
    assert torch.equal(graph.halo(torch.arange(5)), plain.halo(torch.arange(5)))


def test_many_edge_types_take_two_bytes() -> None:
    data = HeteroData()
    data["a"].num_nodes = 2
    for number in range(257):
        data["a", f"r{number}", "a"].edge_index = torch.tensor([[0], [1]])
    graph = Graph.from_pyg(data, edge_ids=True)
    assert graph.types.edge_type.dtype == torch.int16
    check_same(graph.to_pyg(), data)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_ids_of_few_bits_do_not_overflow(dtype: torch.dtype) -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 300, 90
    data["b", "to", "b"].edge_index = torch.tensor([[89, 0], [88, 89]], dtype=dtype)
    graph = Graph.from_pyg(data)
    assert graph.indices.tolist() == [389, 300] and graph.degrees().nonzero().view(-1).tolist() == [388, 389]


def test_what_needs_one_array_for_all_nodes_refuses() -> None:
    graph = Graph.from_pyg(small())
    for use in (lambda: graph.node_arrays, lambda: graph.edge_arrays):
        with pytest.raises(ValueError, match=r"This needs a graph without types.*data\.to_homogeneous\(\)"):
            use()


def test_a_graph_without_edges_has_parts() -> None:
    data = HeteroData()
    data["a"].num_nodes, data["b"].num_nodes = 3, 2
    data["a", "to", "b"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert Graph.from_pyg(data).induced(torch.tensor([0, 2, 3])).degrees().tolist() == [0, 0, 0]
