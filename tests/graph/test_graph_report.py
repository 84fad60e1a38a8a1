"""What the report of a graph says, on graphs where one can count."""

from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.graph import graph_report
from lightning_gnn_dist.graph import rows as rows_module
from lightning_gnn_dist.graph.graph_report import report_of


def test_it_counts_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_report, "EDGES_AT_ONCE", 2)
    arrays = {"y": torch.tensor([0, 0, 1, -1, 0, 2]), "train_mask": torch.tensor([True] + [False] * 5)}
    ends = torch.tensor([[1, 2, 3, 4, 0], [0, 0, 0, 0, 1]])  # 1 to 4 send to 0, and 0 to 1; 5 is alone
    lines = report_of(Graph.from_edge_index(ends, 6, arrays)).splitlines()
    assert lines[0] == "6 nodes, 5 edges, 0.0 MB" and "y (int64 [6])" in lines[1]
    assert "0 in the median, at most 1 for nine in ten, 4 at most; 4 nodes have none" in lines[2]
    assert lines[3] == "directed: not every edge has its reverse"
    assert lines[4:] == ["labels: 3 classes, 75% of the edges between nodes of one label", "split: 1 train (16.7%)"]


def test_a_graph_on_disk_reports_the_same(tmp_path: Path) -> None:
    graph = communities(500)
    graph.save(tmp_path / "graph")
    assert report_of(Graph.open(tmp_path / "graph")) == report_of(graph)
    assert "every node sends as many edges as it receives" in report_of(graph)


def test_labels_may_be_absent() -> None:
    report = report_of(Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"y": torch.rand(2)}))
    assert "labels" not in report and report.endswith("split: none")


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_it_counts_by_type(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Authors 0 and 1 write paper 0, author 1 writes paper 1 twice; paper 2 cites 0; nobody is at the venue."""
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", at_once)
    data = HeteroData()
    data["paper"].x, data["paper"].y = torch.ones(3, 4), torch.tensor([0, 2, -1])
    data["paper"].train_mask = torch.tensor([True, True, False])
    data["author"].num_nodes, data["venue"].num_nodes = 2, 1
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    data["author", "writes", "paper"].time = torch.tensor([4, 3, 2, 1])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[2], [0]])
    data["paper", "at", "venue"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    assert [" ".join(line.split()) for line in report_of(Graph.from_pyg(data, time="time")).splitlines()] == [
        "6 nodes of 3 types, 5 edges of 3 types, 0.0 MB",
        "nodes number MB split labels arrays",
        "paper 3 0.0 2 train 2 classes x (float32 x 4), y (int64), train_mask (bool)",
        "author 2 0.0 - - -",
        "venue 1 0.0 - - -",
        "edges number MB received by at most arrays",
        "author writes paper 4 0.0 67% of paper 2 time (int64)",
        "paper cites paper 1 0.0 33% of paper 1 -",
        "paper at venue 0 0.0 0% of venue 0 -",
        "edges of one type into a node are in order of time, then the sender",
    ]
