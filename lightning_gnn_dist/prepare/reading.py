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
from glob import escape, glob, has_magic
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.prepare.engine import ROW, WHOLE, Cells, Run, Table, Work, duckdb_for, literal, quoted, told

TEXTS, PARQUET, JSON = map(frozenset, ((".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".jsonl", ".ndjson")))
SURELY_TABLES = PARQUET | JSON | TEXTS - {".txt"}
PACKED = (".gz", ".zst")
SEPARATORS = ",\t; "
ENDS = [("source", "target"), ("source", "destination"), ("src", "dst"), ("sender", "receiver"), ("from", "to")]
OF_JSON = "format = 'newline_delimited'"
NUMBERED = re.compile(r"(.+)_\d+")
INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")


def _suffix(path: Path) -> str:
    return Path(path.stem if _packed(path) else path).suffix.lower()


def _packed(path: Path) -> str:
    """The suffix by which a file is known to be compressed, if it is."""
    suffix = path.suffix.lower()
    return suffix if suffix in PACKED else ""


def is_parquet(path: Path) -> bool:
    """Whether ``path`` is a Parquet file, or several such files."""
    return _kind(path) is PARQUET


def is_table(path: Path) -> bool:
    """Whether ``path`` is a table by its name, or several files of one that are of one kind."""
    return _kind(path) is not None


def _kind(path: Path) -> frozenset[str] | None:
    """The suffixes of the kind of files that a table is in."""
    suffixes = {_suffix(file) for file in files_of(path)}
    return next((kind for kind in (PARQUET, TEXTS, JSON) if suffixes and suffixes <= kind), None)


def files_of(path: Path) -> list[Path]:
    """The files of a table in order: itself, those of a folder, or those that a pattern such as ``edges/*.csv`` names.

    Of a folder that has Parquet files that are surely no tables are none of it.
    """
    if path.is_dir():
        there = [file for file in sorted(path.iterdir()) if not file.name.startswith((".", "_"))]
        tables = [file for file in there if _suffix(file) in SURELY_TABLES and not file.is_dir()]
        found = tables if any(_suffix(file) in PARQUET for file in tables) else there
        return [] if any(file.is_dir() for file in found) else found
    return [path] if path.exists() else [Path(name) for name in sorted(glob(str(path)))] or [path]


def check_there(path: Path) -> None:
    """Refuse a path at which nothing is, and a pattern that names nothing."""
    if missing := [file for file in files_of(path) if not file.exists()]:
        told = "names no file" if has_magic(str(path)) else "does not exist"
        raise FileNotFoundError(f"{missing[0]} {told}.")


def columns_of(path: Path) -> list[str]:
    """The names of the columns."""
    return list(types_of(path))


def types_of(path: Path) -> dict[str, str]:
    """The columns and their types in DuckDB, which are texts in a text."""
    first, *others = files_of(path)
    if _kind(path) is JSON:
        found = _described(path, f"read_json([{_listed(path)}], {OF_JSON}, sample_size = -1)")
        known = {name.lower() for name in found}
        numbered = filter(None, map(NUMBERED.fullmatch, found))
        if any(each[1].lower() in known for each in numbered):  # as DuckDB calls W beside w, which are one to it
            lines = f"read_ndjson_objects([{_listed(path)}])"
            _check_names([key for (key,) in _ask(path, f"SELECT DISTINCT unnest(json_keys(json)) FROM {lines}")], path)
        return {name: "VARCHAR" if _is_guessed(kind) else kind for name, kind in found.items()}
    names = types = _types_of_file(first)
    for file in others:
        if (found := _types_of_file(file)).keys() != names.keys():
            raise ValueError(
                f"{file} has the columns {sorted(found)}, but {first} has {list(names)}: files of one table are alike."
            )
        both = {name: _type_of_both(types[name], found[name]) for name in names}
        if odd := next((name for name in names if not both[name]), None):
            raise ValueError(
                f"{file}: column {odd!r} holds {found[odd]}, but {types[odd]} in the files before, such as {first}: "
                "files of one table are alike."
            )
        types = both
    return types


def _type_of_both(one: str, other: str) -> str:
    """The type that holds the cells of two, to the bit where they are whole; empty if there is none."""
    if '"NULL"' in (one, other) or one == other:
        return other if one == '"NULL"' else one
    pair = Cells("", one), Cells("", other)
    if all(each.is_list for each in pair):
        inner = _type_of_both(*(each.type.rpartition("[")[0] for each in pair))
        return inner and f"{inner}[]"
    if all(each.type in WHOLE for each in pair):
        return "HUGEINT"
    if all(each.is_number for each in pair):
        return "DOUBLE"
    if all(each.is_date for each in pair):
        return "TIMESTAMP WITH TIME ZONE"
    are_words = any(each.is_text for each in pair) and all(each.is_read for each in pair)
    return "VARCHAR" if are_words else ""


def _is_guessed(kind: str) -> bool:
    """Whether a column of JSON has texts that look like dates or the like, or several kinds: they stay texts."""
    return kind in ("JSON", "TIME", "UUID") or Cells("", kind).is_date


def _types_of_file(file: Path) -> dict[str, str]:
    if _suffix(file) in PARQUET:
        return _described(file, f"read_parquet({_named(file)})")
    return dict.fromkeys(heading_of(file).names, "VARCHAR")


def _described(path: Path, rows: str) -> dict[str, str]:
    found = _ask(path, f"DESCRIBE SELECT * FROM {rows}")
    return {name: kind for name, kind, *_ in found if not INDEX_OF_PANDAS.fullmatch(name)}


def _ask(path: Path, query: str) -> list[tuple[Any, ...]]:
    with told(path):
        return list(_headers().execute(query).fetchall())


@cache
def _headers() -> Any:
    """A DuckDB without a file, which reads headers."""
    return duckdb_for().connect(config={"autoinstall_known_extensions": "false"})


def _named(file: Path) -> str:
    """The name of a file as SQL has it, which no mark in it makes a pattern."""
    return literal(escape(str(file)))


def _listed(path: Path) -> str:
    return ", ".join(map(_named, files_of(path)))


def _count_rows(file: Path) -> int:
    return int(_ask(file, f"SELECT sum(num_rows) FROM parquet_file_metadata({_named(file)})")[0][0] or 0)


def about_headings(paths: Collection[Path]) -> tuple[str, ...]:
    """What is taken for the headings of texts, in words, for whoever has a table without one."""
    headings = {path: heading_of(files_of(path)[0]) for path in paths if _kind(path) is TEXTS}
    return tuple(
        f"{path}: line {heading.num_lines} is taken as heading: {', '.join(heading.names)}."
        if heading.is_there
        else f"{path}: no heading, since the first line holds numbers alone."
        for path, heading in headings.items()
    )


def ends_first(path: Path) -> list[str]:
    """The columns of a table of edges: sender, receiver, then what edges carry."""
    ends = _ends_of(names := columns_of(path), path)
    return [*ends, *(name for name in names if name not in ends)]


def _ends_of(names: Sequence[str], path: Path) -> Sequence[str]:
    """The columns of senders and receivers: those with such names, otherwise the first two."""
    if len(names) < 2:
        raise ValueError(
            f"{path} has one column, {names[0]!r}, but an edge has two ends: write one for each, such as source,target."
        )
    places = {name.lower(): place for place, name in enumerate(names)}
    for sender, receiver in ENDS:
        if sender in places and receiver in places:
            return names[places[sender]], names[places[receiver]]
    for name in (end for ends in ENDS for end in ends):
        if places.get(name, 0) > 1:
            raise ValueError(
                f"{path} has a column {name!r} and none that goes with it, but {list(names)}: call the two ends "
                "source and target, or put them first under other names."
            )
    return names[:2]


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
    _check_names(cells, path)
    if "" in cells:
        raise ValueError(
            f"{path} has a column without a name, number {cells.index('') + 1}, as pandas writes its index: name it, "
            "or write the table with index=False."
        )
    return Heading(cells, separator, skipped + 1, True)


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse two columns of one name, as id and ID are to DuckDB."""
    lower = [name.lower() for name in names]
    for at, name in enumerate(lower):
        if (before := lower.index(name)) < at:
            alike = "" if names[before] == names[at] else f" and {names[before]!r}, which differ by case alone"
            raise ValueError(f"{path} has two columns called {names[at]!r}{alike}: rename one of them.")


def _is_number(cell: str) -> bool:
    """Whether a cell is a number. Python's own digits of other scripts, and 1_000, are words here."""
    try:
        return "_" not in cell and cell.isascii() and float(cell) is not None
    except ValueError:
        return False


@contextmanager
def _open(path: Path) -> Iterator[TextIOWrapper]:
    with open_file(path) as raw:
        if (packed := _packed(path)) == ".zst":
            import pyarrow

            content: Any = pyarrow.CompressedInputStream(raw, "zstd")
        else:
            content = gzip.GzipFile(fileobj=raw) if packed else raw
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
    """Have DuckDB read the files of a table under a name. Empty cells are NULL."""
    types, made, texts = types_of(path), quoted(name), list[Text]()
    of = {column: f"CAST({quoted(column)} AS {kind})" for column, kind in types.items()}  # of each file, of its own
    cells = ", ".join(
        (f"nullif({of[column]}, '')" if kind == "VARCHAR" else of[column]) + f" AS {quoted(column)}"
        for column, kind in types.items()
    )
    if is_parquet(path):
        rows_of = {file: f"read_parquet({_named(file)})" for file in files_of(path)}
        queries, first = [], 0
        row = "row_number() OVER () - 1" if "file_row_number" in map(str.lower, types) else "file_row_number"
        for file, rows in rows_of.items():
            queries.append(f"SELECT {cells}, {row} + {first} AS {ROW} FROM {rows}")
            first += _count_rows(file)
        query = " UNION ALL BY NAME ".join(queries)
    elif _kind(path) is TEXTS:
        copies = work.folder / name
        texts = [Text(file, _with_one_end(file, Path(f"{copies} {at}"))) for at, file in enumerate(files_of(path))]
        rows_of = {text.path: f"({text.rows})" for text in texts}
        rows = " UNION ALL BY NAME ".join(text.rows for text in texts)
        query = f"SELECT {cells}, row_number() OVER () - 1 AS {ROW} FROM ({rows})"
    else:
        columns = ", ".join(f"{literal(column)}: {literal(kind)}" for column, kind in types.items())
        options = f"{OF_JSON}, columns = {{{columns}}}"
        rows_of = {file: f"read_json({_named(file)}, {options})" for file in files_of(path)}
        query = f"SELECT {cells}, row_number() OVER () - 1 AS {ROW} FROM read_json([{_listed(path)}], {options})"
    with told(path):
        work.run(f"CREATE OR REPLACE VIEW {made} AS {query}")
    lengths = {file: f"SELECT count(*) FROM {rows}" for file, rows in rows_of.items()} if len(rows_of) > 1 else {}
    table = Table(made, path, types, lengths=lengths, texts=texts)
    return replace(table, is_typed=False, check=partial(bad_lines, texts)) if texts else table


def _with_one_end(path: Path, copy: Path) -> Path:
    """The text, or a copy of it if its lines end in two ways, which DuckDB cannot read."""
    if _packed(path):
        return path
    with path.open("rb") as file:
        if not any(b"\r" in piece for piece in iter(partial(file.read, 1 << 22), b"")):
            return path
        file.seek(0)
        if all(line.endswith(b"\r\n") or not line.endswith(b"\n") for line in file):
            return path
        file.seek(0)
        with copy.open("wb") as written:
            for line in file:
                written.write(line[:-2] + b"\n" if line.endswith(b"\r\n") else line)
    return copy


class Text(NamedTuple):
    """A file of text, and the file that DuckDB reads in its place."""

    path: Path
    read: Path

    @property
    def cells(self) -> str:
        """The query of what DuckDB splits a line into: cells, or where any number of spaces separates them, a list."""
        heading = heading_of(self.path)
        of_lines, mark = heading.separator == " ", literal("\x1f" if heading.separator == " " else heading.separator)
        names = ["line"] if of_lines else [f"c{at}" for at in range(len(heading.names))]
        columns = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in names)
        options = {"auto_detect": "false", "header": "false", "skip": heading.num_lines, "columns": f"{{{columns}}}"}
        options |= {"delim": mark, "quote": "''" if of_lines else "'\"'", "escape": "''" if of_lines else "'\"'"}
        options |= {"store_rejects": "true", "rejects_limit": 9}
        told = ", ".join(f"{name} = {value}" for name, value in options.items())
        what = "string_split_regex(trim(line), ' +') AS cells" if of_lines else "*"
        return f"SELECT {what} FROM read_csv({_named(self.read)}, {told})"

    @property
    def rows(self) -> str:
        """The query of the cells by the names of the columns."""
        heading = heading_of(self.path)
        of_line = "cells[{}]" if heading.separator == " " else "c{}"
        names = [of_line.format(at + (heading.separator == " ")) for at in range(len(heading.names))]
        named = (f"trim({cell}) AS {quoted(name)}" for cell, name in zip(names, heading.names, strict=True))
        return f"SELECT {', '.join(named)} FROM ({self.cells})"

    def odd_lines(self, run: Run) -> list[tuple[Any, ...]]:
        """Lines with too many or too few cells, which DuckDB does not find where spaces separate them."""
        heading = heading_of(self.path)
        if heading.separator != " ":
            return []
        rows = f"SELECT row_number() OVER () + {heading.num_lines} AS line, len(cells) AS n FROM ({self.cells})"
        odd = f"SELECT line, 'COLUMNS', 'Found: ' || n FROM ({rows}) WHERE n <> {len(heading.names)} LIMIT 3"
        return [(str(self.read), *each) for each in run(odd)]


def bad_lines(texts: Sequence[Text], run: Run) -> list[str]:
    """What is wrong with lines that are no rows."""
    problems, of_read = [], {str(text.read): text.path for text in texts}
    there = run("SELECT 1 FROM duckdb_tables() WHERE table_name = 'reject_errors'")
    rejected = "SELECT DISTINCT file_path, line, error_type, error_message FROM reject_errors JOIN reject_scans"
    found = run(f"{rejected} USING (scan_id, file_id) ORDER BY ALL LIMIT 3") if there else []
    for read, line, kind, message in [*found, *(odd for text in texts for odd in text.odd_lines(run))]:
        if read not in of_read:
            continue  # of another table, which has told it
        if "UNICODE" in kind or "ENCODING" in kind:
            told = "it is not in UTF-8: save the file again with that encoding"
        elif "COLUMNS" in kind:
            width, many = len(heading_of(of_read[read]).names), message.rpartition("Found: ")[2]
            told = f"{many} cells, but there are {width} columns: give each row a cell for each"
        else:
            told = f"it cannot be read ({message.partition(chr(10))[0]})"
        problems.append(f"{of_read[read]}, line {line}: {told}.")
    for table in ("reject_errors", "reject_scans") if there else ():
        run(f"DROP TABLE {table}")
    return problems


def name_of(path: Path) -> str:
    """The name of a table, that of its file or of its folder."""
    return path.name if path.is_dir() else Path(path.stem if _packed(path) else path).stem
