"""A database of SQLite or PostgreSQL as a folder with a ``database.yaml``: ADBC copies tables, and answers of queries.

Keys are those of the catalogue, and the time of a row is its first column of moments, or else of days. All tables are
those of one moment. Tables that can be no part of a graph are left out, and the folder says which, under ``notes``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.databases.manifest import OF_TASK, PLAIN, RELBENCH, Words, parsed
from lightning_gnn_dist.graph.convert import NAME
from lightning_gnn_dist.graph.storage.npy import FULL
from lightning_gnn_dist.prepare.engine import duckdb_for, literal, quoted, told

IGNORE = "ignore"  # what is said of a table that is left out
LITTLE = {"memory_limit": "500MB"}  # for what is only passed on
DONE = ".copied"  # the mark of a copy that is whole: what was asked for
TASK = re.compile(r"--\s*task:\s*(.+?)\s*$")
WORD = re.compile(r"--\s?(\s*[\w-]+\s*:.*)$")
MORE = re.compile(r"--\s(\s+\S.*|- .*)$")  # goes on with the words above: it stands further in, or is of a list
COMMENT = re.compile(r"""('[^']*'|"[^"]*")|--[^\n]*|/\*.*?\*/""", re.DOTALL)  # or what it cannot begin in
OF_ALL = ("val_timestamp", "test_timestamp", "tables")  # words of the database, which no task has
IN_QUERY = re.compile(rf"(?:^|--|/\*)\W*({'|'.join((*OF_TASK, *OF_ALL))})\s*:(?!:)", re.MULTILINE)

Keys = tuple[list[str], list[tuple[list[str], str, list[str]]]]  # the key; of others their columns, and what they name
Columns = dict[str, tuple[str, str]]  # the SQL of each there, and DuckDB's of what comes


@dataclass
class Asked:
    """What a user says beside the connection, in a file of SQL or in a ``database.yaml`` with a folder ``tasks``.

    Args:
        said: The words of a ``database.yaml``.
        tasks: The words of the manifest of each task.
        queries: The SQL of each table of a task: ``stays/labels``.
        files: Tables of tasks that are there already.
        text: All of it, with the sizes and times of files, by which a copy is known.
    """

    said: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    queries: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    text: str = ""

    @classmethod
    def of(cls, path: Path | None) -> Asked:
        """Read such a file."""
        made = cls()
        if path is None:
            return made
        made.text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".sql":
            made._read_sql(path)
            return made
        made.said = parsed(path, made.text) or {}
        for file in sorted(path.parent.glob("tasks/*/*")):
            if file.suffix not in (".sql", ".yaml"):
                made.files.append(file)
                made.text += _state(file)
                continue
            made.text += (text := file.read_text(encoding="utf-8-sig"))
            if file.name == RELBENCH:
                made.tasks[file.parent.name] = parsed(file, text)
            elif file.suffix == ".sql":
                made._add_query(file, f"{file.parent.name}/{file.stem}", text)
        return made

    def _read_sql(self, path: Path) -> None:
        """A query stands below ``-- task: NAME`` and the words of its manifest; above all are those of the database."""
        name, queries, words = "", dict[str, list[str]](), {"": list[str]()}
        for whole in self.text.splitlines():
            if found := TASK.match(line := whole.strip()):
                if (name := found[1]) in words:
                    raise ValueError(f"{path} has two tasks called {name!r}: rename one of them.")
                words[name] = []
            elif name in queries or (line and not line.startswith("--")):
                queries.setdefault(name, []).append(whole)
            elif found := WORD.match(line) or (MORE.match(line) if words[name] else None):
                words[name].append(found[1])
        if "" in queries:
            raise ValueError(f"{path} has a query that is of no task: write -- task: NAME above it, then its words.")
        said = {each: parsed(path, "\n".join(lines)) or {} for each, lines in words.items()}
        self.tasks = {each: dict(Words(f"{path}: the words above {each or 'all tasks'}", said[each])) for each in said}
        self.said = self.tasks.pop("")
        for name, of_task in self.tasks.items():
            if wrong := [word for word in of_task if word in OF_ALL]:
                raise ValueError(
                    f"{path}: task {name!r} says {wrong[0]}, which is said once: write it above all tasks."
                )
            if name not in queries:
                raise ValueError(f"{path}: task {name!r} has no query.")
            self._add_query(path, f"{name}/labels", "\n".join(queries[name]))

    def _add_query(self, path: Path, name: str, query: str) -> None:
        """Keep a query, in which words of a task would not be read."""
        if found := IN_QUERY.search(query):
            raise ValueError(f"{path} says {found[1]} in a query, where it is not read: write it above the query.")
        self.queries[name] = query


