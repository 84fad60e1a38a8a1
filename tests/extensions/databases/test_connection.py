"""Databases by their connection: SQLite, and a PostgreSQL that the test starts, become the graph of the same tables."""

import errno
import os
import pwd
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.databases.column_encoder import read_tables
from lightning_gnn_dist.extensions.databases.connection import SQLite, as_folder
from lightning_gnn_dist.prepare.edges import MemoryTooSmall
from lightning_gnn_dist.prepare.prepare_graph import as_files
from tests.extensions.databases.folders import FILES, TASK, write
from tests.prepare.kills import killing
from tests.ranks import start_ranks

TABLES = """\
CREATE TABLE customer (id TEXT PRIMARY KEY, city TEXT, age INTEGER);
CREATE TABLE "order" (
    number INTEGER PRIMARY KEY, customer TEXT REFERENCES Customer (ID), before INTEGER REFERENCES "order",
    at TIMESTAMP NOT NULL, price DOUBLE PRECISION, channel TEXT, due DATE, note TEXT
);
CREATE TABLE asked (place INTEGER, who TEXT, at TIMESTAMP, stays INTEGER);
CREATE TABLE unused (id INTEGER PRIMARY KEY, owner TEXT REFERENCES customer (id));
"""
HEAD = """\
-- What is asked of the shop.
-- val_timestamp: 2024-03-01
-- test_timestamp: 2024-04-01
-- tables: {order: {columns: {note: text}}}

"""
QUERY = "SELECT who, at, stays FROM asked ORDER BY place; -- it's all; '\n"
WORDS = "".join(f"-- {line}\n\n-- and that is\n" for line in TASK.splitlines())  # wherever they stand above a query
SQL = f"\ufeff\n{HEAD}-- task: stays\n\n{WORDS}{QUERY}"
ROWS = {"customer": "customer.csv", '"order"': "order.csv", "asked": "tasks/stays/labels.csv"}


def statements() -> Iterator[str]:
    """What makes the tables of ``FILES``."""
    yield from TABLES.split(";\n")[:-1]
    for table, file in ROWS.items():
        for at, line in enumerate(FILES[file].splitlines()[1:]):
            cells = [*([str(at)] if table == "asked" else []), *line.split(",")]
            values = [f"'{cell}'" if cell else "NULL" for cell in cells]
            yield f"INSERT INTO {table} VALUES ({', '.join(values)})"


def sqlite_at(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements():
            db.execute(statement)
        db.commit()
    return f"sqlite:///{path}"


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    """A server of this test alone, without a port."""
    programs = [shutil.which(name) for name in ("initdb", "postgres")]
    if None in programs:
        pytest.skip("no initdb and postgres on the PATH")
    folder, who = Path(f"/tmp/pg{os.getpid()}"), {}  # a socket's path is short
    folder.mkdir()
    if os.geteuid() == 0:  # which it refuses to be run by
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses to be run by root, and there is no user postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    how = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **who}
    data, name = str(folder / "data"), f"postgresql://me@/postgres?host={folder}"
    subprocess.run([programs[0], "-D", data, "-A", "trust", "-U", "me", "-E", "UTF8", "--no-sync"], check=True, **how)
    server = subprocess.Popen([programs[1], "-D", data, "-k", folder, "-c", "listen_addresses=", "-F"], **how)
    try:
        driver = pytest.importorskip("adbc_driver_postgresql.dbapi")
        while True:
            assert server.poll() is None, "the server has ended"
            try:
                opened = driver.connect(name)
                break
            except driver.Error:  # it starts
                time.sleep(0.05)
        with opened, opened.cursor() as cursor:
            for statement in statements():
                cursor.execute(statement)
            opened.commit()
        yield name
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def of_folder(folder: Path) -> Path:
    """The graph of the same rows in files, whose keys are in order."""
    heading, *rows = FILES["customer.csv"].splitlines()
    source = write(folder / "files", FILES | {"customer.csv": "\n".join([heading, *sorted(rows)]) + "\n"})
    prepare_graph(source, folder / "expected")
    return folder / "expected"


def check(connection: str, folder: Path, tasks: Path) -> None:
    """What is prepared, perhaps after kills, is the graph of the files."""
    prepare_graph(connection, folder / "graph", tasks=tasks)
    expected, graph = of_folder(folder), folder / "graph"
    assert Graph.open(graph).types.edge_types == Graph.open(expected).types.edge_types
    files = {str(path.relative_to(expected)): path.read_bytes() for path in expected.rglob("*.npy")}
    assert {str(path.relative_to(graph)): path.read_bytes() for path in graph.rglob("*.npy")} == files
    tables = read_tables(folder / "graph")
    assert tables.features == read_tables(expected).features
    assert "asked has no key of one column: it is left out." in tables.notes
    assert "unused has no rows: it is left out." in tables.notes
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]  # nothing is left of the copy


