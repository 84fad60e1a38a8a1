"""Tables in Parquet, one file or a folder of files, read in pieces by pyarrow, which is an extra.

Pages are decoded when they are needed, so the size of row groups does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files.columns import ALIASES

SUFFIXES = {".parquet", ".pq"}
ROWS_AT_ONCE = 1 << 18
BUFFER_BYTES = 1 << 20
MAY_BE_EMPTY = {"split"}  # columns in which a cell may be empty: the node is in no split
INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")


def is_parquet(path: Path) -> bool:
    """Whether ``path`` is named like a Parquet file, or is a folder of such files."""
    return bool(files_of(path))


def files_of(path: Path) -> list[Path]:
    """The Parquet files: the file itself, or those of a folder in the order of their names."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.suffix in SUFFIXES and not file.is_dir()]


def columns_of(path: Path) -> list[str]:
    """The names of the columns, which must be the same in all files of a folder."""
    first, *others = files_of(path)
    names = _columns(first)
    for file in others:
        if set(found := _columns(file)) != set(names):
            raise ValueError(f"{file} has the columns {found}, but {first} has {names}: files of one table are alike.")
    return names


def count_rows(path: Path) -> int:
    """How many rows there are."""
    return sum(_open(file).metadata.num_rows for file in files_of(path))


def count_columns(path: Path) -> int:
    """How many columns of numbers there are; a column of lists counts as several."""
    metadata = _open(files_of(path)[0]).metadata
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    numbers = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
    return round(numbers / metadata.num_rows) if metadata.num_rows else 0


def read_pieces(path: Path, names: Collection[str], rows_at_once: int) -> Iterator[dict[str, Column]]:
    """Yield some columns of all rows, ``rows_at_once`` rows at a time; an empty label as "", -1 or NaN."""
    for file in files_of(path):
        first = 0
        for batch in _batches(file, names, rows_at_once):
            yield {name: _values(batch.column(name), name, file, first) for name in names}
            first += batch.num_rows


def batches(path: Path, names: Collection[str], rows_at_once: int) -> Iterator[Any]:
    """Yield the batches of pyarrow of some columns of all rows."""
    for file in files_of(path):
        yield from _batches(file, names, rows_at_once)


def _batches(file: Path, names: Collection[str], rows_at_once: int) -> Iterator[Any]:
    with _told(file):
        yield from _open(file).iter_batches(rows_at_once, columns=list(names), use_threads=False)


def nested_columns(path: Path) -> set[str]:
    """The columns that hold neither numbers, words nor dates, but lists, bytes or the like."""
    from pyarrow import types

    numbers = [types.is_integer, types.is_floating, types.is_boolean, types.is_decimal]
    words = [types.is_string, types.is_large_string, types.is_dictionary]
    plain = [*numbers, *words, types.is_timestamp, types.is_date, types.is_null]
    schema = _open(files_of(path)[0]).schema_arrow
    return {field.name for field in schema if not any(is_kind(field.type) for is_kind in plain)}


def _values(array: Any, name: str, file: Path, first: int) -> Column:
    """A column as numpy array: whole numbers as int64, floating point numbers as they are, words as text."""
    import pyarrow as pa
    from pyarrow import types

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    is_label = ALIASES.get(name, name) == "y"
    if types.is_string(array.type) or types.is_large_string(array.type):
        words = array.fill_null("") if is_label or name in MAY_BE_EMPTY else _filled(array, name, file, first)
        return np.array(words.to_pylist(), np.str_)
    if is_label and array.null_count and (types.is_integer(array.type) or types.is_boolean(array.type)):
        array = array.cast(pa.int64()).fill_null(-1)
    elif is_label and types.is_floating(array.type):
        array = array.fill_null(float("nan"))
    array = _filled(array, name, file, first)
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return _of_lists(array, name, file, first)
    try:
        if types.is_integer(array.type) or types.is_boolean(array.type):
            return _as_numpy(array.cast(pa.int64()))
        return _as_numpy(array if types.is_floating(array.type) else array.cast(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"{file}: column {name!r} holds {array.type}, of which no number was made ({error}). Cast it, or leave "
            f"the column out (--drop {name})."
        ) from error


def _of_lists(array: Any, name: str, file: Path, first: int) -> Column:
    lengths = array.value_lengths()
    if len(set(lengths.unique().to_pylist())) > 1:
        raise ValueError(f"{file}: column {name!r} holds lists of unequal length: leave it out (--drop {name}).")
    return _values(array.flatten(), name, file, first).reshape(len(array), -1)


def _filled(array: Any, name: str, file: Path, first: int) -> Any:
    if array.null_count:
        row = first + array.is_null().to_pylist().index(True)
        raise ValueError(
            f"{file}: column {name!r} has no value in row {row} (counted from 0). Fill it or remove such rows; a "
            f"column that carries something can be left out (--drop {name})."
        )
    return array


def _as_numpy(array: Any) -> Column:
    return np.require(array.to_numpy(zero_copy_only=False), requirements="W")  # as torch wants it


def _columns(file: Path) -> list[str]:
    return [name for name in _open(file).schema_arrow.names if not INDEX_OF_PANDAS.fullmatch(name)]


def parquet_for(file: Path) -> Any:
    """pyarrow's module for a file."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ModuleNotFoundError(
            f'{file} takes pyarrow, which is not installed: pip install "lightning-gnn-dist[parquet]".'
        ) from error
    return parquet


def _open(file: Path) -> Any:
    parquet = parquet_for(file)
    with _told(file):
        return parquet.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    """Turn pyarrow's errors about a file into one that says what to do."""
    from pyarrow import ArrowInvalid

    try:
        yield
    except (ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{file} is no Parquet file, or is damaged ({error}). Write it again.") from error
