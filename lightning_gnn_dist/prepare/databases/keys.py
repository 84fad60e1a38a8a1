"""Foreign keys as edges: written down while their table is read, and looked up when all tables have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import ANSWERED, NEVER, TIME
from lightning_gnn_dist.prepare.databases.cells import Cells, CellTable, as_keys, as_times
from lightning_gnn_dist.prepare.files.columns import Places
from lightning_gnn_dist.prepare.files.edge_files import KeyColumn, LinkTable

KEYS = "keys"  # the folder of what foreign keys a table holds, piece by piece
Edges: TypeAlias = tuple[Column, Column, dict[str, Column]]  # senders, receivers, and what edges carry


def write_keys(folder: Path, first: int, keys: Column, rows: Column) -> None:
    """Write some keys, and the rows that they stand in, none of which is before the first."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / f"{first:012d}.keys.npy", keys)
    save(folder / f"{first:012d}.rows.npy", rows)


def read_keys(folder: Path) -> Iterator[tuple[Column, Column]]:
    """Yield keys, and the rows that they stand in."""
    for file in sorted(folder.glob("*.keys.npy")):
        yield np.load(file), np.load(file.with_name(file.name.replace(".keys.", ".rows.")))


def edges_of_keys(keys: KeyColumn, folder: Path, places: Places) -> Iterator[Edges]:
    """Yield senders and receivers of the edges that keys stand for, and what these edges carry.

    Args:
        keys: The column.
        folder: The folder that its table was unpacked into.
        places: Finds the rows that the keys name.
    """
    file = folder / "arrays" / f"{TIME}.npy"
    times = np.load(file, mmap_mode="r") if keys.of_question is not None and file.exists() else None
    for found, rows in read_keys(folder / KEYS / keys.column):
        told = f"{keys.path}: column {keys.column!r}"
        targets, is_known = _found(found, rows, places, told, keys.target, may_dangle=keys.may_dangle)
        targets, rows = targets[is_known], rows[is_known]
        carried = {} if times is None else {TIME: times[rows] - 1}  # before the question, whenever the row was there
        if times is not None and keys.of_question == "answer":
            carried = {TIME: np.full(rows.size, NEVER), ANSWERED: times[rows]}
        yield (rows, targets, carried) if keys.to_target else (targets, rows, carried)


def edges_of_links(table: LinkTable, places: Mapping[str, Places], memory_bytes: int) -> Iterator[Edges]:
    """Yield senders, receivers and times of the edges that the rows of a table of links are."""
    names = [*table.columns, *([] if table.time is None else [table.time])]
    for first, piece in CellTable.of(table.path, names, memory_bytes, lambda share: None):
        there = ~np.any([piece[name].missing for name in table.columns], 0)
        rows = first + np.flatnonzero(there)
        ends, are_known = [], np.ones(int(there.sum()), np.bool_)
        for name, target in zip(table.columns, table.targets, strict=True):
            cells, told = Cells(piece[name].values[there], piece[name].missing[there]), f"{table.path}: column {name!r}"
            keys = as_keys(name, cells, table.path, first)
            end, is_known = _found(keys, rows, places[target[0]], told, target, may_dangle=table.may_dangle)
            ends.append(end)
            are_known &= is_known
        times = {}
        if table.time is not None:
            times = {TIME: as_times(table.time, piece[table.time], table.path, first)[0][there][are_known]}
        sender, receiver = ends if table.to_second else ends[::-1]
        yield sender[are_known], receiver[are_known], times


def _found(
    keys: Column, rows: Column, places: Places, told: str, target: tuple[str, str], *, may_dangle: bool
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
