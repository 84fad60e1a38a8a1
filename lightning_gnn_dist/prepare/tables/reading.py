"""Files of tables: what they are called, how their first lines are read, and the SQL that reads all of them."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.prepare.tables.engine import ROW, Run, Table, Work, duckdb_for, literal, quoted, told

TEXTS, PARQUET, JSON = {".csv", ".tsv", ".txt"}, {".parquet", ".pq"}, {".jsonl", ".ndjson"}
PACKED = (".gz", ".zst")
SEPARATORS = ",\t; "
BYTES_COUNTED, PLACES_COUNTED = 1 << 14, 32
COMPRESSION = 4  # factor by which gzip shortens numbers in text, about
ENDS = [("source", "target"), ("source", "destination"), ("src", "dst"), ("sender", "receiver"), ("from", "to")]
INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")
WIDTH = '" width"'  # of a row in a text with spaces between cells


def _suffix(path: Path) -> str:
    name = next((path.name.removesuffix(end) for end in PACKED if path.name.endswith(end)), path.name)
    return Path(name).suffix.lower()


def is_text(path: Path) -> bool:
    """Whether ``path`` is named like a table in text."""
    return _suffix(path) in TEXTS | JSON and not path.is_dir()


def is_parquet(path: Path) -> bool:
    """Whether ``path`` is named like a Parquet file, or is a folder of such files."""
    return bool(files_of(path))


def is_table(path: Path) -> bool:
    """Whether ``path`` is named like a table, or is a folder of Parquet files."""
    return is_text(path) or is_parquet(path)


def files_of(path: Path) -> list[Path]:
    """The Parquet files: the file itself, or those of a folder in the order of their names."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [file for file in files if file.suffix.lower() in PARQUET and not file.is_dir()]


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    return list(types_of(path))


def types_of(path: Path) -> dict[str, str]:
    """The columns and their types in DuckDB, which are texts in a text."""
    if is_parquet(path):
        first, *others = files_of(path)
        names = _described(first)
        for file in others:
            if (found := set(_described(file))) != set(names):
                raise ValueError(
                    f"{file} has the columns {sorted(found)}, but {first} has {list(names)}: files of one table are "
                    "alike."
                )
        return names
    return _described(path) if _suffix(path) in JSON else dict.fromkeys(heading_of(path).names, "VARCHAR")


def _described(file: Path) -> dict[str, str]:
    with told(file):
        rows = _headers().execute(f"DESCRIBE SELECT * FROM {_read(file)}").fetchall()
    return {name: kind for name, kind, *_ in rows if not INDEX_OF_PANDAS.fullmatch(name)}


@cache
def _headers() -> Any:
    """A DuckDB without a file, which reads headers."""
    return duckdb_for().connect()


def _read(file: Path) -> str:
    if _suffix(file) in JSON:
        return f"read_json({literal(file)}, format = 'newline_delimited', sample_size = -1)"
    return f"read_parquet({literal(file)}, file_row_number = false)"


