"""What the report of a typed graph says, on a graph where one can count."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import HeteroData

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.graph import rows as rows_module
from lightning_gnn_dist.graph.graph_report import GraphReport, TypesReport, report_of


@pytest.fixture
def graph() -> Graph:
    """Authors 0 and 1 write paper 0, author 1 writes paper 1 twice; paper 2 cites 0; nobody is at the venue."""
    data = HeteroData()
    data["paper"].x, data["paper"].y = torch.ones(3, 4), torch.tensor([0, 2, -1])
    data["paper"].train_mask = torch.tensor([True, True, False])
    data["author"].num_nodes, data["venue"].num_nodes = 2, 1
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    data["author", "writes", "paper"].time = torch.tensor([4, 3, 2, 1])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[2], [0]])
    data["paper", "at", "venue"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return Graph.from_pyg(data, time="time")


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_it_counts_by_type(graph: Graph, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "EDGES_PER_PIECE", at_once)
    report = report_of(graph)
    assert isinstance(report, TypesReport)
    assert [(row.name, row.count, row.num_classes) for row in report.nodes] == [
        ("paper", 3, 2),
        ("author", 2, None),
        ("venue", 1, None),
    ]
    assert report.nodes[0].splits == {"train": 2} and report.nodes[0].arrays["x"] == "float32 x 4"
    assert [(row.count, row.receivers, row.most) for row in report.edges] == [(4, 2, 2), (1, 1, 1), (0, 0, 0)]
    assert report.num_bytes == graph.num_bytes and report.edges[0].num_bytes == 4 * (4 + 1 + 8)


def test_it_reads(graph: Graph) -> None:
    lines = str(report_of(graph)).splitlines()
    assert lines[0] == "6 nodes of 3 types, 5 edges of 3 types, 0.0 MB"
    assert " ".join(lines[2].split()) == "paper 3 0.0 2 train 2 classes x (float32 x 4), y (int64), train_mask (bool)"
    assert " ".join(lines[6].split()) == "author writes paper 4 0.0 67% of paper 2 time (int64)"
    assert lines[-1] == "edges of one type into a node are in order of time, then the sender"


def test_a_graph_without_types_has_its_own() -> None:
    assert isinstance(report_of(communities(60, 2)), GraphReport)
