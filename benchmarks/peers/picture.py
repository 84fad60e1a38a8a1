"""The picture of peers side by side, of what run.py has printed.

    python benchmarks/peers/picture.py benchmarks/results/peers.txt docs/assets/peers.svg

A chart for each part that was measured, drawn by matplotlib: ``pip install ".[plots]"``. Less is better in all.
"""

from __future__ import annotations

import sys
from functools import reduce
from math import ceil
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": ""}

PARTS = ("batches", "partitions", "accuracy", "hosts")
Row = dict[str, str]


class Bars(NamedTuple):
    """A bar for each row, made of named pieces; ``lengths`` has a number for each piece of each row."""

    title: str
    unit: str
    pieces: list[str]
    rows: list[str]
    lengths: list[list[float]]


def tables_of(printed: str) -> dict[str, list[Row]]:
    """The table of each part, a row as a mapping from the names of columns; the way that is measured is ``""``."""
    tables: dict[str, list[Row]] = {}
    part, names = "", [""]
    for line in printed.splitlines():
        if line in PARTS:
            part, names = line, []
        elif part and line.startswith("| ") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if names:
                tables.setdefault(part, []).append(dict(zip(names, cells, strict=True)))
            names = names or cells
    return tables


def number(cell: str) -> float:
    """The first number of a cell: of a median, which has its range behind it."""
    return float(cell.split(" ")[0].replace(",", ""))


def charts_of(tables: dict[str, list[Row]]) -> list[Bars]:
    """A chart for each part that was measured."""
    charts = []
    if rows := tables.get("batches"):
        alone, whole = ([number(row[f"{what}, ms"]) for row in rows] for what in ("sampling alone", "whole batch"))
        lengths = [[drawn, max(0.0, both - drawn)] for drawn, both in zip(alone, whole, strict=True)]
        pieces = ["sampling", "features and blocks"]
        charts.append(Bars("A batch of 1,024 seeds, 3 hops", "CPU milliseconds", pieces, names_of(rows), lengths))
    for part, title, unit, column in (
        ("partitions", "Two METIS parts", "CPU seconds", "CPU-s"),
        ("accuracy", "Until a model has learned", "CPU seconds", "CPU-s to the target, median"),
        ("hosts", "Passes on two hosts", "MB of a host, both ways", "MB of host 1, both ways, whole run"),
    ):
        # A limit of the rate changes no byte.
        rows = [row for row in tables.get(part, []) if row.get("limit", "none") == "none"]
        if rows:
            lengths = [[number(row[column])] for row in rows]
            charts.append(Bars(title, unit, [unit], names_of(rows), lengths))
    return charts


def names_of(rows: list[Row]) -> list[str]:
    """The ways as they are called in a chart, which has little room."""
    short = {"DGL 2.1.0, ids of": "DGL,", "with edge_index": "edge_index", "dgl": "DGL"}
    return [reduce(lambda name, word: name.replace(word, short[word]), short, row[""]) for row in rows]


def draw(axes: Axes, chart: Bars) -> None:
    starts = [0.0] * len(chart.rows)
    for name, lengths in zip(chart.pieces, zip(*chart.lengths, strict=True), strict=True):
        bars = axes.barh(chart.rows, lengths, left=starts, label=name)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    axes.bar_label(bars, [f"{total:.4g}" for total in starts], padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_title(chart.title, weight="bold")
    axes.set_xlabel(chart.unit)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.pieces) > 1:
        axes.legend(frameon=False)


def picture(printed: str) -> Figure:
    """The picture, two charts in a row."""
    charts = charts_of(tables_of(printed))
    if not charts:
        raise SystemExit("There is no table of run.py in this file: write what it prints there.")
    figure = Figure(figsize=(9.8, 2.4 * ceil(len(charts) / 2)), layout="constrained")
    places = figure.subplots(ceil(len(charts) / 2), 2, squeeze=False).flat
    for chart, axes in zip(charts, places, strict=False):
        draw(axes, chart)
    for axes in [*places][len(charts) :]:
        axes.remove()
    return figure


if __name__ == "__main__":
    picture(Path(sys.argv[1]).read_text()).savefig(sys.argv[2], metadata={"Date": None})
