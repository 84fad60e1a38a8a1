"""Rows of a ``.npy`` file written as a table, Parquet or CSV, piece by piece, by pyarrow, which is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn_dist.checks import check_path, shown
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.store import IDS
from lightning_gnn_dist.graph.user_ids import WITHOUT_IDS, Columns

PARQUET, CSV = ".parquet", ".csv"
TABLES = (PARQUET, CSV)
_BYTES_AT_ONCE = 1 << 24


def check_rows_file(name: str, value: object) -> Path:
    """Return the value as the ``Path`` that rows are written to; refuse one that ends otherwise than known."""
    path = check_path(name, value)
    if path.suffix not in (".npy", *TABLES) or path.is_dir():
        raise ValueError(f"{name}: rows are written as .npy, .parquet or .csv, and {shown(path)} ends otherwise.")
    if path.suffix in TABLES and find_spec("pyarrow") is None:
        raise ValueError(
            f"{name}: {shown(path)} is written by pyarrow, which is not installed: "
            'pip install "lightning-gnn-dist[tables]", or name a file that ends in .npy.'
        )
    return path


def check_ids_of(path: Path | None, ids_of: object) -> Path | None:
    """Return where the ids are for a file; refuse to name nodes in one that is no table."""
    if ids_of is None:
        return None
    if path is None or path.suffix not in TABLES:
        raise ValueError(f"ids_of={shown(ids_of)} names nodes in a table: write one, {TABLES[0]}, or leave ids_of out.")
    folder = check_path("ids_of", ids_of)
    if not (folder / IDS).is_dir():
        raise ValueError(f"ids_of: {folder} {WITHOUT_IDS}")
    return folder


def check_no_file(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that is there, unless it may be replaced."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another path, or overwrite=True.")


def write_table(rows: Path, path: Path, columns: Columns, suffix: str = PARQUET) -> None:
    """Write rows as a table. No more than some megabytes are in memory.

    Args:
        rows: The ``.npy`` file.
        path: The table.
        columns: Returns the columns by name of some rows, given the number of the first.
        suffix: What kind of table it is. One in text has a column for each number of a row: ``row_0``, ``row_1``, ...
    """
    from pyarrow import csv, parquet

    open_table = csv.CSVWriter if suffix == CSV else parquet.ParquetWriter
    array = np.load(rows, mmap_mode="r")
    at_once, writer = max(1, _BYTES_AT_ONCE // max(1, array[:1].nbytes)), None
    try:
        for first in range(0, max(1, len(array)), at_once):
            found = columns(first, array[first : first + at_once])
            table = _table(_of_one_number(found) if suffix == CSV else found)
            writer = open_table(path, table.schema) if writer is None else writer
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    flush(path)


def _of_one_number(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The columns, of which those of several numbers become one for each."""
    made = dict[str, NDArray[Any]]()
    for name, rows in columns.items():
        flat = rows.reshape(len(rows), -1) if rows.ndim > 1 else None
        made |= {name: rows} if flat is None else {f"{name}_{at}": flat[:, at] for at in range(flat.shape[1])}
    return made


def _table(columns: dict[str, NDArray[Any]]) -> Any:
    import pyarrow

    made = {}
    for name, rows in columns.items():
        flat = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        made[name] = flat if rows.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, width)
    return pyarrow.table(made)
