"""``lightning-gnn-dist report``: draw a page about runs, from the files of RunReport in their directories."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.cli.values import Commands
from lightning_gnn_dist.pictures.charts import metric_of
from lightning_gnn_dist.pictures.page import page_of
from lightning_gnn_dist.pictures.png import write_pngs


def add_to(commands: Commands) -> None:
    """Declare the command and its options."""
    report = commands.add_parser("report", help="draw runs side by side, on a page that needs nothing else")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="a directory with a report.json")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: report.html)")
    report.add_argument("--png", type=Path, metavar="DIR", help="write the charts as PNG too; needs matplotlib")
    report.add_argument("--metric", help="what to compare by (default: what the runs watch)")
    report.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    try:
        _draw(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"lightning-gnn-dist report: {error}") from error


def _draw(options: argparse.Namespace) -> None:
    records = {str(folder): RunRecord.load(folder) for folder in options.runs}
    metric = options.metric or metric_of(records)
    known = {name for record in records.values() for measured in record.rounds for name in measured.metrics}
    if metric not in known:
        raise ValueError(f"None of these runs has measured {metric!r}: they have {sorted(known)}.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page_of(records, metric), encoding="utf-8")
    print(options.out)
    if options.png is not None:
        for path in write_pngs(records, metric, options.png):
            print(path)