@dataclass
class Reader:
    """Runs queries.

    Args:
        cursor: ADBC's.
        notes: What was left out.
    """

    cursor: Any
    notes: list[str] = field(default_factory=list)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query of a few."""
        self.cursor.execute(sql)
        return list(self.cursor.fetchall())

    def write(self, sql: str, columns: Columns, target: Path) -> None:
        """Write what a query returns as Parquet."""
        listed = ", ".join(f"{cell} AS {quoted(name)}" for name, (cell, _) in columns.items())
        made = ", ".join(f"{cell} AS {quoted(name)}" for name, (_, cell) in columns.items())
        self.cursor.execute(f"SELECT {listed} FROM ({sql}\n) AS q")
        target.parent.mkdir(parents=True, exist_ok=True)
        with told(target), duckdb_for().connect(config=LITTLE) as db:
            db.register("answer", self.cursor.fetch_record_batch())
            db.execute(f"COPY (SELECT {made} FROM answer) TO {literal(target)} (FORMAT parquet)")


class SQLite(Reader):
    """Cells have types of their own there: a column of other things than whole numbers comes as text, never empty.

    For the driver the first rows say what a column is, and they may be empty.
    """

    def begin(self) -> None:
        self.rows("SELECT count(*) FROM sqlite_master")  # in a transaction, which begins with the first statement

    def tables(self) -> list[str]:
        of_users = "type = 'table' AND name NOT LIKE 'sqlite_%'"
        return [name for (name,) in self.rows(f"SELECT name FROM sqlite_master WHERE {of_users} ORDER BY 1")]

    def keys(self, table: str) -> Keys:
        """Names have no case there: they are as those that have them were made."""
        found = dict[int, tuple[list[str], str, list[str]]]()
        for number, target, mine, theirs in self.rows(
            'SELECT f.id, coalesce(t.name, f."table"), f."from", coalesce(c.name, f."to") '
            f"FROM pragma_foreign_key_list({literal(table)}) AS f "
            "LEFT JOIN sqlite_master AS t ON t.type = 'table' AND t.name = f.\"table\" COLLATE NOCASE "
            'LEFT JOIN pragma_table_info(f."table") AS c ON c.name = f."to" COLLATE NOCASE ORDER BY f.id DESC, f.seq'
        ):
            each = found.setdefault(number, ([], target, []))
            each[0].append(mine)
            each[2].extend([theirs] if theirs else self._key(target))
        return self._key(table), list(found.values())

    def _key(self, table: str) -> list[str]:
        named = f"SELECT name FROM pragma_table_info({literal(table)}) WHERE pk > 0 ORDER BY pk"
        return [name for (name,) in self.rows(named)]

    def columns(self, called: str, sql: str, keys: Sequence[str]) -> Columns:
        self.cursor.execute(f"SELECT * FROM ({sql}\n) AS q LIMIT 0")
        names = [each[0] for each in self.cursor.description]
        held = ", ".join(f"group_concat(DISTINCT typeof({quoted(name)}))" for name in names)
        found = {}
        for name, kinds in zip(names, self.rows(f"SELECT {held} FROM ({sql}\n) AS q")[0], strict=True):
            cell, there = quoted(name), set((kinds or "").split(",")) - {"null", ""}
            if "blob" in there and not self._are_texts(cell, sql):
                self.notes.append(f"{called}.{name} holds bytes that are no text: it is left out.")
                continue
            if there <= {"integer"}:
                found[name] = cell, f"CAST({cell} AS BIGINT)"
                continue
            is_real, come = there <= {"integer", "real"}, f"nullif({cell}, '')"
            text = f"printf('%!.17g', {cell})" if is_real else f"CAST({cell} AS TEXT)"
            text = f"CASE WHEN {cell} IS NULL THEN '' ELSE {text} END"
            found[name] = text, f"CAST({come} AS DOUBLE)" if is_real else come
        return found

    def _are_texts(self, cell: str, sql: str) -> bool:
        """Whether the bytes in a column are those of texts."""
        import pyarrow

        self.cursor.execute(f"SELECT CAST({cell} AS BLOB) FROM ({sql}\n) AS q WHERE typeof({cell}) = 'blob'")
        try:
            for batch in self.cursor.fetch_record_batch():
                batch.column(0).cast("string")
        except pyarrow.ArrowInvalid:
            return False
        return True

    def kinds(self, table: str) -> dict[str, str]:
        return dict(self.rows(f"SELECT name, lower(type) FROM pragma_table_info({literal(table)})"))


class PostgreSQL(Reader):
    """The tables of the first schema that the connection looks into."""

    def begin(self) -> None:
        self.cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def tables(self) -> list[str]:
        mine = "relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition"
        return [name for (name,) in self.rows(f"SELECT relname::text FROM pg_class WHERE {mine} ORDER BY 1")]

    def keys(self, table: str) -> Keys:
        names = (
            "ARRAY(SELECT attname::text FROM unnest({}) WITH ORDINALITY AS u(n, o) "
            "JOIN pg_attribute ON attrelid = {} AND attnum = n ORDER BY o)"
        )
        found = self.rows(
            f"SELECT contype::text, {names.format('conkey', 'conrelid')}, coalesce(relname::text, ''), "
            f"{names.format('confkey', 'confrelid')} FROM pg_constraint LEFT JOIN pg_class AS c ON c.oid = confrelid "
            f"WHERE contype IN ('p', 'f') AND conrelid = {literal(quoted(table))}::regclass ORDER BY conkey"
        )
        key = [name for kind, mine, _, _ in found if kind == "p" for name in mine]
        return key, [(mine, of, theirs) for kind, mine, of, theirs in found if kind == "f"]

    def columns(self, called: str, sql: str, keys: Sequence[str]) -> Columns:
        found = {}
        for each in self._schema(sql):
            cell, of_server, of_arrow = quoted(each.name), each.metadata[b"POSTGRESQL:type"], str(each.type)
            cast = ""
            if of_server == b"numeric" and each.name not in keys:
                cast = "::double precision"
            elif of_server in (b"numeric", b"bpchar") or of_arrow.startswith(("extension", "time64", "month")):
                cast = "::text"
            found[each.name] = cell + cast, cell
        return found

    def kinds(self, table: str) -> dict[str, str]:
        return {each.name: str(each.type) for each in self._schema(f"SELECT * FROM {quoted(table)}")}

    def _schema(self, sql: str) -> Any:
        self.cursor.execute(f"SELECT * FROM ({sql}\n) AS q LIMIT 0")
        return self.cursor.fetch_arrow_table().schema


Source = SQLite | PostgreSQL


def as_folder(
    connection: str,
    folder: Path,
    questions: Path | None = None,
    on_progress: Callable[[str, float], None] = lambda stage, share: None,
) -> Path:
    """Copy the tables of a database into a folder, unless that was done before for the same files and questions.

    Args:
        connection: ``sqlite:///shop.db`` or ``postgresql://user@host/shop``.
        folder: The folder.
        questions: A file of SQL with a query for each task, or a ``database.yaml`` with tasks beside it.
        on_progress: Called with the name of a table that is copied, and the share of tables that is.
    """
    asked, draft = Asked.of(questions), folder.with_name(f"{folder.name}.copying")
    mark = _mark(connection, asked)
    if (folder / DONE).is_file() and (folder / DONE).read_text() == mark:
        made = datetime.fromtimestamp((folder / DONE).stat().st_mtime)
        on_progress(f"going on with the copy of {made:%Y-%m-%d %H:%M} (remove {folder} to copy anew)", 1.0)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with _opened(connection) as source:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "db").mkdir(parents=True)
        tables, notes = _tables(source, asked.said.get("tables") or {})
        if wrong := [name for name in (*tables, *asked.tasks) if not NAME.fullmatch(name)]:
            raise ValueError(
                f"{shown(wrong[0])} cannot be the name of a table or task, which becomes that of a folder: rename it, "
                "without slashes, or leave the table out (-- tables: {NAME: ignore})."
            )
        copies = dict[str, tuple[str, list[str]]]()  # the query of each table, and its columns of keys
        for name, spec in tables.items():
            order = f" ORDER BY {quoted(spec['pkey'])}" if "pkey" in spec else ""
            keys = [*([spec["pkey"]] if "pkey" in spec else []), *spec.get("fkeys", {})]
            copies[f"db/{name}"] = f"SELECT * FROM {quoted(name)}{order}", keys
        for name, sql in asked.queries.items():
            words = asked.tasks.get(Path(name).parent.name, {})
            keys = [str(word) for key, word in words.items() if key.endswith("entity_col")]
            without = COMMENT.sub(lambda found: found[1] or " ", sql)
            copies[f"tasks/{name}"] = without.strip().rstrip(";"), keys
        for at, (name, (sql, keys)) in enumerate(copies.items()):
            on_progress(f"copying {name.partition('/')[2]}", at / len(copies))
            with _removed_where_full(draft):
                source.write(sql, source.columns(name.partition("/")[2], sql, keys), draft / f"{name}.parquet")
    on_progress("writing what was copied", 1.0)
    for file in asked.files:
        (draft / "tasks" / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, draft / "tasks" / file.parent.name / file.name)
    for name, words in asked.tasks.items():
        (draft / "tasks" / name).mkdir(parents=True, exist_ok=True)
        (draft / "tasks" / name / RELBENCH).write_text(yaml.safe_dump(words))
    (draft / PLAIN).write_text(
        yaml.safe_dump(asked.said | {"tables": tables, "notes": notes + source.notes}, sort_keys=False)
    )
    (draft / DONE).write_text(mark)
    os.rename(draft, folder)
    return folder


@contextmanager
def _removed_where_full(draft: Path) -> Iterator[None]:
    """Remove a copy to which a disk has no room, and say the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        shutil.rmtree(draft)
        raise OSError(
            error.errno,
            f"the disk of {draft.parent} is full, to which the database is copied ({error.strerror}): make room, or "
            "write the graph to another disk, and repeat the command",
        ) from error


