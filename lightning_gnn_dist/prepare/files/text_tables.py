"""Tables in text files (CSV, TSV, gzipped or not), read in pieces into a dictionary of columns."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.graph.storage.npy import Column

Progress: TypeAlias = Callable[[float], None]
LINES_AT_ONCE = 1 << 18
LINES_LOOKED_AT = 256
BYTES_COUNTED, PLACES_COUNTED = 1 << 14, 32
COMPRESSION = 4  # factor by which gzip shortens numbers in text, about
SEPARATORS = ",\t; "
SUFFIXES = {".csv", ".tsv", ".txt"}
KINDS = (np.int64, np.float64, np.str_)
ENDS = [("source", "target"), ("source", "destination"), ("src", "dst"), ("sender", "receiver"), ("from", "to")]


class Scan(NamedTuple):
    """What a text holds.

    Args:
        kinds: Which of ``KINDS`` each column is of.
        num_rows: The number of rows.
        pieces: All columns by name, in pieces, if they fit into memory.
    """

    kinds: list[int]
    num_rows: int
    pieces: list[dict[str, Column]] | None


def scan(path: Path, rows_at_once: int, bytes_kept: int, on_progress: Progress) -> Scan:
    """Read a whole table once. Its columns are kept unless they take more than ``bytes_kept``, or turn out wider."""
    heading = _heading(path)
    kinds, num_rows = [0] * len(heading.names), 0
    kept: list[dict[str, Column]] | None = []
    for first_line, lines in _pieces(path, heading, on_progress, rows_at_once):
        try:
            columns = _parse(lines, heading.separator, kinds)
        except ValueError as error:
            kinds, columns = _widened(path, lines, heading, kinds, first_line, error)
            kept = None if num_rows else kept
        num_rows += len(lines)
        bytes_kept -= sum(column.nbytes for column in columns)
        if kept is not None and bytes_kept >= 0:
            kept.append(dict(zip(heading.names, columns, strict=True)))
        else:
            kept = None
    if not num_rows:
        raise ValueError(f"{path} has a heading and no rows.")
    return Scan(kinds, num_rows, kept)


def read_pieces(path: Path, kinds: Sequence[int], rows_at_once: int) -> Iterator[dict[str, Column]]:
    """Yield the columns by name, of the ``kinds`` that :func:`scan` found, ``rows_at_once`` rows at a time."""
    heading = _heading(path)
    for _, lines in _pieces(path, heading, lambda share: None, rows_at_once):
        yield dict(zip(heading.names, _parse(lines, heading.separator, kinds), strict=True))


def places_of_ends(names: Sequence[str], path: Path) -> tuple[int, int]:
    """The positions of the columns of senders and receivers: those with such names, otherwise the first two."""
    if len(names) < 2:
        raise ValueError(
            f"{path} has one column, {names[0]!r}, but an edge has two ends: write one for each, such as source,target."
        )
    places = {name.lower(): place for place, name in enumerate(names)}
    for name in places.keys() & {end for ends in ENDS for end in ends}:
        if len(twice := [other for other in names if other.lower() == name]) > 1:
            raise ValueError(f"{path} has {twice}, each of which may be an end of an edge: rename one of them.")
    for sender, receiver in ENDS:
        if sender in places and receiver in places:
            return places[sender], places[receiver]
    for name in (end for ends in ENDS for end in ends):
        if places.get(name, 0) > 1:
            raise ValueError(
                f"{path} has a column {name!r} and none that goes with it, but {list(names)}: call the two ends "
                "source and target, or put them first under other names."
            )
    return 0, 1


def is_table(path: Path) -> bool:
    """Whether the file is named like a table."""
    return path.with_name(path.name.removesuffix(".gz")).suffix in SUFFIXES


def count_rows(path: Path) -> int:
    """An estimate of the number of rows, from the length of some of them."""
    if path.suffix == ".gz":
        with _open(path) as (text, _):
            lines = list(islice(text, 1000))
        return round(path.stat().st_size * COMPRESSION * len(lines) / max(sum(map(len, lines)), 1))
    size, ends = path.stat().st_size, []
    with path.open("rb") as file:
        for place in range(PLACES_COUNTED):  # all over the file: ids grow, and lines with them
            file.seek(max(size - BYTES_COUNTED, 0) * place // (PLACES_COUNTED - 1))
            ends.append(max(file.read(BYTES_COUNTED).count(b"\n"), 1))
    return round(sum(ends) / len(ends) * max(size / BYTES_COUNTED, 1))


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    return list(_heading(path).names)


def about_heading(path: Path) -> str:
    """What is taken for a heading, in words, for whoever has a table without one."""
    heading = _heading(path)
    if not heading.is_there:
        return f"{path}: no heading, since the first line holds numbers alone."
    return f"{path}: line {heading.num_lines} is taken as heading: {', '.join(heading.names)}."


_SEVERAL_LINES = (
    "a cell in quotes goes on in the next line, and a row of a text is one line: write the table as Parquet, as in "
    'pandas.read_csv("a.csv").to_parquet("a.parquet"), or a space for each line break.'
)


class Heading(NamedTuple):
    """What the columns are called, what stands between them, and how many lines come before the first row."""

    names: list[str]
    separator: str
    num_lines: int
    is_there: bool


def _heading(path: Path) -> Heading:
    """Lines that begin with # are skipped at the top, and nowhere else: there they may be names."""
    with _open(path) as (text, _):
        skipped, first = 0, text.readline()
        while first.startswith("#"):
            skipped, first = skipped + 1, text.readline()
    first = first.strip()
    if not first:
        raise ValueError(f"{path} is empty, or begins with an empty line.")
    if "\0" in first:
        raise ValueError(f"{path} is not in UTF-8 (it holds zero bytes): save it again with that encoding.")
    separator = next((mark for mark in SEPARATORS if mark in first), ",")
    try:
        cells = [cell.strip() for cell in next(csv.reader([first], **_csv(separator)))]
    except csv.Error as error:
        raise ValueError(f"{path} is no table: its first line cannot be read ({error}).") from error
    if all(fits(cell, np.float64) for cell in cells):
        return Heading([str(at) for at in range(len(cells))], separator, skipped, False)
    if fits(cells[0], np.float64):
        raise ValueError(
            f"{path} has the first line {first!r:.60}, which is neither a heading, as it begins with a number, nor a "
            "row of numbers: write a heading above it, such as source,target,weight or id,label."
        )
    if len(set(cells)) < len(cells):
        twice = next(cell for cell in cells if cells.count(cell) > 1)
        raise ValueError(f"{path} has two columns called {twice!r}: rename one of them.")
    if "" in cells:
        raise ValueError(
            f"{path} has a column without a name, number {cells.index('') + 1}, as pandas writes its index: name it, "
            "or write the table with index=False."
        )
    return Heading(cells, separator, skipped + 1, True)


