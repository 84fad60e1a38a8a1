"""Tables, text or Parquet, read in pieces of rows, and arrays that grow by such pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, append, write_header
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES
from lightning_gnn_dist.prepare.files.from_tables import check_labels
from lightning_gnn_dist.prepare.files.parquet import is_parquet
from lightning_gnn_dist.prepare.files.table_files import columns_of, count_columns
from lightning_gnn_dist.prepare.files.text_tables import Progress

BYTES_PER_CELL = 160  # of text, while it is parsed as words


@dataclass(frozen=True, eq=False)
class TablePieces:
    """A table of which no more than some rows are in memory.

    Args:
        path: The table.
        names: The columns that are read.
        kinds: Of a text, which of ``text_tables.KINDS`` each column is of.
        num_rows: The number of rows.
        rows_at_once: The rows of a piece.
        classes: The words of columns of labels, in order. Each word is read as its number.
    """

    path: Path
    names: tuple[str, ...]
    kinds: tuple[int, ...]
    num_rows: int
    rows_at_once: int
    classes: Mapping[str, Column]

    @classmethod
    def of(cls, path: Path, names: Sequence[str], memory_bytes: int, on_progress: Progress) -> TablePieces:
        """Read a text once, to learn what its columns hold; of Parquet the headers, and labels that are words."""
        at_once = max(1, memory_bytes // (BYTES_PER_CELL * max(1, count_columns(path))))
        kinds: list[int] = []
        if is_parquet(path):
            num_rows = parquet.count_rows(path)
        else:
            kinds, num_rows = text_tables.scan(path, at_once, on_progress)
        if not num_rows:
            raise ValueError(f"{path} has no rows.")
        found = cls(path, tuple(names), tuple(kinds), num_rows, at_once, {})
        classes = {name: found._classes(name) for name in names if ALIASES.get(name, name) == "y"}
        words = {name: words for name, words in classes.items() if words is not None}
        return cls(path, found.names, found.kinds, num_rows, at_once, words)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Column]]]:
        """Yield the number of the first row of each piece, and its columns by name."""
        first = 0
        for piece in self._pieces(self.names):
            for name, words in self.classes.items():
                piece[name] = np.searchsorted(words, piece[name])
            length = len(next(iter(piece.values())))
            if length:
                yield first, piece
            first += length

    def _pieces(self, names: Collection[str]) -> Iterator[dict[str, Column]]:
        if is_parquet(self.path):
            yield from parquet.read_pieces(self.path, names, min(self.rows_at_once, parquet.ROWS_AT_ONCE))
            return
        for piece in text_tables.read_pieces(self.path, self.kinds, self.rows_at_once):
            yield {name: piece[name] for name in names}

    def _classes(self, name: str) -> Column | None:
        """The words of a column in order; None if it holds numbers."""
        if self.kinds and self.kinds[columns_of(self.path).index(name)] != text_tables.KINDS.index(np.str_):
            return None
        found, first = np.empty(0, "U1"), 0
        for piece in self._pieces([name]):
            if piece[name].dtype.kind != "U":
                return None
            check_labels(name, piece[name], self.path, first)
            found, first = np.union1d(found, piece[name]), first + len(piece[name])
        return found


class GrowingArrays:
    """Arrays in a folder that get rows piece by piece.

    Args:
        folder: The folder, which is made.
        source: Where the rows come from, for errors.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._source = folder, source
        self._shapes: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {}
        self._counts: dict[str, int] = {}

    def add(self, arrays: Mapping[str, Column]) -> None:
        """Add rows to arrays by name."""
        for name, array in arrays.items():
            shape = array.dtype, array.shape[1:]
            if (known := self._shapes.setdefault(name, shape)) != shape:
                kinds = " and ".join(f"{dtype}{list(more) or ''}" for dtype, more in (known, shape))
                raise ValueError(f"{self._source}: {name} holds {kinds}: files of one table must be alike.")
            if name not in self._counts:
                self._path(name).unlink(missing_ok=True)
                write_header(self._path(name), array.dtype, (0, *array.shape[1:]))
            append(self._path(name), array)
            self._counts[name] = self._counts.get(name, 0) + len(array)

    def finish(self) -> list[Path]:
        """Write the numbers of rows into the headers, and return the files."""
        for name, (dtype, shape) in self._shapes.items():
            write_header(self._path(name), dtype, (self._counts[name], *shape))
        return [self._path(name) for name in self._shapes]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"