def _mark(connection: str, asked: Asked) -> str:
    """What a copy is known by; how a server's rows have changed nobody tells."""
    file = _file_of(connection)
    states = [_state(each) for each in (file, file.with_name(f"{file.name}-wal"))] if file else []
    return hashlib.sha256(f"{connection}\n{states}\n{asked.text}".encode()).hexdigest()


def _state(file: Path) -> str:
    """Size and time of a file; of one that is missing the same as of an empty one, such as SQLite leaves beside it."""
    about = file.stat() if file.is_file() else None
    return f"{file} {about.st_size} {about.st_mtime_ns}\n" if about and about.st_size else ""


def words_of(folder: Path, questions: Path | None) -> dict[Path, str]:
    """What errors call the files of a copy, of which a user knows nothing: those of tables, of tasks, and all."""
    words = {path: f"table {path.stem}" for path in folder.glob("db/*")}
    words |= {path: f"task {path.parent.name}" for path in folder.glob("tasks/*/*")}
    words |= {path: f"task {path.name}" for path in folder.glob("tasks/*")}
    return words | {folder / PLAIN: str(questions or "the database")}


def _time_of(kinds: Mapping[str, str]) -> str | None:
    """The first column of moments, or else of days, given the types of all columns."""
    moments = [name for name, kind in kinds.items() if kind.startswith(("timestamp", "datetime"))]
    return next(iter([*moments, *(name for name, kind in kinds.items() if kind.startswith("date"))]), None)