def count_rows(path: Path) -> int:
    """How many rows there are; an estimate for text, from the length of some lines."""
    if is_parquet(path):
        return _of_footers(path, "sum(num_rows)", "parquet_file_metadata")
    if path.name.endswith(".zst"):
        return path.stat().st_size
    if path.suffix == ".gz":
        with _open(path) as text:
            lines = list(islice(text, 1000))
        return round(path.stat().st_size * COMPRESSION * len(lines) / max(sum(map(len, lines)), 1))
    size, ends = path.stat().st_size, []
    with path.open("rb") as file:
        for place in range(PLACES_COUNTED):  # all over the file: ids grow, and lines with them
            file.seek(max(size - BYTES_COUNTED, 0) * place // (PLACES_COUNTED - 1))
            ends.append(max(file.read(BYTES_COUNTED).count(b"\n"), 1))
    return round(sum(ends) / len(ends) * max(size / BYTES_COUNTED, 1))


def count_columns(path: Path) -> int:
    """How many columns of numbers there are; a column of lists counts as several."""
    if not is_parquet(path):
        return len(columns_of(path))
    return round(_of_footers(path, "sum(num_values)", "parquet_metadata") / max(count_rows(path), 1))


def _of_footers(path: Path, what: str, of: str) -> int:
    files = ", ".join(map(literal, files_of(path)))
    with told(path):
        return int(_headers().execute(f"SELECT {what} FROM {of}([{files}])").fetchall()[0][0] or 0)


def about_headings(paths: Collection[Path]) -> tuple[str, ...]:
    """What is taken for the headings of texts, in words, for whoever has a table without one."""
    said = []
    for path in paths:
        if is_text(path) and _suffix(path) in TEXTS:
            heading = heading_of(path)
            names = f"line {heading.num_lines} is taken as heading: {', '.join(heading.names)}."
            said.append(
                f"{path}: " + (names if heading.is_there else "no heading, since the first line holds numbers alone.")
            )
    return tuple(said)


def ends_first(path: Path) -> list[str]:
    """The columns of a table of edges: sender, receiver, then what edges carry."""
    names = columns_of(path)
    ends = [names[place] for place in _places_of_ends(names, path)]
    return [*ends, *(name for name in names if name not in ends)]


def _places_of_ends(names: Sequence[str], path: Path) -> tuple[int, int]:
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


class Heading(NamedTuple):
    """What the columns are called, what stands between them, and how many lines come before the first row."""

    names: list[str]
    separator: str
    num_lines: int
    is_there: bool


def heading_of(path: Path) -> Heading:
    """Lines that begin with # are skipped at the top, and nowhere else: there they may be names."""
    with _open(path) as text:
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
        cells = [cell.strip() for cell in next(csv.reader([first], delimiter=separator, skipinitialspace=True))]
    except csv.Error as error:
        raise ValueError(f"{path} is no table: its first line cannot be read ({error}).") from error
    if all(map(_is_number, cells)):
        return Heading([str(at) for at in range(len(cells))], separator, skipped, False)
    if _is_number(cells[0]):
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


def _is_number(cell: str) -> bool:
    """Whether a cell is a number. Python's own digits of other scripts, and 1_000, are words here."""
    try:
        return "_" not in cell and cell.isascii() and float(cell) is not None
    except ValueError:
        return False


@contextmanager
def _open(path: Path) -> Iterator[TextIOWrapper]:
    with open_file(path) as raw:
        if path.suffix == ".zst":
            import pyarrow

            content: Any = pyarrow.CompressedInputStream(raw, "zstd")
        else:
            content = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        with TextIOWrapper(content, encoding="utf-8-sig") as text:
            try:
                yield text
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not in UTF-8 ({error.reason}): save it again with that encoding."
                ) from error
            except (EOFError, OSError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is damaged or truncated ({error}). Compress it again.") from error


def load(work: Work, name: str, path: Path) -> Table:
    """Have DuckDB read a file, or a folder of Parquet, under a name. Empty cells are NULL."""
    types, is_lines = types_of(path), is_text(path) and _suffix(path) in TEXTS
    read = _with_one_end(path, work.folder / f"{name}{path.suffix}") if is_lines else path
    with told(path):
        work.run(f"CREATE OR REPLACE VIEW {quoted(name)} AS {_query(read, types)}")
    made = Table(quoted(name), path, types)
    return replace(made, is_typed=False, check=partial(_bad_lines, path, made.name)) if is_lines else made


def _with_one_end(path: Path, copy: Path) -> Path:
    """The text, or a copy of it if its lines end in two ways, which DuckDB cannot read."""
    if path.name.endswith(PACKED):
        return path
    with path.open("rb") as file:
        pieces = iter(partial(file.read, 1 << 22), b"")
        counts = [(piece.count(b"\n"), piece.count(b"\r\n")) for piece in pieces]
        ends, long_ends = (sum(each) for each in zip(*counts, strict=True))
        if long_ends in (0, ends):
            return path
        file.seek(0)
        if all(line.endswith(b"\r\n") or not line.endswith(b"\n") for line in file):
            return path  # an end lay across two pieces
        file.seek(0)
        with copy.open("wb") as written:
            for line in file:
                written.write(line[:-2] + b"\n" if line.endswith(b"\r\n") else line)
    return copy


def _query(path: Path, types: dict[str, str]) -> str:
    """The query that reads the files of a table one after the other, and numbers their rows."""
    cells = ", ".join(
        (f"nullif({quoted(name)}, '')" if kind == "VARCHAR" else quoted(name)) + f" AS {quoted(name)}"
        for name, kind in types.items()
    )
    if not is_parquet(path):
        rows = _read(path) if _suffix(path) in JSON else _cells_of_text(path)
        width = f", {WIDTH}" if rows.startswith("(") and WIDTH in rows else ""
        return f"SELECT {cells}{width}, row_number() OVER () - 1 AS {ROW} FROM {rows}"
    queries, first = [], 0
    for file in files_of(path):
        rows = f"read_parquet({literal(file)}, file_row_number = true)"
        queries.append(f"SELECT {cells}, file_row_number + {first} AS {ROW} FROM {rows}")
        first += count_rows(file)
    return " UNION ALL BY NAME ".join(queries)


def _cells_of_text(path: Path) -> str:
    """The query that reads the cells of a text. Any number of spaces stands between two, where spaces do."""
    heading = heading_of(path)
    of_lines, mark = heading.separator == " ", literal("\x1f" if heading.separator == " " else heading.separator)
    names = ["line"] if of_lines else [f"c{at}" for at in range(len(heading.names))]
    columns = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in names)
    options = {"auto_detect": "false", "header": "false", "skip": heading.num_lines, "columns": f"{{{columns}}}"}
    options |= {"delim": mark, "quote": "''" if of_lines else "'\"'", "escape": "''" if of_lines else "'\"'"}
    options |= {"store_rejects": "true", "rejects_limit": 9}
    rows = f"read_csv({literal(path)}, {', '.join(f'{name} = {value}' for name, value in options.items())})"
    if of_lines:
        rows = f"(SELECT string_split_regex(trim(line), ' +') AS cells FROM {rows})"
        names = [f"cells[{at + 1}]" for at in range(len(heading.names))]
    cells = ", ".join(f"trim({cell}) AS {quoted(name)}" for cell, name in zip(names, heading.names, strict=True))
    return f"(SELECT {cells}{f', len(cells) AS {WIDTH}' if of_lines else ''} FROM {rows})"


