"""What the report of a graph says, on graphs where one can count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.graph import graph_report as report_module
from lightning_gnn_dist.graph.graph_report import GraphReport


@pytest.fixture
def star() -> Graph:
    """Nodes 1 to 4 send to node 0, and node 0 to node 1; node 5 is alone."""
    arrays = {"y": torch.tensor([0, 0, 1, -1, 0, 2]), "train_mask": torch.tensor([True] + [False] * 5)}
    return Graph.from_edge_index(torch.tensor([[1, 2, 3, 4, 0], [0, 0, 0, 0, 1]]), 6, arrays)


def test_it_counts(star: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "EDGES_AT_ONCE", 2)
    report = GraphReport.of(star)
    assert (report.num_nodes, report.num_edges, report.num_bytes) == (6, 5, star.num_bytes)
    assert report.degrees == (0, 1, 4) and report.without_neighbors == 4
    assert not report.is_balanced
    assert report.same_label == 3 / 4  # the edge from the unlabelled node is left out
    assert report.num_classes == 3 and report.splits == {"train": 1}


def test_it_reads(star: Graph) -> None:
    text = str(GraphReport.of(star))
    assert "6 nodes, 5 edges" in text and "y (int64 [6])" in text
    assert "directed: not every edge has its reverse" in text
    assert "3 classes, 75% of the edges between nodes of one label" in text
    assert "split: 1 train (16.7%)" in text


def test_a_graph_on_disk_reports_the_same(tmp_path: Path) -> None:
    graph = communities(500)
    graph.save(tmp_path / "graph")
    report = GraphReport.of(Graph.open(tmp_path / "graph"))
    assert str(report) == str(GraphReport.of(graph))
    assert report.is_balanced


def test_labels_may_be_absent() -> None:
    report = GraphReport.of(Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"y": torch.rand(2)}))
    assert report.num_classes is report.same_label is None and "labels" not in str(report)
