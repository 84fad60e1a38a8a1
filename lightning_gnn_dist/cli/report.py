"""``lightning-gnn-dist report``: draw a page about runs, from the files of RunReport in their directories."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

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


def names_of(folders: Sequence[Path]) -> list[str]:
    """What tells paths apart: ``llcg`` and ``grappa`` of ``runs/llcg/v0`` and ``runs/grappa/v0``."""
    parts = [folder.resolve().parts for folder in folders]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    most = min(map(len, parts)) - 1
    first = next((at for at in range(most) if len({own[at] for own in parts}) > 1), most)
    last = next((at for at in range(most - first) if len({own[-1 - at] for own in parts}) > 1), most - first)
    return ["/".join(own[first : len(own) - last]) for own in parts]


def _draw(options: argparse.Namespace) -> None:
    folders = list(dict.fromkeys(options.runs))
    records = {name: RunRecord.load(folder) for name, folder in zip(names_of(folders), folders, strict=True)}
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
