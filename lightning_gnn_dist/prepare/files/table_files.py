"""Tables in text (CSV, TSV) or Parquet, by the same functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files import parquet, text_tables
from lightning_gnn_dist.prepare.files.text_tables import Progress, places_of_ends


def is_table(path: Path) -> bool:
    """Whether ``path`` is named like a table, or is a folder of Parquet files."""
    return parquet.is_parquet(path) or (path.is_file() and text_tables.is_table(path))


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    return parquet.columns_of(path) if parquet.is_parquet(path) else text_tables.columns_of(path)


def count_columns(path: Path) -> int:
    """How many columns there are."""
    return parquet.count_columns(path) if parquet.is_parquet(path) else text_tables.count_columns(path)


def count_rows(path: Path) -> int:
    """How many rows there are; an estimate for text."""
    return parquet.count_rows(path) if parquet.is_parquet(path) else text_tables.count_rows(path)


def about_headings(*paths: Path) -> tuple[str, ...]:
    """What is taken for the headings of texts, in words."""
    return tuple(text_tables.about_heading(path) for path in paths if path.is_file() and text_tables.is_table(path))


def read_columns(path: Path, drop: Collection[str], on_progress: Progress) -> dict[str, Column]:
    """The columns by name, without those in ``drop``."""
    if parquet.is_parquet(path):
        return parquet.read_columns(path, drop, on_progress)
    return {name: column for name, column in text_tables.read_table(path, on_progress).items() if name not in drop}


def read_ends(path: Path, rows_at_once: int) -> Iterator[Callable[[], tuple[Column, Column]]]:
    """Yield functions that return the two ends of a piece of the edges each, which they read when called."""
    return parquet.read_ends(path, rows_at_once) if parquet.is_parquet(path) else text_tables.read_ends(path)


def ends_first(names: list[str], path: Path) -> list[str]:
    """The columns of a table of edges: sender, receiver, then what edges carry."""
    ends = [names[place] for place in places_of_ends(names, path)]
    return [*ends, *(name for name in names if name not in ends)]


def num_bytes(path: Path) -> int:
    """Bytes of the file, or of all Parquet files of a folder."""
    return sum(file.stat().st_size for file in (parquet.files_of(path) or [path]))
