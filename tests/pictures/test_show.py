"""Pictures for notebooks: one file of SVG, which says what the charts of a page say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from lightning_gnn_dist import MetisPartitioner, RandomPartitioner, communities
from lightning_gnn_dist.partition.partition_report import PartitionReport
from lightning_gnn_dist.pictures import show
from lightning_gnn_dist.pictures.charts import Bars, HeatMap
from tests.pictures.records import record

SVG = "{http://www.w3.org/2000/svg}"


def test_parts_are_drawn_side_by_side_in_one_file() -> None:
    graph = communities(400, 4, num_features=2)
    cuts = {"METIS": MetisPartitioner()(graph, 3, seed=0), "random": RandomPartitioner()(graph, 3, seed=0)}
    pictures = show.parts(graph, cuts)
    (metis, random), (labels, _) = pictures.rows
    assert isinstance(metis, HeatMap) and isinstance(random, HeatMap) and isinstance(labels, Bars)
    report: PartitionReport = cuts["METIS"].report(graph)
    assert metis.title == f"METIS: Edges between parts: {report.cut_ratio:.1%} are cut"
    inside = sum(graph.degrees()[cuts["METIS"].nodes(part)].sum() * (metis.cells[part][part] or 0) for part in range(3))
    assert float(inside) == pytest.approx(int(report.inside_edges.sum()))
    root = ElementTree.fromstring(pictures._repr_svg_())
    assert repr(pictures) == "Pictures(4 charts)" and len(root.findall(f"{SVG}svg")) == 4
    assert {(each.get("x"), each.get("y") == "0") for each in root.findall(f"{SVG}svg")} == {
        (x, is_first) for x in ("0", "484") for is_first in (True, False)
    }


def test_runs_are_drawn_by_round_and_over_bytes() -> None:
    alone = record(1)
    alone = replace(alone, ranks=[[replace(row, bytes_sent=0.0) for row in alone.ranks[0]]])
    ((by_round, over_bytes),) = show.runs({"one": alone, "three": record()}, "accuracy").rows
    assert (by_round.title, over_bytes.title) == ("accuracy by round", "accuracy over bytes")
    last = record().of_metric("accuracy")[-1][2]
    assert over_bytes.lines[0].points == [(0.0, last), (17.0, last)]  # it sends nothing: a level to compare with


def test_a_metric_that_no_run_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"metric names 'f1', which no run has measured: they have \['accuracy', 'val"):
        show.runs({"a": record()}, "f1")
