"""Rows of a ``.npy`` file written as a Parquet table, piece by piece, by pyarrow, which is an extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gnn_dist.checks import check_path, shown
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.user_ids import PARQUET, Columns

_BYTES_AT_ONCE = 1 << 24


def check_rows_file(name: str, value: object) -> Path:
    """Return the value as the ``Path`` that rows are written to; refuse one that ends otherwise than known."""
    path = check_path(name, value)
    if path.suffix not in (".npy", PARQUET) or path.is_dir():
        raise ValueError(f"{name}: rows are written as .npy or .parquet, and {shown(path)} ends otherwise.")
    if path.suffix == PARQUET and find_spec("pyarrow") is None:
        raise ValueError(
            f"{name}: {shown(path)} is written by pyarrow, which is not installed: "
            'pip install "lightning-gnn-dist[tables]", or name a file that ends in .npy.'
        )
    return path


def check_no_file(path: Path, *, overwrite: bool) -> None:
    """Refuse a file that is there, unless it may be replaced."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another path, or overwrite=True.")


def write_parquet(rows: Path, path: Path, columns: Columns) -> None:
    """Write rows as a table. No more than some megabytes are in memory.

    Args:
        rows: The ``.npy`` file.
        path: The table.
        columns: Returns the columns by name of some rows, given the number of the first.
    """
    from pyarrow import parquet

    array = np.load(rows, mmap_mode="r")
    at_once, writer = max(1, _BYTES_AT_ONCE // max(1, array[:1].nbytes)), None
    try:
        for first in range(0, max(1, len(array)), at_once):
            table = _table(columns(first, array[first : first + at_once]))
            writer = parquet.ParquetWriter(path, table.schema) if writer is None else writer
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    flush(path)


def _table(columns: dict[str, NDArray[Any]]) -> Any:
    import pyarrow

    made = {}
    for name, rows in columns.items():
        flat = pyarrow.array(np.ascontiguousarray(rows).reshape(-1))
        width = int(np.prod(rows.shape[1:], dtype=np.int64))
        made[name] = flat if rows.ndim == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, width)
    return pyarrow.table(made)
