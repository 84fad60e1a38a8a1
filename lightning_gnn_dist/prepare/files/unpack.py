"""Writes columns of Parquet tables to ``.npy``, for work that reads arrays in pieces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, append, write_header
from lightning_gnn_dist.prepare.files.from_arrays import ALIASES
from lightning_gnn_dist.prepare.files.from_tables import edge_columns, id_of, node_columns
from lightning_gnn_dist.prepare.files.parquet import columns_of, count_columns, count_rows, is_parquet, read_pieces
from lightning_gnn_dist.prepare.files.text_tables import Progress

COPIES = 8  # of a row in memory, while it is decoded and converted
Turn: TypeAlias = Callable[[dict[str, Column], int], dict[str, Column]]


def unpack_nodes(nodes: Path, drop: Collection[str], folder: Path, memory_bytes: int, progress: Progress) -> None:
    """Write features, labels and masks of a table of the nodes 0, 1, 2, ..., in this order."""
    names = columns_of(nodes)
    kept = [name for name in names if name not in drop or name == id_of(names)]
    _unpack([nodes], kept, partial(_of_nodes, nodes=nodes, id_name=id_of(names)), folder, memory_bytes, progress)


def unpack_edges(files: Sequence[Path], names: Sequence[str], folder: Path, memory_bytes: int) -> None:
    """Write the columns ``names``, which edges carry, if there are any."""
    if not names:
        return
    where = files[0] if len(files) == 1 else files[0].parent  # rows are counted over all files
    _unpack(
        files,
        names,
        lambda piece, first: edge_columns(piece, where, first),
        folder,
        memory_bytes,
        lambda share: None,
    )


def check_nodes(nodes: Path) -> None:
    """Refuse a table of nodes that is not Parquet."""
    if not is_parquet(nodes):
        raise ValueError(
            f"Out of core, a table of nodes is read from Parquet alone, and {nodes} is none: write it as .parquet, or "
            "number the nodes 0, 1, 2, ... and give y.npy, x.npy, ..."
        )


def _unpack(
    files: Sequence[Path], names: Sequence[str], turn: Turn, folder: Path, memory_bytes: int, progress: Progress
) -> None:
    total, done = sum(map(count_rows, files)), 0
    at_once = max(1, memory_bytes // (8 * COPIES * max(map(count_columns, files))))
    for file in files:
        for piece in read_pieces(file, names, at_once):
            arrays = turn(piece, done)
            for name, array in arrays.items():
                if done == 0:
                    write_header(folder / f"{name}.npy", array.dtype, (total, *array.shape[1:]))
                append(folder / f"{name}.npy", array)
            done += len(next(iter(piece.values())))
            progress(done / total)


def _of_nodes(piece: dict[str, Column], first: int, nodes: Path, id_name: str) -> dict[str, Column]:
    ids = piece.pop(id_name)
    expected = np.arange(first, first + len(ids))
    if ids.dtype != np.int64 or (ids != expected).any():
        at = int(np.flatnonzero(ids != expected)[0]) if ids.dtype == np.int64 else 0
        raise ValueError(
            f"{nodes}: row {first + at} is about node {ids[at]}. Out of core, the table of nodes is in the order of "
            f"their numbers 0, 1, 2, ...: number them so, and sort the table by {id_name!r}."
        )
    for name, column in piece.items():
        if ALIASES.get(name, name) == "y" and column.dtype.kind == "U":
            raise ValueError(f"{nodes}: column {name!r} holds words. Out of core, labels are numbers: number them.")
    return node_columns(piece, nodes, first)