def _pieces(
    path: Path, heading: Heading, on_progress: Progress, lines_at_once: int = LINES_AT_ONCE
) -> Iterator[tuple[int, list[str]]]:
    size = max(path.stat().st_size, 1)
    with _open(path) as (text, raw):
        for _ in range(heading.num_lines):
            text.readline()
        line = 1 + heading.num_lines
        while lines := list(islice(text, min(lines_at_once, LINES_AT_ONCE))):
            if rows := [row for row in lines if not row.isspace()]:
                yield line, rows
            on_progress(min(raw.tell() / size, 1.0))
            line += len(lines)


def _widened(
    path: Path, lines: Sequence[str], heading: Heading, kinds: list[int], first_line: int, error: ValueError
) -> tuple[list[int], list[Column]]:
    """The kinds that lines need which could not be parsed as ``error`` says, and their columns."""
    where = f"{path}, {{}} lines after line {first_line}"
    for some in (lines[:LINES_LOOKED_AT], lines):  # a look at the first is quick, and mostly enough
        wider = _wider_kinds(some, heading.separator, kinds, where)
        if wider != kinds or some is lines:
            try:
                return wider, _parse(lines, heading.separator, wider)
            except ValueError as another:
                kinds, error = wider, another
    raise ValueError(f"{path}, after line {first_line}: {error}") from error


def _wider_kinds(lines: Sequence[str], separator: str, kinds: Sequence[int], where: str) -> list[int]:
    """The kind that each column needs for these lines, and at least its present one."""
    rows = list(csv.reader(lines, **_csv(separator)))
    if len(rows) < len(lines):
        odd = next((at for at, line in enumerate(lines) if line.count('"') % 2), 0)
        raise ValueError(f"{where.format(odd)}: {_SEVERAL_LINES}")
    ragged = next((at for at, row in enumerate(rows) if len(row) != len(kinds)), None)
    if ragged is not None:
        raise ValueError(
            f"{where.format(ragged)}: {len(rows[ragged])} cells, but there are {len(kinds)} columns: "
            "give each row a cell for each."
        )
    columns = list(zip(*rows, strict=True))
    return [
        next(kind for kind in range(least, len(KINDS)) if all(fits(cell, KINDS[kind]) for cell in column))
        for least, column in zip(kinds, columns, strict=True)
    ]


def _parse(lines: Sequence[str], separator: str, kinds: Sequence[int]) -> list[Column]:
    if KINDS.index(np.str_) in kinds and (separator == " " or any(' "' in line for line in lines)):
        return _parse_by_cell(lines, separator, kinds)
    dtype = np.dtype([(str(at), object if KINDS[kind] is np.str_ else KINDS[kind]) for at, kind in enumerate(kinds)])
    table = np.loadtxt(lines, dtype, **_format(separator), ndmin=1)
    if len(table) < len(lines):
        raise ValueError(_SEVERAL_LINES)
    columns = [table[str(at)] for at in range(len(kinds))]
    return [
        np.array([cell.strip() for cell in column.tolist()], np.str_) if column.dtype == object else column.copy()
        for column in columns
    ]


def _parse_by_cell(lines: Sequence[str], separator: str, kinds: Sequence[int]) -> list[Column]:
    """The same for spaces between words, and before quotes, which NumPy takes as they are."""
    columns = zip(*csv.reader(lines, **_csv(separator)), strict=True)
    return [
        np.array([cell.strip() for cell in column]).astype(KINDS[kind])
        for column, kind in zip(columns, kinds, strict=True)
    ]


def _csv(separator: str) -> dict[str, Any]:
    return {"delimiter": separator, "skipinitialspace": True}  # and so several spaces are one


def _format(separator: str) -> dict[str, Any]:
    return {"delimiter": separator if separator != " " else None, "quotechar": '"', "comments": None}


def fits(cell: str, kind: type) -> bool:
    """Whether a cell can be read so. Python's own digits of other scripts, and 1_000, are words here."""
    if kind is np.str_:
        return True
    if "_" in cell or not cell.isascii():
        return False
    try:
        return -(2**63) <= int(cell) < 2**63 if kind is np.int64 else float(cell) is not None
    except ValueError:
        return False


@contextmanager
def _open(path: Path) -> Iterator[tuple[TextIOWrapper, IO[bytes]]]:
    """Open the text, and the file below it, whose position tells how much was read."""
    with open_file(path) as raw:
        content = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        with TextIOWrapper(content, encoding="utf-8-sig") as text:
            try:
                yield text, raw
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not in UTF-8 ({error.reason}): save it again with that encoding."
                ) from error
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is damaged or truncated ({error}). Compress it again.") from error
