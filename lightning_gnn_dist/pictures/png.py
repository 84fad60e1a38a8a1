"""Charts as PNG, for papers and slides, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.pictures.charts import Bars, Chart, HeatMap, Lines, of_all, of_run
from lightning_gnn_dist.pictures.svg import COLOURS

DOTS_PER_INCH = 150


def write_pngs(records: Mapping[str, RunRecord], metric: str, folder: Path) -> list[Path]:
    """Write a file for each chart, first those that compare runs, then those of each run; return their paths."""
    figures = _figures()
    folder.mkdir(parents=True, exist_ok=True)
    charts: list[tuple[str, Chart]] = [(f"all-{number}", chart) for number, chart in enumerate(of_all(records, metric))]
    for run, record in enumerate(records.values()):
        charts += [(f"run{run}-{number}", chart) for number, chart in enumerate(of_run(record))]
    return [_write(figures, chart, folder / f"{name}.png") for name, chart in charts]


def _figures() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ModuleNotFoundError(
            'PNGs are drawn by matplotlib, which is not installed: pip install "lightning-gnn-dist[plots]". The page '
            "needs none."
        ) from error
    return figure


def _write(figures: Any, chart: Chart, path: Path) -> Path:
    figure = figures.Figure(figsize=(5, 3.6), layout="constrained")  # no pyplot: nothing global, and no display
    axes = figure.add_subplot()
    axes.set_title(chart.title)
    if isinstance(chart, Lines):
        _lines(axes, chart)
    elif isinstance(chart, HeatMap):
        figure.colorbar(_heat_map(axes, chart))
    else:
        _bars(axes, chart)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    return path


def _lines(axes: Any, chart: Lines) -> None:
    for number, line in enumerate(chart.lines):
        across, up = ([point[axis] for point in line.points] for axis in (0, 1))
        axes.plot(across, up, marker="o", markersize=3, label=line.name, color=COLOURS[number % len(COLOURS)])
    if chart.counts:
        axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _heat_map(axes: Any, chart: HeatMap) -> Any:
    cells = [[float("nan") if cell is None else cell for cell in row] for row in chart.cells]
    limits = {"vmin": 0.0, "vmax": 1.0} if chart.as_share else {"vmin": 0.0}
    image = axes.imshow(cells, aspect="auto", cmap="Blues", interpolation="nearest", **limits)
    for axis, names, label in ((axes.xaxis, chart.columns, chart.x_label), (axes.yaxis, chart.rows, chart.y_label)):
        shown = range(0, len(names), len(names) // 12 + 1)
        axis.set_ticks(list(shown), labels=[names[index] for index in shown])
        axis.set_label_text(label)
    return image


def _bars(axes: Any, chart: Bars) -> None:
    start = [0.0] * len(chart.rows)
    for number, piece in enumerate(chart.pieces):
        lengths = [row[number] for row in chart.lengths]
        axes.barh(chart.rows, lengths, left=start, label=piece, color=COLOURS[number % len(COLOURS)])
        start = [begin + length for begin, length in zip(start, lengths, strict=True)]
    if chart.totals:
        axes.bar_label(axes.containers[-1], [f"{total:.4g}" for total in start], padding=3)
        axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit)
    if chart.legend:
        axes.legend(fontsize="x-small", ncols=3)
