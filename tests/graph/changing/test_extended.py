"""Nodes and edges come: the graph is that which is made of all of them at once."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph
from tests.graph.changing.whole import (
    AT,
    CITES,
    REVIEWS,
    WRITES,
    in_turn,
    parted,
    rows_by_hand,
    rows_of,
    typed,
    untyped,
)
from tests.graph.equal import check_equal


def _saved(graph: Graph, path: Path) -> Graph:
    graph.save(path)
    return Graph.open(path)


def _first(data: Data, count: int) -> tuple[Data, dict[str, torch.Tensor], dict[str, torch.Tensor], Data]:
    """The graph of the first nodes, what comes, and the graph of all edges in turn."""
    inside = (data.edge_index < count).all(0) & (torch.arange(data.num_edges) % 4 > 0)
    old = Data(data.x[:count], data.edge_index[:, inside], y=data.y[:count], train_mask=data.train_mask[:count])
    old.edge_weight = data.edge_weight[inside]
    nodes = {"x": data.x[count:], "y": data.y[count:], "train_mask": data.train_mask[count:]}
    edges = {"edge_index": data.edge_index[:, ~inside], "edge_weight": data.edge_weight[~inside]}
    order = torch.cat([inside.nonzero().view(-1), (~inside).nonzero().view(-1)])
    whole = data.clone()
    whole.edge_index, whole.edge_weight = data.edge_index[:, order], data.edge_weight[order]
    return old, nodes, edges, whole


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_graph_without_types_is_that_of_all_nodes_and_edges(is_saved: bool, tmp_path: Path) -> None:
    old, nodes, edges, whole = _first(untyped(), 33)
    graph = Graph.from_pyg(old)
    graph = _saved(graph, tmp_path / "graph") if is_saved else graph
    extended = graph.extended(nodes, edges)
    check_equal(extended, Graph.from_pyg(whole))
    assert extended.nodes_since(0).tolist() == list(range(33, 40)) and extended.version == 1
    assert (graph.num_nodes, graph.version) == (33, 0)
    check_equal(graph, Graph.from_pyg(old))
    if is_saved:
        check_equal(Graph.open(tmp_path / "graph"), extended)
        check_equal(Graph.open(tmp_path / "graph", version=0), graph)
        check_equal(pickle.loads(pickle.dumps(graph)), graph)
        check_equal(pickle.loads(pickle.dumps(extended)), extended)


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("time", [None, "time"])
def test_a_graph_with_types_is_that_of_all_nodes_and_edges(is_saved: bool, time: str | None, tmp_path: Path) -> None:
    old, nodes, edges = parted(typed())
    graph = Graph.from_pyg(old, time=time)
    graph = _saved(graph, tmp_path / "graph") if is_saved else graph
    extended, whole = graph.extended(nodes, edges, new_types=["editor"]), in_turn(old, edges)
    check_equal(extended, Graph.from_pyg(whole, time=time))
    extended.check_edges()
    for kind in (WRITES, CITES, AT, REVIEWS):
        assert rows_of(extended, kind) == rows_by_hand(whole, kind, time)
    assert extended.nodes_since(0, "author").tolist() == [12, 13, 14, 15, 16]
    assert extended.nodes_since(0, "editor").tolist() == [0, 1, 2, 3]
    assert extended.nodes_since(1).numel() == extended.nodes_since(0, "venue").numel() == 0


@pytest.mark.parametrize("is_saved", [False, True])
def test_several_changes_are_one_graph(is_saved: bool, tmp_path: Path) -> None:
    old, nodes, edges = parted(typed())
    graph = Graph.from_pyg(old, time="time").with_seeds("paper")
    if is_saved:
        graph = _saved(graph, tmp_path / "graph").with_seeds("paper")
    for kind, content in nodes.items():
        graph = graph.extended({kind: content}, new_types=["editor"] if kind == "editor" else [])
    for kind, content in edges.items():
        half = content["edge_index"].shape[1] // 2
        for some in (slice(half), slice(half, None)):
            new_types = [] if kind in graph.types.edge_types else [kind]
            graph = graph.extended(edges={kind: {n: v[..., some] for n, v in content.items()}}, new_types=new_types)
    assert graph.types.seeds == "paper" and graph.version == len(nodes) + 2 * len(edges)
    check_equal(graph, Graph.from_pyg(in_turn(old, edges), time="time"))
    assert graph.nodes_since(0, "paper").tolist() == [30, 31, 32, 33] and not len(graph.nodes_since(1, "paper"))


def test_masks_and_labels_that_are_left_out_are_none() -> None:
    graph = Graph.from_pyg(untyped()).extended({"x": torch.ones(2, 3, dtype=torch.float64)})
    assert graph.node_arrays["y"][-2:].tolist() == [-1, -1] and not graph.node_arrays["train_mask"][-2:].any()
    assert graph.num_nodes == 42 and graph.degrees()[-2:].tolist() == [0, 0]


def test_files_of_a_saved_graph_stay_what_they_were(tmp_path: Path) -> None:
    graph = _saved(Graph.from_pyg(untyped()), tmp_path / "graph")
    files = {file: file.read_bytes() for file in (tmp_path / "graph").rglob("*.npy")}
    graph.extended({"x": torch.ones(2, 3, dtype=torch.float64)}).updated({"n_id": [0], "y": torch.tensor([3])})
    assert all(file.read_bytes() == content for file, content in files.items())
    assert Graph.open(tmp_path / "graph").node_arrays["y"][0] == 3


@pytest.mark.parametrize(
    ("nodes", "edges", "says"),
    [
        (None, None, "Nothing changes"),
        ({"y": torch.zeros(2, dtype=torch.int64)}, None, "new nodes have no x"),
        ({"x": torch.zeros(2, 3)}, None, "x holds torch.float32 .* torch.float64"),
        ({"x": torch.zeros(2, 4).double()}, None, r"rows of shape \(4,\)"),
        ({"x": torch.full((2, 3), float("nan")).double()}, None, "NaN"),
        ({"x": torch.zeros(2, 3).double(), "z": torch.zeros(2)}, None, "have no z"),
        ({"paper": {"x": torch.zeros(2, 3)}}, None, "paper"),
        (None, torch.tensor([[0], [1]]), "new edges have no edge_weight"),
        (None, {"edge_index": torch.tensor([[0], [40]]), "edge_weight": torch.ones(1)}, "names the receiver 40"),
        (None, {"edge_index": torch.tensor([[-1], [4]]), "edge_weight": torch.ones(1)}, "names the sender -1"),
        (None, {"edge_weight": torch.ones(1)}, "no edge_index"),
        ({"num_nodes": 0}, None, "num_nodes"),
    ],
)
def test_what_does_not_fit_is_refused(nodes: object, edges: object, says: str, tmp_path: Path) -> None:
    graph = _saved(Graph.from_pyg(untyped()), tmp_path / "graph")
    with pytest.raises((ValueError, TypeError), match=says):
        graph.extended(nodes, edges)
    assert Graph.open(tmp_path / "graph").version == 0


def test_types_must_be_named_and_fit() -> None:
    graph = Graph.from_pyg(parted(typed())[0])
    with pytest.raises(TypeError, match="by type"):
        graph.extended(torch.ones(2, 3))
    at_desk, ends = ("desk", "has", "paper"), torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match="names the node type 'desk'"):
        graph.extended(edges={at_desk: ends}, new_types=[at_desk])
    for nodes, more, says in (
        (
            {"papr": {"x": torch.ones(1, 4)}},
            None,
            r"^nodes: there is no type 'papr' .*misspelt\? .*=\['papr'\]",
        ),
        (None, {("author", "write", "paper"): ends}, r"^edges: there is no type \('author', 'write', 'paper'\)"),
    ):
        with pytest.raises(ValueError, match=says):
            graph.extended(nodes, more)
    with pytest.raises(ValueError, match=r"^new_types: 'paper' is there already, or nothing of it is given"):
        graph.extended(edges={WRITES: ends}, new_types=["paper"])
    pairs = {"edge_index": torch.tensor([[0], [99]]), "time": torch.tensor([1])}
    with pytest.raises(ValueError, match=r"data\['author', 'writes', 'paper'\].*receiver 99.*'paper'"):
        graph.extended(edges={WRITES: pairs})
    with pytest.raises(ValueError, match=r"data\['author'\]: new nodes have no x"):
        graph.extended({"author": {"num_nodes": 2}})
