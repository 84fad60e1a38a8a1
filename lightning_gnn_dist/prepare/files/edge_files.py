"""Edges in files, read a piece at a time: ``.npy`` of shape (2, E) or (E, 2), and tables, text or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.files import text_tables
from lightning_gnn_dist.prepare.files.raw import check_drop
from lightning_gnn_dist.prepare.files.table_files import columns_of, count_rows, ends_first, is_table, read_ends


class Piece(NamedTuple):
    """Some edges: their senders, their receivers, and the file that they come from."""

    sender: Column
    receiver: Column
    file: Path


Read: TypeAlias = Callable[[], tuple[Column, Column]]


@dataclass(frozen=True)
class EdgeFiles:
    """A list of edges in one file or several, in the order of the files.

    Args:
        files: ``.npy`` files and tables (CSV, TSV, gzipped or not, and Parquet).
        num_edges: The number of edges; an estimate for text.
        carried: Names of the Parquet columns that edges carry.
    """

    files: tuple[Path, ...]
    num_edges: int
    carried: tuple[str, ...] = ()

    @classmethod
    def of(cls, path: Path, drop: Collection[str] = ()) -> EdgeFiles:
        """A file of edges, or all such files of a folder, in the order of their names."""
        files = tuple(sorted(file for file in path.iterdir() if _is_known(file))) if path.is_dir() else (path,)
        if not files or not all(map(_is_known, files)):
            raise ValueError(
                f"{path} holds no edges: give a .npy of shape (2, E) or (E, 2), a table (.csv, .tsv, .txt, also "
                "gzipped, or .parquet) whose two columns are sender and receiver, or a folder of such files."
            )
        return cls(files, sum(_num_edges(file, drop) for file in files), _carried(files, drop))

    @property
    def has_text(self) -> bool:
        """Whether there are tables of text, which take long to read and whose lengths are estimates."""
        return any(text_tables.is_table(file) for file in self.files)

    def pieces(self, edges_at_once: int, *, skip: int = 0) -> Iterator[Piece]:
        """Yield all edges, in the same pieces every time. The first ``skip`` pieces are left out, mostly unread."""
        for file, read in islice(self._readers(edges_at_once), skip, None):
            yield Piece(*read(), file)

    def _readers(self, edges_at_once: int) -> Iterator[tuple[Path, Read]]:
        for file in self.files:
            if file.suffix != ".npy":
                yield from ((file, read) for read in read_ends(file, edges_at_once))
                continue
            array = _edge_array(file)
            total = _length(array)
            for first in range(0, total, edges_at_once):
                yield file, partial(_read_npy, array, first, min(edges_at_once, total - first))


def _is_known(file: Path) -> bool:
    return file.is_file() and (file.suffix == ".npy" or is_table(file))


def _num_edges(file: Path, drop: Collection[str]) -> int:
    check_drop(drop, _more_columns(file), file)
    if file.suffix == ".npy":
        return _length(_edge_array(file))
    if text_tables.is_table(file) and (unwanted := [name for name in _more_columns(file) if name not in drop]):
        raise ValueError(
            f"{file} has the column {unwanted[0]!r} beside the two ends of an edge. What edges carry is read from "
            f".npy and Parquet alone when they are sorted on disk: leave it out (--drop {unwanted[0]}), or give all "
            "as .npy or Parquet."
        )
    return count_rows(file)


def _more_columns(file: Path) -> list[str]:
    """The names of a table's columns beside the two ends."""
    return ends_first(columns_of(file), file)[2:] if is_table(file) else []


def _carried(files: Collection[Path], drop: Collection[str]) -> tuple[str, ...]:
    found = {file: [name for name in _more_columns(file) if name not in drop] for file in files}
    first, expected = next(iter(found.items()))
    for file, names in found.items():
        if sorted(names) != sorted(expected):
            raise ValueError(
                f"{file} has the columns {names} beside the two ends of an edge, but {first} has {expected}: files of "
                "one list of edges must be alike, or these columns left out (--drop)."
            )
    return tuple(expected)


def _edge_array(file: Path) -> NpyFile:
    array = NpyFile.of(file)
    if len(array.shape) != 2 or 2 not in array.shape or array.dtype.kind not in "iu":
        raise ValueError(f"{file} must hold integers of shape (2, E) or (E, 2), got {array.dtype} {array.shape}.")
    return array


def _length(array: NpyFile) -> int:
    return array.shape[1] if array.shape[0] == 2 else array.shape[0]


def _read_npy(array: NpyFile, first: int, count: int) -> tuple[Column, Column]:
    has_two_rows, total = array.shape[0] == 2, _length(array)
    if has_two_rows != array.by_column:  # all senders, then all receivers
        return _signed(array.read(first, count)), _signed(array.read(total + first, count))
    pairs = array.read(2 * first, 2 * count).reshape(count, 2)
    return _signed(pairs[:, 0]), _signed(pairs[:, 1])


def _signed(ends: Column) -> Column:
    """The ends as int32 or int64, the types for which the loops are compiled."""
    return np.ascontiguousarray(ends, None if ends.dtype in (np.int32, np.int64) else np.int64)
