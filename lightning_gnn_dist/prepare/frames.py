"""Frames of Arrow, pandas or Polars in place of files: they are written as Parquet while a graph is made of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_gnn_dist.checks import check_path
from lightning_gnn_dist.graph.storage.npy import checksum_of
from lightning_gnn_dist.prepare.tables.engine import duckdb_for, literal


@contextmanager
def as_files(out: Path, given: Mapping[str, Any]) -> Iterator[dict[str, Path]]:
    """The paths that were given, and files of the frames, which are removed when the graph is written.

    The same frame has the same file again, so that the same call goes on after a kill.

    Args:
        out: What is written.
        given: Paths and frames, by the names of the arguments.
    """
    folder, found = out.absolute().parent / f".{out.name}.frames", {}
    for name, each in given.items():
        if not hasattr(each, "__arrow_c_stream__"):
            found[name] = check_path(name, each)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        found[name] = file = folder / f"{name}.parquet"
        with duckdb_for().connect() as db:
            import pyarrow

            db.register("frame", pyarrow.RecordBatchReader.from_stream(each))
            db.execute(f"COPY (SELECT * FROM frame) TO {literal(file)} (FORMAT parquet)")
        os.utime(file, ns=(0, int(checksum_of(file)[:8], 16)))  # by which it is known
    yield found
    shutil.rmtree(folder, ignore_errors=True)
