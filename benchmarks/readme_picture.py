"""The picture of README.md: test accuracy over bytes sent, of the strategies as users get them.

    python benchmarks/readme_picture.py benchmarks/results/frontier.jsonl docs/assets/accuracy-over-bytes.svg

The mean over the five generated graphs of ``frontier.py`` with their first seed, which all settings were run with:
eight ranks, GraphSAGE of two layers, 200 steps. The paper is painted: words have the same contrast, 4.5 at least, on a
page in the dark.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

GRAPHS = ("plain", "few edges inside", "dense", "many classes", "few labels")
WIDTH, HEIGHT = 760, 390
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 62, 66
LOWEST, HIGHEST = 40.0, 74.0  # percent of the test nodes
FEWEST = 0.015  # of the bytes of Grappa
GREY = "#5b6470"
PAPER = '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>'
LEVEL = "one process"


class Point(NamedTuple):
    """One setting of ``frontier.py``, and where its label lies from its point."""

    setting: str
    steps: int
    label: str
    right: float
    down: float
    anchor: str = "middle"


# A colour, and the points of a curve. Labels lie where they cross nothing.
CURVES: list[tuple[str, list[Point]]] = [
    ("#2563c9", [Point("Grappa", 10, "Grappa", 14, -12, "end")]),
    (
        "#1d7a38",
        [Point("LLCG", 50, "LLCG, every 50 steps", -14, -35), Point("LLCG", 10, "every 10 steps", 44, -14)],
    ),
    (
        "#b35300",
        [
            Point("averaging", 50, "averaging, super-nodes, every 50 steps", -6, 28, "start"),
            Point("averaging", 10, "every 10 steps", 14, 12, "start"),
        ],
    ),
    (
        "#c0304a",
        [
            Point("averaging, METIS", 50, "averaging, METIS parts, every 50 steps", 14, 6, "start"),
            Point("averaging, METIS", 10, "every 10 steps", 14, 6, "start"),
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


def pixels(share: float, accuracy: float) -> tuple[float, float]:
    across = math.log(share / FEWEST) / math.log(1.3 / FEWEST)
    up = (accuracy - LOWEST) / (HIGHEST - LOWEST)
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = GREY, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{words}</text>'


def axes() -> list[str]:
    parts = []
    for accuracy in range(int(LOWEST), int(HIGHEST) + 1, 10):
        (left, y), right = pixels(FEWEST, accuracy), WIDTH - RIGHT
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right}" stroke="{GREY}" stroke-opacity=".3"/>')
        parts.append(text(LEFT - 10, y + 5, f"{accuracy} %", "end"))
    for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        parts.append(text(pixels(share, LOWEST)[0], HEIGHT - BOTTOM + 24, f"{share:.0%}".replace("%", " %")))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text(middle, HEIGHT - 14, "bytes sent, on a logarithmic scale; gradients at every step are 100 %"))
    parts.append(text(12, 24, "Test accuracy over bytes sent, eight ranks", "start", more=' font-weight="600"'))
    return parts


def level(accuracy: float) -> list[str]:
    """One process sends nothing: a level to compare the others with."""
    (left, y), right = pixels(FEWEST, accuracy), WIDTH - RIGHT
    line = f'<path d="M{left:.1f} {y:.1f}H{right}" stroke="{GREY}" stroke-width="2" stroke-dasharray="6 5"/>'
    return [line, text(left + 8, y - 10, f"{LEVEL}: {accuracy:.0f} %", "start")]


def curve(rows: list[dict[str, Any]], colour: str, points: list[Point]) -> list[str]:
    at = [pixels(*measured(rows, point.setting, point.steps)) for point in points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>']
    for (x, y), point in zip(at, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" fill="{colour}"/>')
        accuracy = measured(rows, point.setting, point.steps)[1]
        words = f"{point.label}: {accuracy:.0f} %"
        parts.append(text(x + point.right, y + point.down, words, point.anchor, colour))
    return parts


def picture(results: Path) -> str:
    """The picture as a file of SVG."""
    rows = rows_of(results)
    parts = [*axes(), *level(measured(rows, "one process")[1])]
    for colour, points in CURVES:
        parts += curve(rows, colour, points)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    font = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="16"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img">'
    return "\n".join([head, "<title>Test accuracy over bytes sent</title>", PAPER, *parts, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1])))
