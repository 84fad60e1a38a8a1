"""``lightning-gnn-dist report``: draw a page about runs, from the files of RunReport in their directories."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.pictures.charts import metric_of
from lightning_gnn_dist.pictures.page import page_of
from lightning_gnn_dist.pictures.png import write_pngs


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
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
