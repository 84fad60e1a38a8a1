"""Arrays with a row per node in ``.npy`` files, one or several, read some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.edge_files import EdgeFiles
from lightning_gnn_dist.graph.from_arrays import ALIASES
from lightning_gnn_dist.graph.npy import NpyFile
from lightning_gnn_dist.graph.raw import check_drop
from lightning_gnn_dist.graph.tables import Column


@dataclass(frozen=True)
class RowFiles:
    """One array, whose rows lie in files that follow each other.

    Args:
        files: The files, of one type and one length of rows.
    """

    files: tuple[NpyFile, ...]

    @classmethod
    def of(cls, path: Path) -> RowFiles:
        """A ``.npy``, or all in a folder, in the order of their names."""
        files = tuple(NpyFile.of(file) for file in (sorted(path.glob("*.npy")) if path.is_dir() else [path]))
        for file in files:
            if (file.dtype, file.shape[1:]) != (files[0].dtype, files[0].shape[1:]):
                raise ValueError(
                    f"{file.path} holds rows of {file.dtype} {file.shape[1:]}, but {files[0].path} rows of "
                    f"{files[0].dtype} {files[0].shape[1:]}: files of one array must be alike."
                )
            if file.by_column:
                raise ValueError(f"{file.path} is stored by column: save numpy.ascontiguousarray(array).")
        return cls(files)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.files[0].shape
        return (sum(file.shape[0] for file in self.files), *first[1:]) if first else ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.files[0].dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        return math.prod(self.shape[1:]) * self.files[0].dtype.itemsize

    @property
    def is_one_number_per_row(self) -> bool:
        return math.prod(self.shape[1:]) == 1

    def load(self) -> Column:
        """All of it."""
        return np.concatenate([file.read(0, math.prod(file.shape)) for file in self.files]).reshape(self.shape)

    def pieces(self, first: int, bytes_at_once: int) -> Iterator[Column]:
        """The rows from ``first`` on."""
        at_once = max(1, bytes_at_once // max(self.bytes_per_row, 1))
        width = math.prod(self.shape[1:])
        for file in self.files:
            for start in range(min(first, file.shape[0]), file.shape[0], at_once):
                count = min(at_once, file.shape[0] - start)
                yield file.read(start * width, count * width).reshape(count, *self.shape[1:])
            first = max(first - file.shape[0], 0)


@dataclass(frozen=True)
class GraphFiles:
    """A graph that lies in files, of which only headers were read.

    Args:
        edges: Its edges.
        arrays: Its arrays per node, and lists of nodes (``train_idx``), by what they are called in a graph.
        num_nodes: How many nodes; ``None`` where only the edges know.
    """

    edges: EdgeFiles
    arrays: dict[str, RowFiles]
    num_nodes: int | None

    @classmethod
    def of(cls, source: Path, drop: Collection[str] = ()) -> GraphFiles:
        """What lies at ``source``: a folder with ``edge_index`` and arrays, or edges alone."""
        found = _entries(source) if source.is_dir() else {}
        if "edge_index" not in found:
            return cls(EdgeFiles.of(source, drop), {}, None)
        check_drop(drop, found, source)
        edges = EdgeFiles.of(found.pop("edge_index"))
        files = {name: RowFiles.of(path) for name, path in found.items() if name not in drop}
        arrays = {ALIASES.get(name, name): rows for name, rows in files.items()}
        if len(arrays) < len(files):
            raise ValueError(f"{source} holds two arrays for one purpose among {sorted(files)}: drop one of them.")
        if per_edge := [name for name in arrays if name.startswith("edge_")]:
            raise ValueError(
                f"{source} holds {per_edge[0]}, and edges that are sorted on disk carry nothing: leave it out "
                "(--drop), or prepare the graph in memory."
            )
        return cls(edges, arrays, _num_nodes(arrays))

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self.arrays.values())


def _entries(folder: Path) -> dict[str, Path]:
    """Arrays by name: ``x.npy``, or ``x/`` with several files."""
    folders = [path for path in folder.iterdir() if path.is_dir() and any(path.iterdir())]
    return {path.stem: path for path in sorted([*folder.glob("*.npy"), *folders], key=lambda path: path.stem)}


def _num_nodes(arrays: dict[str, RowFiles]) -> int | None:
    if "num_nodes" in arrays:
        return int(arrays.pop("num_nodes").files[0].read(0, 1)[0])
    return next((arrays[name].shape[0] for name in ("x", "y", "train_mask") if name in arrays), None)
