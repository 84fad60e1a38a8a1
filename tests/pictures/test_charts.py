"""What is drawn is what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.pictures.charts import Bars, HeatMap, Lines, metric_of, of_all, of_run
from lightning_gnn_dist.pictures.page import table_of
from tests.pictures.records import record


def charts_of(run: RunRecord) -> dict[str, Bars | HeatMap | Lines]:
    return {chart.title.split(":")[0].split(",")[0]: chart for chart in of_run(run)}


def test_runs_are_compared_over_time_bytes_and_rounds() -> None:
    over_time, over_bytes, over_rounds = of_all({"a": record(), "b": record(counted=False)}, "accuracy")
    assert [line.name for line in over_time.lines] == ["a", "b"]
    assert over_time.lines[0].points[:2] == [(2.5, 0.5), (5.0, 0.75)]
    assert [line.name for line in over_bytes.lines] == ["a"]  # what b sent is not known
    assert over_bytes.lines[0].points[:2] == [(2.0, 0.5), (5.0, 0.75)]  # two ranks, then three
    assert over_rounds.lines[1].points[0] == (1.0, 0.5)


def test_what_has_no_rounds_is_counted_in_epochs() -> None:
    grappa = replace(record(), strategy="GrappaStrategy")
    alone = replace(record(1), strategy="SingleDeviceStrategy")
    assert (record().unit, grappa.unit) == ("round", "epoch")
    assert of_all({"a": grappa, "b": alone}, "accuracy")[2].title == "accuracy by epoch"
    assert of_all({"a": record(), "b": alone}, "accuracy")[2].x_label == "round"
    assert of_all({"a": record(), "b": grappa}, "accuracy")[2].title == "accuracy by round or epoch"
    assert "Batches by rank and epoch" in charts_of(grappa) and "6 epochs" in str(grappa)
    assert "rounds" in table_of({"a": record()}, "accuracy")[0] and "epochs" in table_of({"a": grappa}, "accuracy")[0]


def test_a_metric_that_no_run_has_gives_no_picture() -> None:
    assert of_all({"a": record()}, "f1") == []


def test_batches_of_a_rank_that_came_late_begin_late() -> None:
    chart = charts_of(record(3, 6))["Batches by rank and round"]
    assert isinstance(chart, HeatMap) and chart.columns == ["1", "2", "3", "4", "5", "6"]
    assert chart.cells[0] == [10.0] * 6 and chart.cells[2] == [None, *[12.0] * 5]


def test_many_rounds_share_columns() -> None:
    chart = charts_of(record(2, 300))["Batches by rank and round"]
    assert isinstance(chart, HeatMap) and chart.title.endswith("3 rounds to a column")
    assert len(chart.columns) == 100 and chart.cells[0] == [30.0] * 100 and chart.cells[1][0] == 22.0


def test_a_column_of_the_cut_matrix_adds_up_to_one() -> None:
    chart = charts_of(record(3))["Edges between parts"]
    assert isinstance(chart, HeatMap) and chart.title.endswith("10.0% are cut")
    assert [sum(cell or 0 for cell in column) for column in zip(*chart.cells, strict=True)] == pytest.approx([1.0] * 3)
    assert chart.cells[0] == [0.9, 0.05, 0.05]


def test_labels_are_shares_and_rare_classes_are_put_together() -> None:
    chart = charts_of(record(3, num_classes=17))["Labels of the training nodes"]
    assert isinstance(chart, Bars) and chart.rows == ["part 0", "part 1", "part 2", "graph"]
    assert len(chart.pieces) == 12 and chart.pieces[-1] == "6 others"
    assert [sum(row) for row in chart.lengths] == pytest.approx([1.0] * 4)


def test_the_time_of_a_rank_adds_up() -> None:
    chart = charts_of(record(2, 4))["Where the time went"]
    assert isinstance(chart, Bars) and sum(chart.lengths[0]) == pytest.approx(8.0)
    assert dict(zip(chart.pieces, chart.lengths[0], strict=True))["validation"] == pytest.approx(2.0)


def test_one_process_has_no_parts_to_draw() -> None:
    alone = replace(record(1), parts=None)
    assert charts_of(alone).keys() == {"Where the time went", "Batches by rank and round"}


def test_runs_are_compared_by_what_most_of_them_watch() -> None:
    watching = [replace(record(), monitor=name) for name in (None, "val_loss", "accuracy", "accuracy")]
    assert metric_of({str(place): run for place, run in enumerate(watching)}) == "accuracy"
    with pytest.raises(ValueError, match="No metric was logged in these runs"):
        metric_of({"a": watching[0]})