def copy_and_die(rank: int, world_size: int, connection: str, folder: Path, stage: str) -> None:
    prepare_graph(connection, folder / "graph", tasks=folder / "tasks.sql", on_progress=killing(stage))


def check_kills(connection: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.sql").write_text(SQL)
    for stage in ("copying customer", "copying order", "copying stays/labels", "writing what was copied"):
        with start_ranks(copy_and_die, 1, connection, tmp_path, stage) as ranks:
            assert ranks.results(may_die={0}) == [None]
        assert [path.name for path in (tmp_path / ".graph.given").iterdir()] == ["source.copying"]  # no half of a copy
    with start_ranks(copy_and_die, 1, connection, tmp_path, "reading stays") as ranks:
        assert ranks.results(may_die={0}) == [None]
    check(connection, tmp_path, tmp_path / "tasks.sql")


def test_after_a_kill_while_it_is_copied_it_is_the_same_graph(tmp_path: Path) -> None:
    check_kills(sqlite_at(tmp_path / "shop.db"), tmp_path)


@pytest.mark.slow
def test_after_a_kill_while_postgresql_is_copied_it_is_the_same_graph(postgres: str, tmp_path: Path) -> None:
    check_kills(postgres, tmp_path)


@pytest.mark.slow
def test_types_that_only_postgresql_has_are_read(postgres: str, tmp_path: Path) -> None:
    import adbc_driver_postgresql.dbapi as driver

    with driver.connect(postgres) as opened, opened.cursor() as cursor:
        cursor.execute("CREATE TYPE mood AS ENUM ('sad', 'fine')")
        cursor.execute(
            "CREATE TABLE pet (id UUID PRIMARY KEY, owner TEXT REFERENCES customer (id), mood mood, "
            "weight NUMERIC(9, 2), fed TIME, code CHAR(4), tags TEXT[], born TIMESTAMPTZ)"
        )
        cursor.execute(
            "INSERT INTO pet SELECT gen_random_uuid(), 'a3', (ARRAY['sad', 'fine'])[1 + n % 2]::mood, n * 1.25, "
            "'10:00', 'x' || n % 2, ARRAY['a'], now() FROM generate_series(1, 12) AS n"
        )
        opened.commit()
    prepare_graph(postgres, tmp_path / "graph")
    of_pets = {each.column: each.kind for each in read_tables(tmp_path / "graph").features["pet"]}
    assert of_pets == {"mood": "categories", "weight": "x", "code": "categories"}


def test_the_command_says_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    connection = sqlite_at(tmp_path / "shop.db")
    (tmp_path / "tasks.sql").write_text(SQL)
    main(["prepare", connection, str(tmp_path / "graph"), "--task", str(tmp_path / "tasks.sql")])
    said = capsys.readouterr().out
    assert "order: key number, time at, customer -> customer, before -> order." in said
    assert "unused has no rows: it is left out." in said


def test_a_yaml_with_tasks_beside_it_says_the_same(tmp_path: Path) -> None:
    files = {
        name: text for name, text in FILES.items() if name.startswith(("tasks/", "database")) and "csv" not in name
    }
    files["database.yaml"] = (
        "val_timestamp: 2024-03-01\ntest_timestamp: 2024-04-01\ntables: {order: {columns: {note: text}}}"
    )
    folder = write(tmp_path / "beside", files | {"tasks/stays/labels.sql": QUERY})
    check(sqlite_at(tmp_path / "shop.db"), tmp_path, folder / "database.yaml")


def test_a_copy_is_made_anew_for_other_tasks_and_rows(tmp_path: Path) -> None:
    connection, told = sqlite_at(tmp_path / "shop.db"), list[str]()
    for tasks, at in ((SQL, 1), (SQL, 1), (SQL + "-- another\n", 1), (SQL + "-- another\n", 2)):
        (tmp_path / "tasks.sql").write_text(tasks)
        os.utime(tmp_path / "shop.db", ns=(at, at))  # as after a change
        as_folder(connection, tmp_path / "copy", tmp_path / "tasks.sql", lambda stage, share: told.append(stage))
    assert told.count("copying customer") == 3 and "going on with the copy of" in told[4] and len(told) == 13


def test_a_disk_that_is_full_says_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SQLite, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match=r"to which the database is copied .*make room"):
        as_folder(sqlite_at(tmp_path / "shop.db"), tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["shop.db"]


def test_a_copy_stays_until_there_is_room_for_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection, told = sqlite_at(tmp_path / "shop.db"), list[str]()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightning_gnn_dist.prepare.prepare_graph.describe", full)
        with pytest.raises(OSError, match="make room and repeat"):
            prepare_graph(connection, tmp_path / "graph")
    prepare_graph(connection, tmp_path / "graph", on_progress=lambda stage, share: told.append(stage))
    assert "going on with the copy of" in told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph", "shop.db"]


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), True),
        (OSError(errno.ENOSPC, "No space left"), True),
        (BlockingIOError("Another process works"), True),
        (MemoryTooSmall("More is needed"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("A column is odd"), False),
    ],
)
def test_a_whole_copy_is_removed_where_it_is_refused_alone(error: Exception, stays: bool, tmp_path: Path) -> None:
    given = {"source": sqlite_at(tmp_path / "shop.db")}
    with pytest.raises(type(error)), as_files(tmp_path / "graph", given):
        raise error
    assert (tmp_path / ".graph.given").exists() == stays


