"""A table with keys as nodes: read once for statistics, before the training cut, and once for its numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import NEVER, NUMBERS, TIME, Feature
from lightning_gnn_dist.prepare.databases.cells import Cells, CellTable, as_keys, as_times, joined, lists_in
from lightning_gnn_dist.prepare.databases.columns import ColumnScan, Encoding
from lightning_gnn_dist.prepare.databases.keys import KEYS, write_keys
from lightning_gnn_dist.prepare.databases.manifest import Manifest, TableSpec
from lightning_gnn_dist.prepare.databases.text import embedding
from lightning_gnn_dist.prepare.databases.times import Span, cut_of
from lightning_gnn_dist.prepare.files.row_files import GrowingArrays
from lightning_gnn_dist.prepare.one_shard import Part
from lightning_gnn_dist.prepare.reading import Progress
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows


@dataclass(frozen=True, eq=False)
class DatabaseTable:
    """A table whose rows are nodes.

    Args:
        spec: What is known of it.
        manifest: What is known of all.
        drop: Columns to leave out.
    """

    spec: TableSpec
    manifest: Manifest
    drop: frozenset[str]

    @cached_property
    def num_rows(self) -> int:
        """How many rows there are; an estimate for text."""
        return count_rows(self.spec.path)

    @property
    def num_numbers(self) -> int:
        """How many numbers a row becomes, about."""
        return 8 * len(self._read)

    @cached_property
    def _read(self) -> list[str]:
        """The columns that are read."""
        left_out = self._left_out.keys() | {name for name, kind in self.spec.columns.items() if kind == "ignore"}
        kept = {self.spec.pkey, self.spec.time_col, *self.spec.fkeys}
        return [name for name in columns_of(self.spec.path) if name in kept or name not in left_out | self.drop]

    @cached_property
    def _left_out(self) -> dict[str, str]:
        """Columns that nothing is made of, and why."""
        return dict.fromkeys(sorted(lists_in(self.spec.path)), "holds lists, or the like")

    def unpack(
        self, folder: Path, part_of: Callable[[int], Part], memory_bytes: int, progress: Progress
    ) -> dict[str, Any]:
        """Turn the table into arrays; return what is to be known of them.

        Args:
            folder: Gets ``ids.npy`` and ``keys``, of all rows; in ``own`` the numbers of the part's rows; in
                ``arrays`` all other arrays, of all rows.
            part_of: Returns the part whose numbers to keep, for the number of rows.
            memory_bytes: Bytes that a piece of the table may take.
            progress: Called with the share that is done.
        """
        table = CellTable(self.spec.path, self._read, memory_bytes, lambda share: progress(share / 3))
        encodings, notes = self._scan(table, lambda share: progress((1 + share) / 3))
        places, features = _places(encodings, self.manifest.hidden(self.spec.name))
        own, ids, span = part_of(table.num_rows).nodes, [], Span()
        numbers, others = GrowingArrays(folder / "own", table.path), GrowingArrays(folder / "arrays", table.path)
        for first, piece in table:
            ids.append(self._ids(piece, first))
            self._write_keys(folder / KEYS, piece, first)
            made = _encoded(encodings, places, piece, table.path, first)
            if self.spec.time_col is not None:
                made[TIME], are_dates = as_times(self.spec.time_col, piece[self.spec.time_col], table.path, first)
                span.add(made[TIME], are_dates=are_dates)
            if NUMBERS in made:
                start, end = np.searchsorted(own, [first, first + len(ids[-1])])
                numbers.add({NUMBERS: made.pop(NUMBERS)[own[start:end] - first]})
            others.add(made)
            progress((2 + (first + len(ids[-1])) / table.num_rows) / 3)
        numbers.finish()
        others.finish()
        save(folder / "ids.npy", joined(ids))
        save(folder / "arrays" / "num_nodes.npy", np.array(table.num_rows))
        if span.num_missing:
            notes.append(f"{span.num_missing:,} rows of {self.spec.name} have no time, and no question sees them.")
        return {"features": [asdict(feature) for feature in features], "notes": notes, "times": span.fact}

    def _scan(self, table: CellTable, progress: Progress) -> tuple[dict[str, Encoding], list[str]]:
        """How each column is encoded, from rows before the cut; and what is left out."""
        embed, keys = embedding(self.manifest.text), {self.spec.pkey, *self.spec.fkeys}
        scans = {
            name: ColumnScan(name, self.spec.columns.get(name), embed, name == self.spec.time_col)
            for name in table.names
            if name not in keys
        }
        cut, path = cut_of(self.manifest), table.path
        for first, piece in table:
            seen = self._seen(piece, path, first, cut)
            for name, scan in scans.items():
                if not scan.is_row_time or as_times(name, piece[name], path, first)[1]:
                    scan.add(Cells(piece[name].values[seen], piece[name].missing[seen]))
            progress(min((first + 1) / table.num_rows, 1.0))
        made = {
            name: scan.encoding(f"{path}: column {name!r}")
            for name, scan in scans.items()
            if scan.num_rows or not scan.is_row_time
        }
        told = self._left_out | {name: each for name, each in made.items() if isinstance(each, str)}
        notes = [f"{self.spec.name}.{name} {why}: it is left out." for name, why in told.items()]
        return {name: each for name, each in made.items() if not isinstance(each, str)}, notes

    def _seen(self, piece: Mapping[str, Cells], path: Path, first: int, cut: int | None) -> Column | slice:
        """Which rows are before the cut."""
        if self.spec.time_col is None:
            return slice(None)
        times, _ = as_times(self.spec.time_col, piece[self.spec.time_col], path, first)
        return times < (NEVER if cut is None else cut)

    def _ids(self, piece: Mapping[str, Cells], first: int) -> Column:
        if self.spec.pkey is None:
            return np.arange(first, first + len(next(iter(piece.values())).missing))
        cells, path = piece[self.spec.pkey], self.spec.path
        if cells.missing.any():
            row = first + int(cells.missing.argmax()) + 1
            raise ValueError(
                f"{path}: column {self.spec.pkey!r} is empty in row {row}, and every row has a key of its own."
            )
        return as_keys(self.spec.pkey, cells, path, first)

    def _write_keys(self, folder: Path, piece: Mapping[str, Cells], first: int) -> None:
        for name in self.spec.fkeys:
            rows = first + np.flatnonzero(~piece[name].missing)
            write_keys(folder / name, first, as_keys(name, piece[name], self.spec.path, first), rows)


def _places(
    encodings: Mapping[str, Encoding], hidden: Collection[str]
) -> tuple[dict[tuple[str, str], str], list[Feature]]:
    """The array of each column and kind of numbers, and where it begins there."""
    widths: dict[str, int] = {}
    places, features = {}, []
    for name, encoding in encodings.items():
        for kind, width in encoding.widths.items():
            array = places[name, kind] = f"{name}_{kind}" if name in hidden else kind
            if width:
                features.append(Feature(name, array, widths.get(array, 0), width, encoding.size))
                widths[array] = widths.get(array, 0) + width
    return places, features


def _encoded(
    encodings: Mapping[str, Encoding],
    places: Mapping[tuple[str, str], str],
    piece: Mapping[str, Cells],
    path: Path,
    first: int,
) -> dict[str, Column]:
    """The arrays of some rows."""
    made: dict[str, list[Column]] = {}
    for name, encoding in encodings.items():
        for kind, numbers in encoding(piece[name], f"{path}: column {name!r}", first).items():
            made.setdefault(places[name, kind], []).append(numbers)
    return {array: np.concatenate(columns, axis=1) for array, columns in made.items()}
