"""The table of runs on a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gnn_dist.callbacks.record import RunRecord
from lightning_gnn_dist.pictures.charts import unit_of

_AT_BOUNDARY, _FETCHED = "MB at boundary", "MB fetched"


def table_of(records: Mapping[str, RunRecord], metric: str) -> list[list[str]]:
    """A table with a line of titles and a line for each run."""
    unit = unit_of(records)
    lines = [_line_of(name, record, metric, unit) for name, record in records.items()]
    if not any(record.boundary_bytes for record in records.values()):
        for line in lines:
            del line[_AT_BOUNDARY]
    if not any(record.fetched_bytes for record in records.values()):
        for line in lines:
            del line[_FETCHED]
    return [list(lines[0]), *(list(line.values()) for line in lines)]


def _line_of(name: str, record: RunRecord, metric: str, unit: str) -> dict[str, str]:
    """What stands under each title. A new column is a new line here."""
    values = [value for *_, value in record.of_metric(metric)]
    sent = record.bytes_sent
    return {
        "run": name if record.finished else f"{name} (did not end)",
        "strategy": record.strategy,
        "partitioner": record.partitioner,
        "ranks": str(record.num_ranks),
        f"{unit}s".replace(" or", "s or"): str(max((len(rows) for rows in record.ranks), default=0)),
        "seconds": f"{record.rounds[-1].elapsed:.1f}" if record.rounds else "-",
        "MB sent": f"{sent[-1] / 1e6:.2f}" if sent else "-",
        _AT_BOUNDARY: f"{record.boundary_bytes / 1e6:.2f}",
        _FETCHED: f"{record.fetched_bytes / 1e6:.2f}",
        "cut": f"{record.parts.cut_ratio:.1%}" if record.parts else "-",
        f"last {metric}": f"{values[-1]:.4f}" if values else "-",
        "best": f"{_best(values, metric):.4f}" if values else "-",
    }


def _best(values: Sequence[float], metric: str) -> float:
    """The best value of a metric: the smallest of losses and errors, otherwise the largest."""
    return min(values) if any(word in metric.lower() for word in ("loss", "err")) else max(values)
