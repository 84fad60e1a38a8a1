"""The files of a chunked graph: arrays in numpy, CSV or Parquet, ends of edges, and the users' ids of nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.files import is_a
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.columns import Places
from lightning_gnn_dist.prepare.files.edge_files import Edges
from lightning_gnn_dist.prepare.files.number_tables import MaskRows, TableRows, check_text
from lightning_gnn_dist.prepare.files.row_files import RowFiles

METADATA = "metadata.json"
FORMATS = ("numpy", "csv", "parquet")
MAPPING = ("orig", "new")  # the columns of GraphStorm's files of ids: the user's, and the number


@dataclass(frozen=True)
class Chunks:
    """The files of one array, or of the edges of one type, but for those of chunks without rows.

    Args:
        where: What they are, for errors.
        form: One of ``FORMATS``.
        delimiter: Of ``csv``, what stands between cells.
        files: The files, in order.
        counts: How many rows each must have; None if chunks of arrays are not those of nodes and edges.
        total: How many rows all must have.
    """

    where: str
    form: str
    delimiter: str
    files: tuple[Path, ...]
    counts: tuple[int, ...] | None
    total: int

    @classmethod
    def of(cls, said: Any, where: str, folder: Path, counts: Sequence[int], forms: Collection[str]) -> Chunks:
        """Check what is said of some files."""
        if not is_a(dict[str, object], said) or not is_a(list[str], said.get("data")):
            raise ValueError(f'{where} must be {{"format": {{"name": ...}}, "data": [files]}}, got {shown(said)}.')
        form = said.get("format")
        name = str(form.get("name")) if isinstance(form, dict) else ""
        if name not in forms:
            raise ValueError(f"{where}: the format must have a name, one of {shown(list(forms))}, got {shown(form)}.")
        files = tuple(folder / file for file in said["data"])
        for file in files:
            if not file.is_file():
                raise ValueError(
                    f"{where} names {file}, which is no file: names are those within {folder}, and where the folder "
                    "was moved, write them anew."
                )
        delimiter, total = str(form.get("delimiter") or ","), sum(counts)
        if len(files) != len(counts):
            if name == "csv":
                raise ValueError(f"{where} names {len(files)} files, and there are {len(counts)} chunks: name as many.")
            with_rows = tuple(file for file in files if name == "numpy" or parquet.count_rows(_parquet(file)))
            return cls(where, name, delimiter, with_rows, None, total)
        filled = tuple(file for file, count in zip(files, counts, strict=True) if count)
        return cls(where, name, delimiter, filled, tuple(filter(None, counts)), total)

    def rows(self, name: str) -> RowFiles | None:
        """The array that the files hold, called ``name`` in the graph; None if it has no rows at all."""
        if not self.files:
            return None
        arrays = [self._array(file, name) for file in self.files]
        if self.form == "csv":  # whole numbers in one text may be fractions in another
            dtype = np.result_type(*(array.dtype for array in arrays))
            arrays = [replace(array, dtype=dtype) for array in arrays]
        found = RowFiles.of_files(arrays)
        self._check([file.shape[0] for file in found.files if file.shape])
        return found

    def _array(self, path: Path, name: str) -> NpyFile:
        is_mask = name.endswith("_mask")
        if self.form == "numpy":
            array = NpyFile.of(path)
            return MaskRows.named(name, array) if is_mask and array.dtype != np.bool_ else array
        if self.form == "csv":
            table = TableRows.of_text(path, self.delimiter)
        else:
            table = TableRows.of_parquet(_parquet(path), has_holes=name == "y")
        table = table if name == "x" else table.as_vector()
        return MaskRows.named(name, table) if is_mask else table

    def _check(self, found: Sequence[int]) -> None:
        """Refuse other numbers of rows than ``metadata.json`` says."""
        wanted = self.counts or found
        for file, count, said in zip(self.files, found, wanted, strict=True):
            if count != said:
                raise ValueError(_miscounted(file, count, said))
        if sum(found) != self.total:
            raise ValueError(
                f"{self.where}: the files hold {sum(found):,} rows, and {METADATA} says {self.total:,}: write them "
                "anew, or correct the counts."
            )

    def edges(self) -> tuple[EdgeChunk, ...]:
        """The files of ends."""
        counts = self.counts
        if self.form == "parquet":
            counts = tuple(parquet.count_rows(_parquet(file)) for file in self.files)
            self._check(counts)
        assert counts is not None
        return tuple(map(partial(EdgeChunk, self.form, self.delimiter), self.files, counts))


@dataclass(frozen=True)
class EdgeChunk:
    """A table of senders and receivers.

    Args:
        form: ``csv`` or ``parquet``.
        delimiter: Of ``csv``, what stands between cells.
        path: The file.
        num_edges: How many edges there must be.
    """

    form: str
    delimiter: str
    path: Path
    num_edges: int

    def __post_init__(self) -> None:
        if len(self._names) != 2:
            raise ValueError(f"{self.path} has {len(self._names)} columns, and edges have two: senders and receivers.")

    @property
    def _names(self) -> list[str]:
        return check_text(self.path, self.delimiter) if self.form == "csv" else parquet.columns_of(self.path)

    def edges(self, places: Mapping[str, Places], unpacked: Mapping[str, Path], memory_bytes: int) -> Iterator[Edges]:
        """Yield senders and receivers."""
        rows = TableRows(self.path, (0, 2), np.dtype(np.int64), 0, False, self._names, self._kinds, False)
        count = 0
        for ends in rows.pieces(max(1, min(memory_bytes // 320, text_tables.LINES_AT_ONCE))):
            if ends.dtype != np.int64:
                raise ValueError(f"{self.path} holds {ends.dtype}, and ends of edges are whole numbers: write these.")
            count += len(ends)
            yield ends[:, 0], ends[:, 1], {}
        if count != self.num_edges:
            raise ValueError(_miscounted(self.path, count, self.num_edges))

    @property
    def _kinds(self) -> tuple[int, ...]:
        return (0, 0) if self.form == "csv" else ()


def read_ids(files: Sequence[Path], where: str, num_nodes: int) -> Column:
    """The users' ids of all nodes of a type, in the order of the nodes."""
    ids, numbers = [], []
    for file in files:
        names = parquet.columns_of(_parquet(file))
        if not {*MAPPING} <= {*names}:
            raise ValueError(f"{file} has the columns {names}, and ids are in {shown(list(MAPPING))}: rename two.")
        for piece in parquet.read_pieces(file, MAPPING, parquet.ROWS_AT_ONCE):
            ids.append(piece[MAPPING[0]])
            numbers.append(piece[MAPPING[1]])
    order = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
    if order.size != num_nodes or (np.sort(order) != np.arange(num_nodes)).any():
        raise ValueError(f"{where} must give each of the {num_nodes:,} nodes one id: write these files anew.")
    known = np.concatenate(ids)
    found = np.empty_like(known)
    found[order] = known
    return found


def _parquet(path: Path) -> Path:
    if not parquet.is_parquet(path):
        raise ValueError(
            f"{path} is said to be Parquet, and is not called {shown(sorted(parquet.SUFFIXES))}: rename it."
        )
    return path


def _miscounted(file: Path, found: int, said: int) -> str:
    return f"{file} holds {found:,} rows, and {METADATA} says {said:,}: write the chunk anew, or correct the count."