def test_cells_of_sqlite_have_types_of_their_own(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "odd#1%20.db")) as db:
        db.execute("CREATE TABLE node (id INTEGER PRIMARY KEY, late, mixed, size REAL, picture DEFAULT x'ff00fe')")
        keys = "one INTEGER REFERENCES node, two INTEGER REFERENCES node"
        db.execute(f"CREATE TABLE edge ({keys}, PRIMARY KEY (one, two))")
        some = [(n, None if n < 3000 else "w" if n % 2 else "v", n if n % 2 else "x", n / 7) for n in range(4000)]
        db.executemany("INSERT INTO node (id, late, mixed, size) VALUES (?, ?, ?, ?)", some)
        db.executemany("INSERT INTO edge VALUES (?, ?)", [(n, (n * 7 + 1) % 4000) for n in range(4000)])
        db.commit()
    prepare_graph(f"sqlite:///{tmp_path / 'odd#1%20.db'}", tmp_path / "graph")
    graph, tables = Graph.open(tmp_path / "graph"), read_tables(tmp_path / "graph")
    assert graph.types.edge_types == (("node", "edge", "node"), ("node", "rev_edge", "node"))
    assert {each.column for each in tables.features["node"]} == {"late", "mixed", "size"}
    assert tables.notes == ("node.picture holds bytes that are no text: it is left out.",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph", "odd#1%20.db"]  # no other file was made
    assert graph.to_pyg()["node", "edge", "node"].edge_index.shape == (2, 4000)


Broken = Callable[[Path], tuple[str, Path | None]]


def _with_sql(text: str) -> Broken:
    def make(folder: Path) -> tuple[str, Path | None]:
        (folder / "tasks.sql").write_text(text)
        return sqlite_at(folder / "shop.db"), folder / "tasks.sql"

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ("mysql://me:secret@host/shop", None), r"mysql://me:...@host/shop is of no database"),
        (lambda folder: (f"sqlite:///{folder}/no.db", None), "no.db does not exist"),
        (_with_sql("SELECT 1;\n"), "a query that is of no task: write -- task: NAME above it"),
        (_with_sql("-- task: a\nSELECT 1;\n-- task: a\nSELECT 1;\n"), "two tasks called 'a'"),
        (_with_sql("-- task: a\n-- task_type: regression\n"), "task 'a' has no query"),
        (_with_sql("-- task: a/b\nSELECT 1\n"), "'a/b' cannot be the name of a table or task"),
        (_with_sql("-- task: a\nSELECT 1\n-- remove_columns: []\n"), "says remove_columns in a query, where it is not"),
        (_with_sql("-- task: a\n-- tables: {order: ignore}\nSELECT 1\n"), "'a' says tables, which is said once"),
        (_with_sql("-- tables: {orders: {time_col: at}}\n"), "has no table 'orders', but .*'order'"),
        (_with_sql(SQL.replace("FROM asked", "FROM question")), "was not read .*question"),
        (_with_sql(SQL.replace("entity_table: customer", "entity_table: client")), "entity_table must be one of"),
    ],
)
def test_what_cannot_be_read_is_refused(make: Broken, message: str, tmp_path: Path) -> None:
    connection, tasks = make(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        prepare_graph(connection, tmp_path / "graph", tasks=tasks)
    assert "secret" not in str(refusal.value)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("customer SET age = 1e999 WHERE id = 'b7'", "^table customer: column 'age' holds 'inf' in row 2, which is"),
        (
            "\"order\" SET customer = 'c7' WHERE number = 16",
            "^table order: column 'customer' holds 'c7' in row 6, which no row",
        ),
        ("asked SET who = 'q7' WHERE place = 1", "^task stays: column 'who' holds 'q7' in row 2"),
    ],
)
def test_an_error_names_the_table_and_not_its_copy(change: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.sql").write_text(SQL)
    connection = sqlite_at(tmp_path / "shop.db")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        db.execute(f"UPDATE {change}")
        db.commit()
    with pytest.raises(ValueError, match=message) as refusal:
        prepare_graph(connection, tmp_path / "graph", tasks=tmp_path / "tasks.sql")
    assert ".given" not in str(refusal.value)


def test_tasks_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for a database that is named by a connection: leave them out"):
        prepare_graph(write(tmp_path / "files", FILES), tmp_path / "graph", tasks="tasks.sql")
