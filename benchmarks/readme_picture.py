"""The picture of README.md: test accuracy over bytes sent, of the strategies as users get them.

    python benchmarks/readme_picture.py benchmarks/results/frontier.jsonl docs/assets/accuracy-over-bytes.svg

The mean over the five generated graphs of ``frontier.py`` with their first seed, which all settings were run with:
eight ranks, GraphSAGE of two layers, 200 steps. The paper is painted: words have the same contrast, 4.5 at least, on a
page in the dark. Drawn by matplotlib: ``pip install ".[plots]"``.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 12}

GRAPHS = ("plain", "few edges inside", "dense", "many classes", "few labels")
LOWEST, HIGHEST = 40.0, 74.0  # percent of the test nodes
FEWEST, MOST = 0.015, 1.3  # of the bytes of Grappa
GREY, PAPER = "#5b6470", "#ffffff"
LEVEL = "one process"


class Point(NamedTuple):
    """One setting of ``frontier.py``, and where its label lies from its point, in points."""

    setting: str
    steps: int
    label: str
    right: float
    up: float
    anchor: str = "center"


# A colour, and the points of a curve. Labels lie where they cross nothing.
CURVES: list[tuple[str, list[Point]]] = [
    ("#2563c9", [Point("Grappa", 10, "Grappa", 10, 9, "right")]),
    (
        "#1d7a38",
        [Point("LLCG", 50, "LLCG, every 50 steps", -10, 26), Point("LLCG", 10, "every 10 steps", 33, 10)],
    ),
    (
        "#b35300",
        [
            Point("averaging", 50, "averaging, super-nodes, every 50 steps", -4, -21, "left"),
            Point("averaging", 10, "every 10 steps", 10, -9, "left"),
        ],
    ),
    (
        "#c0304a",
        [
            Point("averaging, METIS", 50, "averaging, METIS parts, every 50 steps", 10, -10, "left"),
            Point("averaging, METIS", 10, "every 10 steps", 10, -4, "left"),
        ],
    ),
]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The first run of every setting on every generated graph."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["graph"] in GRAPHS and row["model"] == "sage" and row["seed"] == 0]


def measured(rows: list[dict[str, Any]], setting: str, steps: int = 10) -> tuple[float, float]:
    """The share of Grappa's bytes, and the accuracy in percent, as means over the graphs."""
    gradients = {row["graph"]: row["bytes"] for row in rows if row["setting"] == "Grappa"}
    own = {row["graph"]: row for row in rows if (row["setting"], row["steps"]) == (setting, steps)}
    share = statistics.mean(own[graph]["bytes"] / gradients[graph] for graph in GRAPHS)
    return share, 100 * statistics.mean(own[graph]["test"] for graph in GRAPHS)


def draw_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set(xlim=(FEWEST, MOST), ylim=(LOWEST, HIGHEST))
    shares, accuracies = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), range(int(LOWEST), int(HIGHEST) + 1, 10)
    axes.set_xticks(shares, [f"{100 * share:.0f} %" for share in shares])
    axes.set_yticks(accuracies, [f"{accuracy} %" for accuracy in accuracies])
    axes.minorticks_off()
    axes.tick_params(length=0, labelcolor=GREY)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=GREY, alpha=0.3)
    axes.set_xlabel("bytes sent, on a logarithmic scale; gradients at every step are 100 %", color=GREY)


def draw_curve(axes: Axes, rows: list[dict[str, Any]], colour: str, points: list[Point]) -> None:
    at = [measured(rows, point.setting, point.steps) for point in points]
    axes.plot(*zip(*at, strict=True), color=colour, marker="o", markersize=10, linewidth=1.9)
    for place, point in zip(at, points, strict=True):
        label(axes, f"{point.label}: {place[1]:.0f} %", place, (point.right, point.up), colour, point.anchor)


def label(
    axes: Axes, words: str, place: tuple[float, float], offset: tuple[float, float], colour: str, anchor: str = "left"
) -> None:
    paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # no line of the grid crosses words
    axes.annotate(words, place, offset, textcoords="offset points", ha=anchor, color=colour, bbox=paper)


def picture(results: Path) -> Figure:
    """The picture; one process sends nothing, and is a level to compare the others with."""
    rows = rows_of(results)
    figure = Figure(figsize=(7.9, 4.1), facecolor=PAPER, layout="constrained")
    figure.suptitle("Test accuracy over bytes sent, eight ranks", x=0.01, ha="left", weight="bold", color=GREY)
    axes = figure.subplots()
    draw_axes(axes)
    _, level = measured(rows, LEVEL)
    axes.axhline(level, color=GREY, linestyle="--", linewidth=1.5)
    label(axes, f"{LEVEL}: {level:.0f} %", (FEWEST, level), (6, 7), GREY)
    for colour, points in CURVES:
        draw_curve(axes, rows, colour, points)
    return figure


if __name__ == "__main__":
    picture(Path(sys.argv[1])).savefig(sys.argv[2], metadata={"Date": None})
