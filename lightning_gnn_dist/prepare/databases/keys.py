"""Foreign keys as edges: written down while their table is read, and looked up when all tables have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import ANSWERED, NEVER, TIME
from lightning_gnn_dist.prepare.databases.cells import Cells, CellTable, as_keys, as_times
from lightning_gnn_dist.prepare.files.columns import Places
from lightning_gnn_dist.prepare.files.edge_files import Edges

KEYS = "keys"  # the folder of what foreign keys a table holds, piece by piece


def write_keys(folder: Path, first: int, keys: Column, rows: Column) -> None:
    """Write some keys, and the rows that they stand in, none of which is before the first."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / f"{first:012d}.keys.npy", keys)
    save(folder / f"{first:012d}.rows.npy", rows)


def read_keys(folder: Path) -> Iterator[tuple[Column, Column]]:
    """Yield keys, and the rows that they stand in."""
    for file in sorted(folder.glob("*.keys.npy")):
        yield np.load(file), np.load(file.with_name(file.name.replace(".keys.", ".rows.")))


@dataclass(frozen=True)
class KeyColumn:
    """The foreign keys of a table as edges, between its rows and those that the keys name.

    Args:
        path: The table.
        table: The node type of its rows.
        column: The column of the keys.
        target: The node type that the keys are of, and the name of their own column.
        to_target: Whether rows send to what their keys name, or the other way round.
        may_dangle: Whether keys that name no row are left out, as RelBench does.
        of_question: If a row is a question, whether the key says whom it is ``"about"``, which it sees whenever that
            was, or is its ``"answer"``, which nobody sees.
    """

    path: Path
    table: str
    column: str
    target: tuple[str, str]
    to_target: bool
    may_dangle: bool
    of_question: Literal["about", "answer"] | None = None

    def edges(self, places: Mapping[str, Places], unpacked: Mapping[str, Path], memory_bytes: int) -> Iterator[Edges]:
        """Yield senders and receivers of the edges that the keys stand for, and the times of those of questions."""
        folder = unpacked[self.table]
        times = self._times(folder)
        for found, rows in read_keys(folder / KEYS / self.column):
            told = f"{self.path}: column {self.column!r}"
            targets, is_known = _found(found, rows, places[self.target[0]], told, self.target, self.may_dangle)
            targets, rows = targets[is_known], rows[is_known]
            # Before the question, whenever the row was there.
            carried = {} if times is None else {TIME: times[rows] - 1}
            if times is not None and self.of_question == "answer":
                carried = {TIME: np.full(rows.size, NEVER), ANSWERED: times[rows]}
            yield (rows, targets, carried) if self.to_target else (targets, rows, carried)

    def _times(self, folder: Path) -> Column | None:
        file = folder / "arrays" / f"{TIME}.npy"
        return np.load(file, mmap_mode="r") if self.of_question is not None and file.exists() else None


@dataclass(frozen=True)
class LinkTable:
    """A table with two columns of foreign keys, and perhaps a time, and nothing else: each row is an edge.

    Args:
        path: The table.
        columns: The two columns.
        targets: The node types that the keys are of, and the names of their own columns.
        to_second: Whether the first sends to the second, or the other way round.
        time: The column of times, if there is one.
        may_dangle: Whether keys that name no row are left out.
    """

    path: Path
    columns: tuple[str, str]
    targets: tuple[tuple[str, str], tuple[str, str]]
    to_second: bool
    time: str | None
    may_dangle: bool

    def edges(self, places: Mapping[str, Places], unpacked: Mapping[str, Path], memory_bytes: int) -> Iterator[Edges]:
        """Yield senders, receivers and times of the edges that the rows are."""
        names = [*self.columns, *([] if self.time is None else [self.time])]
        for first, piece in CellTable(self.path, names, memory_bytes, lambda share: None):
            there = ~np.any([piece[name].missing for name in self.columns], 0)
            rows = first + np.flatnonzero(there)
            ends, are_known = [], np.ones(int(there.sum()), np.bool_)
            for name, target in zip(self.columns, self.targets, strict=True):
                cells, told = (
                    Cells(piece[name].values[there], piece[name].missing[there]),
                    f"{self.path}: column {name!r}",
                )
                keys = as_keys(name, cells, self.path, first)
                end, is_known = _found(keys, rows, places[target[0]], told, target, self.may_dangle)
                ends.append(end)
                are_known &= is_known
            times = {}
            if self.time is not None:
                times = {TIME: as_times(self.time, piece[self.time], self.path, first)[0][there][are_known]}
            sender, receiver = ends if self.to_second else ends[::-1]
            yield sender[are_known], receiver[are_known], times


def _found(
    keys: Column, rows: Column, places: Places, told: str, target: tuple[str, str], may_dangle: bool
) -> tuple[Column, Column]:
    """The rows that keys name, and which keys name one. ``told`` names their column, for errors."""
    found, is_known = places.find(places.alike(keys, told, ".".join(target)))
    if not is_known.all() and not may_dangle:
        key, row = str(keys[~is_known][0]), int(rows[~is_known][0]) + 1
        raise ValueError(
            f"{told} holds {key!r} in row {row}, which no row of {target[0]} "
            f"has as its {target[1]}: add that row, or empty the cell."
        )
    return found, is_known
