"""Arrays of nodes change, and nodes and edges go; the ids of all nodes stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph.convert import quantize_rows
from tests.graph.changing.whole import CITES, WRITES, in_turn, parted, typed, untyped
from tests.graph.equal import check_equal


@pytest.fixture(params=["in RAM", "saved"])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> Graph:
    made = Graph.from_pyg(untyped())
    if request.param == "in RAM":
        return made
    made.save(tmp_path / "graph")
    return Graph.open(tmp_path / "graph")


def test_rows_change(graph: Graph) -> None:
    rows = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    mask = torch.tensor([False, True])
    changed = graph.updated({"n_id": torch.tensor([39, 2]), "x": rows, "train_mask": mask})
    data = untyped()
    data.x[39], data.x[2], data.train_mask[39], data.train_mask[2] = rows[0], rows[1], False, True
    check_equal(changed, Graph.from_pyg(data))
    check_equal(graph, Graph.from_pyg(untyped()))
    assert changed.version == 1 and changed.node_arrays["y"] is not None
    if graph.path is None:
        assert changed.indices is graph.indices and changed.node_arrays["y"] is graph.node_arrays["y"]


def test_new_nodes_may_change_as_well(graph: Graph) -> None:
    changed = graph.extended({"x": torch.zeros(2, 3).double()}).updated({"n_id": [41, 0], "y": torch.tensor([2, 3])})
    assert changed.node_arrays["y"][[0, 40, 41]].tolist() == [3, -1, 2]


def test_edges_go(graph: Graph) -> None:
    data = untyped()
    gone = data.edge_index[:, [0, 7, 99]]
    stays = ~(data.edge_index[:, :, None] == gone[:, None]).all(0).any(1)
    data.edge_index, data.edge_weight = data.edge_index[:, stays], data.edge_weight[stays]
    check_equal(graph.removed(edges=gone), Graph.from_pyg(data))


def test_nodes_go_with_their_edges_and_keep_their_ids(graph: Graph) -> None:
    data = untyped()
    stays = ~torch.isin(data.edge_index, torch.tensor([0, 5, 39])).any(0)
    data.edge_index, data.edge_weight = data.edge_index[:, stays], data.edge_weight[stays]
    data.train_mask[[0, 5, 39]] = False
    changed = graph.removed(nodes=[5, 39, 0])
    check_equal(changed, Graph.from_pyg(data))
    assert changed.num_nodes == 40


def test_what_came_may_go_and_come_again(graph: Graph) -> None:
    pair = {"edge_index": torch.tensor([[40, 3], [3, 40]]), "edge_weight": torch.tensor([1.0, 2.0])}
    grown = graph.extended({"x": torch.ones(1, 3).double()}, pair)
    without = grown.removed(edges=torch.tensor([[40], [3]]))
    assert without.degrees()[[3, 40]].tolist() == [int(graph.degrees()[3]), 1]
    again = without.extended(edges={name: value[..., :1] for name, value in pair.items()})
    assert again.fingerprint == grown.fingerprint and again.version == 3


def test_types_lose_edges_and_nodes_each(tmp_path: Path) -> None:
    old, _, edges = parted(typed())
    whole = in_turn(old, edges)
    gone = whole[WRITES].edge_index[:, [3, 50]]
    for kind in whole.edge_types:
        source, target = whole[kind].edge_index
        stays = torch.ones(len(source), dtype=torch.bool)
        for ends, end_type in ((source, kind[0]), (target, kind[2])):
            stays &= ~torch.isin(ends, torch.tensor([33, 4])) if end_type == "paper" else True
        if kind == WRITES:
            stays &= ~(whole[kind].edge_index[:, :, None] == gone[:, None]).all(0).any(1)
        for name, value in whole[kind].items():
            whole[kind][name] = value[..., stays]
    whole["paper"].train_mask[[33, 4]] = False
    Graph.from_pyg(old, time="time").save(tmp_path / "graph")
    for graph in (Graph.from_pyg(old, time="time"), Graph.open(tmp_path / "graph")):
        nodes, more = parted(typed())[1:]
        changed = (
            graph.extended(nodes, more, ["editor"])
            .removed({"paper": [33, 4]}, None)
            .removed(edges={WRITES: gone[:, ~torch.isin(gone[1], torch.tensor([33, 4]))]})
        )
        check_equal(changed, Graph.from_pyg(whole, time="time"))


def test_what_does_not_fit_is_refused(graph: Graph) -> None:
    for nodes, says in (
        ({"x": torch.zeros(1, 3)}, "no n_id"),
        ({"n_id": [1]}, "no array changes"),
        ({"n_id": [40], "y": torch.tensor([1])}, "names the node 40"),
        ({"n_id": [1, 1], "y": torch.tensor([1, 2])}, "repeatedly"),
        ({"n_id": [1], "y": torch.tensor([1.0])}, "torch.float32"),
        ({"n_id": [1], "z": torch.tensor([1])}, "no z"),
        ({"n_id": [1], "y": torch.tensor([1, 2])}, "1 nodes"),
    ):
        with pytest.raises(ValueError, match=says):
            graph.updated(nodes)
    free = next((a, b) for a in range(40) for b in range(40) if [a, b] not in untyped().edge_index.T.tolist())
    with pytest.raises(ValueError, match=f"no edge from {free[0]} to {free[1]}"):
        graph.removed(edges=torch.tensor(free)[:, None])
    with pytest.raises(ValueError, match="edge_weight"):
        graph.removed(edges={"edge_index": untyped().edge_index[:, :1], "edge_weight": torch.ones(1)})
    with pytest.raises(ValueError, match="names the node -1"):
        graph.removed(nodes=[-1])
    if graph.path is not None:
        assert Graph.open(graph.path).version == 0


def test_a_node_that_a_mask_marks_has_a_label(graph: Graph) -> None:
    marked, free = untyped().train_mask.nonzero()[3].item(), (~untyped().train_mask).nonzero()[2].item()

    later = Graph.from_pyg(untyped()).updated({"n_id": [free], "y": torch.tensor([-1])})
    for changed, nodes, node in (
        (graph, {"n_id": [free, marked], "y": torch.tensor([-1, -1])}, marked),
        (later, {"n_id": [marked, free], "train_mask": torch.tensor([False, True])}, free),
    ):
        with pytest.raises(ValueError, match=rf"^train_mask marks node {node}, which has no label \(y is -1\)"):
            changed.updated(nodes)
    with pytest.raises(ValueError, match=r"x of node 7 holds NaN"):
        later.updated({"n_id": [3, 7], "x": torch.tensor([[1.0] * 3, [float("nan")] * 3]).double()})
    data = untyped()
    data.y = torch.rand(40, 1)
    floats = Graph.from_pyg(data, float_labels=True)
    with pytest.raises(ValueError, match=rf"train_mask marks node {marked}, which has no label \(y is \[nan\]"):
        floats.updated({"n_id": [marked], "y": torch.full((1, 1), float("nan"))})
    with pytest.raises(ValueError, match=r"train_mask marks node 40, which has no label"):
        later.extended({"x": torch.ones(1, 3).double(), "train_mask": torch.tensor([True])})


def test_what_orders_edges_stays_and_scales_go_with_integers() -> None:
    graph = Graph.from_pyg(typed(), time="time")
    with pytest.raises(ValueError, match="orders their edges"):
        graph.updated({"paper": {"n_id": [1], "time": torch.tensor([3])}})
    data = untyped()
    data.x, data.x_scale = quantize_rows(data.x)
    with pytest.raises(ValueError, match="belong together"):
        Graph.from_pyg(data).updated({"n_id": [1], "x": data.x[:1]})
    assert CITES in graph.types.edge_types
