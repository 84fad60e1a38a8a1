"""The picture of peers side by side, of what run.py has printed.

    python benchmarks/peers/picture.py benchmarks/results/peers.txt docs/assets/peers.svg

A chart for each part that was measured, by the package's own charts. Less is better in all.
"""

from __future__ import annotations

import sys
from functools import reduce
from pathlib import Path

from lightning_gnn_dist.pictures.charts import Bars
from lightning_gnn_dist.pictures.svg import together

PARTS = ("batches", "partitions", "accuracy", "hosts")
Row = dict[str, str]


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
        title, unit = "A batch of 1,024 seeds, 3 hops", "CPU milliseconds"
        charts.append(Bars(title, unit, pieces, names_of(rows), lengths, totals=True))
    for part, title, unit, column in (
        ("partitions", "Two METIS parts", "CPU seconds", "CPU-s"),
        ("accuracy", "Until a model has learned", "CPU seconds", "CPU-s to the target, median"),
        ("hosts", "Passes on two hosts", "MB of a host, both ways", "MB of host 1, both ways, whole run"),
    ):
        # A limit of the rate changes no byte.
        rows = [row for row in tables.get(part, []) if row.get("limit", "none") == "none"]
        if rows:
            lengths = [[number(row[column])] for row in rows]
            charts.append(Bars(title, unit, [unit], names_of(rows), lengths, totals=True))
    return charts


def names_of(rows: list[Row]) -> list[str]:
    """The ways as they are called in a chart, which has little room."""
    short = {"DGL 2.1.0, ids of": "DGL,", "with edge_index": "edge_index", "dgl": "DGL"}
    return [reduce(lambda name, word: name.replace(word, short[word]), short, row[""]) for row in rows]


def picture(printed: str) -> str:
    """The picture as a file of SVG, two charts in a row."""
    charts = charts_of(tables_of(printed))
    if not charts:
        raise SystemExit("There is no table of run.py in this file: write what it prints there.")
    return together([charts[at : at + 2] for at in range(0, len(charts), 2)]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(Path(sys.argv[1]).read_text()))
