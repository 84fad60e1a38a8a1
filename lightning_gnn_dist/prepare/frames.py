"""Frames of Arrow, pandas or Polars in place of files: they are written as Parquet while a graph is made of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

from lightning_gnn_dist.checks import check_path
from lightning_gnn_dist.prepare.tables.engine import duckdb_for, literal


@contextmanager
def as_files(out: Path, names: Sequence[str], given: Sequence[Any]) -> Iterator[list[Path | None]]:
    """The paths that were given, and files of the frames, which are removed when the graph is written.

    The same frame has the same file again, so that the same call goes on after a kill.

    Args:
        out: What is written.
        names: What each is called, for errors.
        given: Paths, frames, or None.
    """
    folder = out.absolute().parent / f".{out.name}.frames"
    found = [None if each is None else folder / f"{name}.parquet" for name, each in zip(names, given, strict=True)]
    for at, (name, each) in enumerate(zip(names, given, strict=True)):
        file = found[at]
        if file is None or not hasattr(each, "__arrow_c_stream__"):
            found[at] = None if each is None else check_path(name, each)
            continue
        db = duckdb_for().connect()
        import pyarrow

        folder.mkdir(parents=True, exist_ok=True)
        db.register("frame", pyarrow.RecordBatchReader.from_stream(each))
        db.execute(f"COPY (SELECT * FROM frame) TO {literal(file)} (FORMAT parquet)")
        os.utime(file, ns=(0, crc32(file.read_bytes())))  # by which it is known
    yield found
    shutil.rmtree(folder, ignore_errors=True)
