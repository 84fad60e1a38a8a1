"""The training cut of a database, and times of one unit in all of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import NEVER, as_told
from lightning_gnn_dist.prepare.databases.cells import CellTable, as_times
from lightning_gnn_dist.prepare.databases.manifest import Manifest, TaskSpec

BYTES = 1 << 26  # that a piece of a table of questions may take
UNITS = (
    (10**8, "small numbers, such as days"),
    (10**11, "seconds"),
    (10**14, "milliseconds"),
    (10**17, "microseconds"),
)


@dataclass
class Span:
    """The first and the last of times that come piece by piece, whether they are dates, and how many are missing."""

    first: int = NEVER
    last: int = -NEVER
    are_dates: bool = False
    num_missing: int = 0

    def add(self, times: Column, *, are_dates: bool) -> None:
        """Look at the times of some rows."""
        known = times[times != NEVER]
        self.num_missing += times.size - known.size
        self.first, self.last = int(known.min(initial=self.first)), int(known.max(initial=self.last))
        self.are_dates = are_dates

    @property
    def fact(self) -> tuple[int, int, bool] | None:
        """What is to be known of them, if there are any."""
        return None if self.first == NEVER else (self.first, self.last, self.are_dates)


def cut_of(manifest: Manifest) -> int | None:
    """The time from which on rows are in no statistics: as told, or that of the first question to validate."""
    if manifest.val_time is not None:
        return manifest.val_time
    return min(
        (_first_of(task) for task in manifest.tasks.values() if task.time_col and "val" in task.files), default=None
    )


def _first_of(task: TaskSpec) -> int:
    assert task.time_col is not None
    path = task.files["val"]
    table = CellTable(path, [task.time_col], BYTES, lambda share: None)
    return min(int(as_times(task.time_col, piece[task.time_col], path, first)[0].min()) for first, piece in table)


def span_of(manifest: Manifest, facts: Mapping[str, Mapping[str, Any]]) -> float:
    """The time from the earliest row to the cut, or to the latest row. Times of several units are refused.

    Args:
        manifest: What is known of the tables.
        facts: What reading each table has told: ``times``, its first time, its last, and whether they are dates.
    """
    found = {name: told["times"] for name, told in facts.items() if told.get("times")}
    if not found:
        return 1.0
    units = {name: "seconds" if is_dates else _unit(last) for name, (_, last, is_dates) in found.items()}
    told = {name: f"{name} ({as_told(first, d)} to {as_told(last, d)})" for name, (first, last, d) in found.items()}
    (one, unit), *others = units.items()
    for other, another in others:
        if another != unit:
            raise ValueError(
                f"{manifest.path}: times of {told[one]} are {unit}, and those of {told[other]} {another}: give all in "
                "one unit, or as dates."
            )
    earliest, latest, cut = (
        min(span[0] for span in found.values()),
        max(span[1] for span in found.values()),
        cut_of(manifest),
    )
    if cut is not None and not earliest < cut <= latest:
        are_dates = any(span[2] for span in found.values())
        at, first, last = (as_told(time, are_dates) for time in (cut, earliest, latest))
        raise ValueError(
            f"{manifest.path}: val_timestamp ({at}) is not among the times of rows and questions, {first} to {last}: "
            "rows before it are trained on, and later ones judge."
        )
    return float(max((latest if cut is None else cut) - earliest, 1))


def _unit(time: int) -> str:
    return next((name for most, name in UNITS if abs(time) < most), "nanoseconds")
