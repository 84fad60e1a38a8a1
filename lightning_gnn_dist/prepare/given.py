"""What is given in place of files, as files: frames, several names, and databases that are named by a connection."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_gnn_dist.checks import check_path, shown
from lightning_gnn_dist.graph.storage.npy import checksum_of
from lightning_gnn_dist.prepare.edges import MemoryTooSmall, OnProgress
from lightning_gnn_dist.prepare.engine import duckdb_for, literal

CONNECTIONS = "lightning_gnn_dist.extensions.databases.connection"  # reads what such a name stands for
IS_CONNECTION = "://"


@contextmanager
def as_files(
    out: Path,
    given: Mapping[str, Any],
    tasks: str | Path | None = None,
    on_progress: OnProgress = lambda stage, share: None,
    *,
    is_whole: bool = True,
) -> Iterator[dict[str, Path]]:
    """The paths that were given, and files of what is none, which are removed when the graph is written or refused.

    The same frame has the same file again, so that the same call goes on after a kill.

    Args:
        out: What is written.
        given: Paths, frames, several paths of one table, or the connection of a database, by the names of arguments.
        tasks: The tasks of a database that is named by a connection.
        on_progress: Called with the name of a table that is copied, and the share of tables that is.
        is_whole: Whether all of the graph is made: shards are made by several processes, of the same files.
    """
    of_tasks = None if tasks is None else check_path("tasks", tasks)
    if of_tasks is not None and IS_CONNECTION not in str(given["source"]):
        raise ValueError("tasks are given (--task) for a database that is named by a connection: leave them out.")
    folder, found = out.absolute().parent / f".{out.name}.given", {}
    try:
        for name, each in given.items():
            if each is None and name == "nodes":
                continue
            if hasattr(each, "__arrow_c_stream__"):
                found[name] = _of_frame(each, folder / f"{name}.parquet")
                continue
            paths = [check_path(name, path) for path in (each if isinstance(each, list | tuple) else [each])]
            if isinstance(each, list | tuple) and not (paths and all(path.is_file() for path in paths)):
                raise FileNotFoundError(f"{name} must be a file, or a list of files that are there, got {shown(each)}.")
            is_connection = isinstance(each, str) and IS_CONNECTION in each
            if not is_whole and (is_connection or len(paths) > 1):
                raise ValueError(
                    "Shards are made of files that all processes find alike: name several by a pattern, 'edges/*.csv', "
                    "and of a database prepare all, and divide it (lightning-gnn-dist divide)."
                )
            if is_connection:
                found[name] = import_module(CONNECTIONS).as_folder(each, folder / name, of_tasks, on_progress)
            else:
                found[name] = paths[0] if len(paths) == 1 else _of_several(paths, folder / name)
        yield found
    except (ValueError, TypeError, FileExistsError) as error:
        if not isinstance(error, MemoryTooSmall):
            shutil.rmtree(folder, ignore_errors=True)  # nobody goes on with what was refused
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _of_frame(frame: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with duckdb_for().connect() as db:
        import pyarrow

        db.register("frame", pyarrow.RecordBatchReader.from_stream(frame))
        db.execute(f"COPY (SELECT * FROM frame) TO {literal(file)} (FORMAT parquet)")
    os.utime(file, ns=(0, int(checksum_of(file)[:8], 16)))  # by which it is known
    return file


def _of_several(paths: Sequence[Path], folder: Path) -> Path:
    """A folder of links, in the order in which they were named."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for at, path in enumerate(paths):
        (folder / f"{at:05}-{path.name}").symlink_to(path.absolute())
    return folder
