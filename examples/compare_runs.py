"""Curves of several runs in one picture, from the files of Lightning's ``CSVLogger``.

    python examples/compare_runs.py runs/llcg/version_0 runs/grappa/version_0 --metric accuracy --out curves.png

``--over comm/bytes_sent`` draws the metric over what a rank has sent, ``--over step`` over its steps. Needs matplotlib:
``pip install ".[plots]"``.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

FILE = "metrics.csv"
Row = dict[str, str]


def rows_of(run: Path) -> list[Row]:
    """The lines of a run's file; ``run`` is the file, or the folder that has it."""
    file = run / FILE if run.is_dir() else run
    if not file.is_file():
        near = sorted(str(found.parent) for found in run.glob(f"*/{FILE}"))
        way_out = f"Did you mean {near[-1]}?" if near else "CSVLogger writes one: Trainer(logger=CSVLogger(...))."
        raise SystemExit(f"There is no file {file}. {way_out}")
    try:
        with file.open(newline="") as lines:
            table = csv.DictReader(lines)
            if "step" not in (table.fieldnames or ()):
                raise ValueError("it has no column 'step'")
            return list(table)
    except (csv.Error, ValueError) as error:
        raise SystemExit(f"{file} is no table of CSVLogger: {error}.") from error


def columns_in_common(runs: dict[str, list[Row]]) -> list[str]:
    """The columns that all runs have numbers in, as the first run orders them."""
    filled = [dict.fromkeys(name for row in rows for name, cell in row.items() if cell) for rows in runs.values()]
    return [name for name in filled[0] if all(name in others for others in filled)]


def metric_of(runs: dict[str, list[Row]], wanted: str | None, over: str) -> str:
    """The column to draw: the one that was asked for, or the first in common that is a metric."""
    common = columns_in_common(runs)
    metrics = [name for name in common if name not in ("epoch", "step", over)]
    if not metrics:
        raise SystemExit(f"These runs have no metric in common: {', '.join(runs)}.")
    for name in (wanted, over):
        if name is not None and name not in common:
            raise SystemExit(f"Not all of these runs have a column {name!r}. In common they have {', '.join(common)}.")
    if wanted is not None:
        return wanted
    return min(metrics, key=lambda name: ("/" in name, "loss" in name))  # the first of those that compare alike


def curve(rows: list[Row], metric: str, over: str) -> tuple[list[float], list[float]]:
    """The points of a run. Lightning writes what belongs to a step in several lines."""
    try:
        places = {row["step"]: float(row[over]) for row in rows if row.get(over)}
        values = {row["step"]: float(row[metric]) for row in rows if row.get(metric)}
    except ValueError as error:
        raise SystemExit(f"A column to draw holds something else than numbers: {error}.") from error
    steps = [step for step in values if step in places]
    return [places[step] for step in steps], [values[step] for step in steps]


def names_of(paths: list[Path]) -> list[str]:
    """What tells the runs apart: ``llcg/version_0`` and ``grappa/version_0`` of two folders in ``runs``."""
    folders = [path.resolve().parent if path.name == FILE else path.resolve() for path in paths]
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(shared)) for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=f"folders with a {FILE}, or such files")
    parser.add_argument("--metric", help="the column to draw (default: the first that all runs have)")
    parser.add_argument("--over", default="epoch", help="the column to draw it over (default: epoch)")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture (default: curves.png)")
    options = parser.parse_args()
    paths = list(dict.fromkeys(options.runs))
    runs = {name: rows_of(path) for name, path in zip(names_of(paths), paths, strict=True)}
    metric = metric_of(runs, options.metric, options.over)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SystemExit('The curves are drawn by matplotlib: pip install ".[plots]".') from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in runs.items():
        axes.plot(*curve(rows, metric, options.over), marker=".", label=name)
    axes.set(xlabel=options.over, ylabel=metric)
    axes.grid(alpha=0.3)
    axes.legend()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(options.out, dpi=150)
    except (ValueError, OSError) as error:
        raise SystemExit(f"{options.out} cannot be written: {error}.") from error
    print(options.out)


if __name__ == "__main__":
    main()