def _bad_lines(path: Path, view: str, run: Run) -> list[str]:
    """What is wrong with lines that are no rows."""
    heading, problems = heading_of(path), []
    width = len(heading.names)
    there = run("SELECT 1 FROM duckdb_tables() WHERE table_name = 'reject_errors'")
    rejected = "SELECT DISTINCT line, error_type, error_message FROM reject_errors ORDER BY line LIMIT 3"
    found = run(rejected) if there else []
    if heading.separator == " ":
        odd = f"SELECT {ROW} + {heading.num_lines + 1}, 'COLUMNS', 'Found: ' || {WIDTH} FROM {view}"
        found += run(f"{odd} WHERE {WIDTH} <> {width} LIMIT 3")
    for line, kind, message in found:
        if "UNICODE" in kind or "ENCODING" in kind:
            told = "it is not in UTF-8: save the file again with that encoding"
        elif "COLUMNS" in kind:
            many = message.rpartition("Found: ")[2]
            told = f"{many} cells, but there are {width} columns: give each row a cell for each"
        else:
            told = f"it cannot be read ({message.partition(chr(10))[0]})"
        problems.append(f"{path}, line {line}: {told}.")
    for table in ("reject_errors", "reject_scans") if there else ():
        run(f"DROP TABLE {table}")
    return problems
