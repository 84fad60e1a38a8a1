"""The numbers of a report, against counting edge by edge."""

import math
from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, Partition, RandomPartitioner
from lightning_gnn_dist.partition.partition_report import MAX_ROWS
from tests.partition.graphs import label_skew, path_graph, random_directed


@pytest.mark.parametrize("num_parts", [1, 3, 70, 120])
@pytest.mark.parametrize("on_disk", [False, True])
def test_every_number(num_parts: int, on_disk: bool, tmp_path: Path) -> None:
    graph = random_directed()
    if on_disk:
        graph.save(tmp_path / "graph")
        graph = Graph.open(tmp_path / "graph")
    partition = RandomPartitioner()(graph, num_parts, seed=0)
    report = partition.report(graph)
    part = partition.assignment.tolist()
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees()).tolist()
    edges = list(zip(graph.indices.tolist(), receivers, strict=True))
    labelled = graph.node_arrays["train_mask"]
    label = graph.node_arrays["y"][labelled]

    for p in range(num_parts):
        members = {node for node in range(graph.num_nodes) if part[node] == p}
        halo = {u for u, v in edges if v in members and u not in members}
        received = {v for u, v in edges if v in members and u != v}
        received_inside = {v for u, v in edges if v in members and u in members and u != v}
        assert report.nodes[p] == len(members)
        assert report.train_nodes is not None
        assert report.train_nodes[p] == sum(bool(labelled[node]) for node in members)
        assert report.inside_edges[p] == sum(u in members and v in members for u, v in edges)
        assert report.halo_nodes[p] == len(halo)
        assert report.isolated_nodes[p] == len(received - received_inside)
        inside = partition.assignment[labelled] == p
        assert report.label_skew is not None
        if bool(inside.any()):
            assert float(report.label_skew[p]) == pytest.approx(label_skew(label, inside))
        else:
            assert math.isnan(report.label_skew[p])
    cut = sum(part[u] != part[v] for u, v in edges)
    assert report.cut_edges == cut
    assert report.cut_ratio == pytest.approx(cut / len(edges))


def test_labels_count_on_all_labelled_nodes_without_a_train_mask() -> None:
    y = torch.tensor([0, 0, 1, -1, 1, 1])
    graph = Graph.from_edge_index(torch.tensor([[0], [1]]), 6, {"y": y})
    report = Partition(torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.int32), 2).report(graph)
    assert report.train_nodes is None
    assert report.label_skew is not None  # whole: 2/5 and 3/5; parts: 2/3 and 1/3, 0 and 1
    assert report.label_skew.tolist() == pytest.approx([4 / 15, 2 / 5])
    assert report.worst_label_skew == pytest.approx(2 / 5)


def test_labels_of_types_count_one_by_one() -> None:
    """By hand: classes of one type are not those of another, and a chosen type counts alone."""
    data = HeteroData()
    data["a"].y, data["a"].train_mask = torch.tensor([0, 1, 1, -1]), torch.tensor([True, True, True, False])
    data["b"].y, data["b"].train_mask = torch.tensor([0, 0, 1]), torch.tensor([True, False, True])
    data["c"].num_nodes = 2
    data["a", "to", "b"].edge_index = torch.tensor([[0, 3], [1, 2]])
    graph = Graph.from_pyg(data)
    halves = Partition(torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.int32), 2)
    skew = halves.report(graph).label_skew
    assert skew is not None  # a0, a1, a1, b0, b1: the first half has a0, a1 and b0
    assert skew.tolist() == pytest.approx(
        [(2 / 15 + 1 / 15 + 2 / 15 + 1 / 5) / 2, (1 / 5 + 1 / 10 + 1 / 5 + 3 / 10) / 2]
    )
    of_b = halves.report(graph.with_seeds("b")).label_skew
    assert of_b is not None and of_b.tolist() == pytest.approx([1 / 2, 1 / 2])


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"y": torch.rand(6)},
        {"y": torch.zeros(6, 2, dtype=torch.int64)},
        {"y": torch.full((6,), -1)},
        {"y": torch.zeros(6, dtype=torch.int64), "train_mask": torch.zeros(6, dtype=torch.bool)},
    ],
    ids=["no labels", "regression", "many tasks", "all unlabelled", "nobody trains"],
)
def test_without_labels_there_is_no_skew(arrays: dict[str, torch.Tensor]) -> None:
    graph = Graph.from_edge_index(torch.tensor([[0, 3], [1, 4]]), 6, arrays)
    report = Partition(torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32), 2).report(graph)
    assert report.label_skew is None
    assert report.worst_label_skew is None
    assert str(report).endswith("worst label skew -")


def test_a_graph_without_edges() -> None:
    graph = Graph(torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    report = Partition(torch.tensor([0, 1, 0], dtype=torch.int32), 2).report(graph)
    assert (report.cut_edges, report.cut_ratio) == (0, 0.0)
    assert report.isolated_nodes.tolist() == [0, 0]


def test_the_table() -> None:
    edges = torch.tensor([[0, 1, 1, 2, 2, 3, 3], [1, 0, 2, 1, 3, 2, 3]])
    arrays = {"y": torch.tensor([0, 0, 1, 1]), "train_mask": torch.tensor([True, True, True, False])}
    graph = Graph.from_edge_index(edges, 4, arrays)
    report = Partition(torch.tensor([0, 0, 1, 2], dtype=torch.int32), 3).report(graph)
    assert str(report).splitlines() == [
        "part  nodes  training nodes  edges inside  halo nodes  isolated nodes  label skew",
        "   0      2               2             2           1               0       0.333",
        "   1      1               1             0           2               1       0.667",
        "   2      1               0             1           1               1           -",
        "3 parts: 4 of 7 edges cut (57.1%), 2 nodes left without neighbours, worst label skew 0.667",
    ]


def test_columns_that_cannot_be_known_show_a_dash() -> None:
    indices = torch.tensor([1, 0], dtype=torch.int32)
    graph = Graph(torch.tensor([0, 1, 2]), indices)
    lines = str(Partition(torch.tensor([0, 1], dtype=torch.int32), 2).report(graph)).splitlines()
    assert lines[1].split() == ["0", "1", "-", "0", "1", "1", "-"]


def test_a_long_table_is_cut_short() -> None:
    graph = path_graph(MAX_ROWS + 1234)
    partition = RandomPartitioner()(graph, graph.num_nodes, seed=0)
    lines = str(partition.report(graph)).splitlines()
    assert len(lines) == MAX_ROWS + 3
    assert lines[-2] == "... and 1,234 more parts"