def _tables(source: Source, said: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What a ``database.yaml`` says of the tables, and what was left out."""
    notes, names = list[str](), source.tables()
    if unknown := sorted(said.keys() - set(names)):
        raise ValueError(f"The database has no table {unknown[0]!r}, but {shown(names)}.")
    kept = []
    for name in names:
        if said.get(name) == IGNORE:
            continue
        if source.rows(f"SELECT 1 FROM {quoted(name)} LIMIT 1"):
            kept.append(name)
        else:
            notes.append(f"{name} has no rows: it is left out.")
    of_all = {name: source.keys(name) for name in kept}
    keys = {name: key[0] for name, (key, _) in of_all.items() if len(key) == 1}
    for _, others in of_all.values():
        for _, target, theirs in others:
            if target in of_all and len(theirs) == 1:
                keys.setdefault(target, theirs[0])
    tables = {}
    for name, (_, others) in of_all.items():
        fkeys = {}
        for mine, target, theirs in others:
            if target in of_all and len(mine) == 1 and theirs == [keys.get(target)]:
                fkeys[mine[0]] = target
            else:
                why = "not by a key of one column" if target in of_all else "that is not read"
                notes.append(f"{name}.{'/'.join(mine)} names rows of {target}, and {why}: it makes no edges.")
        spec = {"pkey": keys.get(name), "time_col": _time_of(source.kinds(name)), "fkeys": fkeys}
        spec |= said.get(name) or {}
        if spec["pkey"] is None and not spec["fkeys"]:
            notes.append(f"{name} has no key of one column: it is left out.")
            continue
        tables[name] = {word: value for word, value in spec.items() if value}
    return tables, notes


def _file_of(connection: str) -> Path | None:
    """The file of a database, if it is one of SQLite."""
    scheme, _, place = connection.partition("://")
    if scheme != "sqlite":
        return None
    for file in (Path(place.removeprefix("/")), Path(place)):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{place.removeprefix('/')} does not exist: sqlite:///FILE, or sqlite:////absolute/FILE.")


@contextmanager
def _opened(connection: str) -> Iterator[Source]:
    """Open a database to read it; errors of its driver say what to do."""
    scheme = connection.partition("://")[0]
    kinds: dict[str, type[Source]] = {"sqlite": SQLite, "postgresql": PostgreSQL, "postgres": PostgreSQL}
    hidden = re.sub(r"//([^:/@]*):[^@]*@", r"//\1:...@", connection)
    if scheme not in kinds:
        raise ValueError(
            f"{hidden} is of no database that is read, which are sqlite:///FILE and postgresql://USER@HOST/NAME: write "
            "its tables as Parquet, with a database.yaml beside them."
        )
    if file := _file_of(connection):
        connection = f"file:{quote(str(file))}?mode=ro"
    try:
        if scheme == "sqlite":
            from adbc_driver_sqlite import dbapi as driver
        else:
            from adbc_driver_postgresql import dbapi as driver  # type: ignore[no-redef]
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ModuleNotFoundError(
            "Databases take ADBC's drivers, DuckDB and pyarrow, which are not installed: "
            'pip install "lightning-gnn-dist[tables,database]".'
        ) from error
    try:
        with driver.connect(connection) as opened, opened.cursor() as cursor:
            source = kinds[scheme](cursor)
            source.begin()
            yield source
    except driver.Error as error:
        raise ValueError(
            f"{hidden} was not read ({' '.join(str(error).split()):.300}). Correct that, and try again."
        ) from error
