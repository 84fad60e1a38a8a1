"""Tables in text (CSV, TSV) or Parquet, by the same functions, read in pieces of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.columns import ALIASES, as_labels, classes_in
from lightning_gnn_dist.prepare.files.text_tables import Progress, Scan, places_of_ends

BYTES_PER_CELL = 160  # of text, while it is parsed as words


def is_table(path: Path) -> bool:
    """Whether ``path`` is named like a table, or is a folder of Parquet files."""
    return parquet.is_parquet(path) or is_text(path)


def is_text(path: Path) -> bool:
    """Whether ``path`` is named like a table in text."""
    return not path.is_dir() and text_tables.is_table(path)


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    return parquet.columns_of(path) if parquet.is_parquet(path) else text_tables.columns_of(path)


def count_columns(path: Path) -> int:
    """How many columns of numbers there are."""
    return parquet.count_columns(path) if parquet.is_parquet(path) else len(text_tables.columns_of(path))


def count_rows(path: Path) -> int:
    """How many rows there are; an estimate for text."""
    return parquet.count_rows(path) if parquet.is_parquet(path) else text_tables.count_rows(path)


def about_headings(paths: Collection[Path]) -> tuple[str, ...]:
    """What is taken for the headings of texts, in words."""
    return tuple(text_tables.about_heading(path) for path in paths if is_text(path))


def ends_first(path: Path) -> list[str]:
    """The columns of a table of edges: sender, receiver, then what edges carry."""
    names = columns_of(path)
    ends = [names[place] for place in places_of_ends(names, path)]
    return [*ends, *(name for name in names if name not in ends)]


def look_at(path: Path, num_columns: int, memory_bytes: int, on_progress: Progress) -> tuple[int, Scan]:
    """How many rows fit into memory at once, and what a text holds, which is read; of Parquet the number of rows."""
    bytes_per_row = BYTES_PER_CELL * max(1, num_columns)
    at_once = max(1, memory_bytes // bytes_per_row)
    if parquet.is_parquet(path):
        if not (num_rows := parquet.count_rows(path)):
            raise ValueError(f"{path} has no rows: leave the table out, or fill it.")
        return min(at_once, parquet.ROWS_AT_ONCE), Scan([], num_rows, None)
    at_once = min(at_once, text_tables.LINES_AT_ONCE)
    return at_once, text_tables.scan(path, at_once, memory_bytes - at_once * bytes_per_row, on_progress)


@dataclass(frozen=True, eq=False)
class TablePieces:
    """A table of which no more than some rows are in memory.

    Args:
        path: The table.
        names: The columns that are read.
        kinds: Of a text, which of ``text_tables.KINDS`` each column is of.
        num_rows: The number of rows.
        rows_at_once: The rows of a piece.
        classes: The words of columns of labels, in order. Each word is read as its number, an empty one as -1.
        kept: The columns of a text, in pieces, if they fit into memory.
    """

    path: Path
    names: tuple[str, ...]
    kinds: tuple[int, ...]
    num_rows: int
    rows_at_once: int
    classes: Mapping[str, Column]
    kept: Sequence[dict[str, Column]] | None = None

    @classmethod
    def of(cls, path: Path, names: Sequence[str], memory_bytes: int, on_progress: Progress) -> TablePieces:
        """Read a text once, to learn what its columns hold; of Parquet the headers, and labels that are words."""
        at_once, scan = look_at(path, count_columns(path), memory_bytes, on_progress)
        found = cls(path, tuple(names), tuple(scan.kinds), scan.num_rows, at_once, {}, scan.pieces)
        classes = {name: found._classes(name) for name in names if ALIASES.get(name, name) == "y"}
        return replace(found, classes={name: words for name, words in classes.items() if words is not None})

    def __iter__(self) -> Iterator[tuple[int, dict[str, Column]]]:
        """Yield the number of the first row of each piece, and its columns by name."""
        first = 0
        for piece in self._pieces(self.names):
            for name, words in self.classes.items():
                piece[name] = as_labels(piece[name], words)
            length = len(next(iter(piece.values())))
            if length:
                yield first, piece
            first += length

    def _pieces(self, names: Collection[str]) -> Iterator[dict[str, Column]]:
        if parquet.is_parquet(self.path):
            yield from parquet.read_pieces(self.path, names, self.rows_at_once)
            return
        pieces = text_tables.read_pieces(self.path, self.kinds, self.rows_at_once) if self.kept is None else self.kept
        for piece in pieces:
            yield {name: piece[name] for name in names}

    def _classes(self, name: str) -> Column | None:
        """The words of a column in order, or no numbers of the kind that stand among empty cells; else None."""
        kinds = text_tables.KINDS
        if self.kinds and kinds[self.kinds[columns_of(self.path).index(name)]] is not np.str_:
            return None
        for kind in kinds[:2] if self.kinds else ():
            words = (word for piece in self._pieces([name]) for word in np.unique(piece[name]))
            if all(not word or text_tables.fits(word, kind) for word in words):
                return np.empty(0, kind)
        found = np.empty(0, "U1")
        for piece in self._pieces([name]):
            if piece[name].dtype.kind != "U":
                return None
            found = np.union1d(found, piece[name])
        return classes_in(found, f"{self.path}: column {name!r}")
