"""What a folder of tables says of itself: keys, times and kinds of columns, and the tasks beside them.

RelBench v3 writes ``manifest.yaml``, ``db/<table>.parquet`` and ``tasks/<task>/manifest.yaml`` with a Parquet file for
each split. A plain folder has ``database.yaml`` with the same words, and its tables, Parquet or text, beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import is_integer, shown
from lightning_gnn_dist.graph.typed.tables import ASKED
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.prepare.arrays import SPLITS
from lightning_gnn_dist.prepare.plan import BothEnds, TablePlan
from lightning_gnn_dist.prepare.reading import columns_of, is_table, name_of

RELBENCH, PLAIN = "manifest.yaml", "database.yaml"
OF_DATABASE = {"val_timestamp", "test_timestamp", "tables", "text", "name", "description", "manifest_version", "notes"}
OF_TABLE = {"pkey", "time_col", "fkeys", "columns"}
KINDS = ("number", "category", "time", "text", "ignore")
RECOMMENDATION = "recommendation"
AUTOCOMPLETE = "autocomplete"  # the kind of a task whose answers are a column, which is hidden
TASK_TYPES = (
    "binary_classification",
    "multiclass_classification",
    "multilabel_classification",
    "regression",
    RECOMMENDATION,
)
LABELS = "labels"  # the file of a task whose times say which split a question is of


@dataclass(frozen=True, kw_only=True)
class TaskSpec(TablePlan):
    """What is known of a task, which is asked of rows of a table, perhaps at times.

    Args:
        name: Its name, which is that of a node type.
        files: The table of questions of each split, or one under ``LABELS``.
        task_type: One of ``TASK_TYPES``.
        entity_table: The table whose rows are asked about.
        entity_col: The column of their keys.
        targets: The column of the answer, or several.
        hidden: Table and column of what must not be seen.
        receiver: The table whose rows are recommended, if the task recommends.
        k: How many of them are judged.
    """

    name: str
    files: Mapping[str, Path]
    task_type: str
    entity_table: str
    entity_col: str
    targets: tuple[str, ...]
    hidden: tuple[tuple[str, str], ...]
    receiver: str | None = None
    k: int = 10


@dataclass(frozen=True, kw_only=True)
class AnswerSpec(TablePlan):
    """The answers of a task that recommends, which are edges.

    Args:
        task: The task.
    """

    task: TaskSpec


class Words(dict[Any, Any]):
    """Names with values, as they stand in one place of a file.

    Args:
        where: The place, for errors.
        said: What stands there.
        known: The names that may stand there; None where whoever wrote the file may say more.
    """

    def __init__(self, where: str, said: Any, known: Collection[str] | None = None) -> None:
        if not isinstance(said, dict):
            raise ValueError(f"{where} must hold names with values, as in {{pkey: id}}, got {shown(said)}.")
        super().__init__(said)
        self.where = where
        for word in said:
            if known is not None and word not in known:
                near = get_close_matches(str(word), known, n=1)
                way_out = f"did you mean {near[0]}?" if near else f"it takes {shown(sorted(known))}."
                raise ValueError(f"{where} knows no {shown(word)}: {way_out}")

    def names(self, word: str) -> dict[str, Any]:
        """The columns with values that are named under a word."""
        if not isinstance(found := self.get(word) or {}, dict):
            raise ValueError(f"{self.where}: {word} must name columns with values, got {shown(found)}.")
        return found

    def one_of(self, word: str, value: Any, known: Collection[str]) -> str:
        """The value of a word, which must be one of those known."""
        if str(value) not in known:
            raise ValueError(f"{self.where}: {word} must be one of {shown(list(known))}, got {shown(value)}.")
        return str(value)

    def check_columns(self, columns: Iterable[tuple[Any, str]], path: Path) -> None:
        """Refuse columns that a table has not, each of which some word names."""
        there = columns_of(path)
        for column, word in columns:
            if column is not None and column not in there:
                raise ValueError(
                    f"{self.where}: {word} names the column {shown(column)}, and {path} has {shown(there)}."
                )

    def moment(self, word: str) -> int | None:
        """A time as a number: that of seconds since 1970, or of the unit that the tables have."""
        if (value := self.get(word)) is None or is_integer(value):
            return value
        try:  # YAML makes a date of 2024-07-01
            moment = np.datetime64(str(value).removesuffix("+00:00").removesuffix("Z"), "s")
        except ValueError as error:
            raise ValueError(
                f"{self.where}: {word} must be a date, such as 2024-07-01, or a number, got {shown(value)}."
            ) from error
        return int(moment.astype(np.int64))


@dataclass(frozen=True)
class Manifest:
    """What a folder says of its tables.

    Args:
        path: The file that says so.
        tables: The tables, by name.
        tasks: The tasks, by name.
        val_time: Questions from here on validate, if that is told; rows from here on are in no statistics.
        test_time: Questions from here on test.
        text: Module and function that turns texts into rows of numbers, if one is named.
        notes: What whoever made the folder has left out.
    """

    path: Path
    tables: Mapping[str, TablePlan]
    tasks: Mapping[str, TaskSpec]
    val_time: int | None
    test_time: int | None
    text: str | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """Read what a folder says of itself, and look at the headings of its tables."""
        layouts = [folder / name for name in (RELBENCH, PLAIN) if (folder / name).is_file()]
        others = [name for name in ("nodes", "edges") if (folder / name).is_dir()]
        if len(layouts) > 1 or len(others) == 2:
            names = [path.name for path in layouts] + others
            raise ValueError(f"{folder} holds {shown(names)}, which are of two layouts: leave one of them out.")
        (path,) = layouts
        said = Words(str(path), parsed(path), OF_DATABASE if path.name == PLAIN else None)
        if not isinstance(listed := said.get("tables"), dict) or not listed:
            left = " ".join(["", *said.get("notes", ())])
            raise ValueError(
                f"{path} names no tables: list them under tables, as in tables: {{customer: {{pkey: id}}}}.{left}"
            )
        tables = {str(name): _table(folder, path, str(name), spec or {}) for name, spec in listed.items()}
        for name, table in tables.items():
            for column, target in table.fkeys.items():
                where = f"{path}: {name}.{column} holds keys of {shown(target)}"
                if target not in tables:
                    raise ValueError(f"{where}, and the tables are {shown(list(tables))}.")
                if tables[target].key is None:
                    raise ValueError(f"{where}, which has no pkey: say which column it is.")
        tasks = {file.parent.name: _task(file, tables) for file in _manifests_of_tasks(folder)}
        if both := sorted(tables.keys() & tasks.keys()):
            raise ValueError(
                f"{path}: {both[0]!r} is a table and a task, and each is a type of nodes: rename the task."
            )
        val_time, test_time = said.moment("val_timestamp"), said.moment("test_timestamp")
        if val_time is not None and test_time is not None and test_time <= val_time:
            raise ValueError(f"{path}: test_timestamp must be later than val_timestamp.")
        return cls(path, tables, tasks, val_time, test_time, said.get("text"), tuple(said.get("notes", ())))

    @property
    def lines(self) -> tuple[str, ...]:
        """What the keys and times of each table are, in words."""

        def told(each: TablePlan) -> str:
            words = [f"{word} {name}" for word, name in (("key", each.key), ("time", each.time_col)) if name]
            return ", ".join([*words, *(f"{column} -> {target}" for column, target in each.fkeys.items())])

        return tuple(f"{name}: {told(each)}." for name, each in self.tables.items())

    def hidden(self, table: str) -> frozenset[str]:
        """The columns of a table that a task hides."""
        return frozenset(column for task in self.tasks.values() for of, column in task.hidden if of == table)


def parsed(path: Path, text: str | None = None) -> Any:
    """What a file says in YAML, or a piece of it."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8") if text is None else text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML ({' '.join(str(error).split()):.200}): correct that line.") from error


def _manifests_of_tasks(folder: Path) -> list[Path]:
    folders = [each for each in sorted(folder.glob("tasks/*")) if each.is_dir()]
    for task in folders:
        if not (task / RELBENCH).is_file() and any(is_table(file) for file in task.iterdir()):
            raise ValueError(
                f"{task} has tables and no {RELBENCH}, which says what is asked: write one, as in task_type: "
                "regression, or take the folder away."
            )
    return [task / RELBENCH for task in folders if (task / RELBENCH).is_file()]


def _table(folder: Path, path: Path, name: str, spec: Any) -> TablePlan:
    said = Words(f"{path}: table {name!r}", spec, OF_TABLE if path.name == PLAIN else None)
    file = _file(folder / "db" if (folder / "db").is_dir() else folder, name, said.where)
    key, time, kinds = said.get("pkey"), said.get("time_col"), said.names("columns")
    fkeys = {column: str(of) for column, of in said.names("fkeys").items()}
    named = [(key, "pkey"), (time, "time_col"), *((column, "fkeys") for column in fkeys)]
    said.check_columns([*named, *((column, "columns") for column in kinds)], file)
    if key is None and not fkeys:
        raise ValueError(f"{said.where} has neither a pkey nor fkeys: name its keys, or leave it out.")
    keys = {key, *fkeys} - {None}
    for column, kind in kinds.items():
        said.one_of(f"column {column!r}", kind, KINDS)
        if column in keys:
            raise ValueError(
                f"{said.where}: column {column!r} holds keys, which are edges and no {kind}: leave one of both out."
            )
    if time in keys:
        raise ValueError(f"{said.where}: column {time!r} is said to hold keys and times: it can be one of them.")
    others = [column for column in columns_of(file) if column not in keys and kinds.get(column) != "ignore"]
    is_links = key is None and len(fkeys) == 2 and set(others) <= {time}
    edges: dict[EdgeType, BothEnds] = {(name, column, of): (None, column) for column, of in fkeys.items()}
    if is_links:
        (first, sender), (second, receiver) = fkeys.items()
        edges = {(sender, name, receiver): (first, second)}
    return TablePlan(
        path=file,
        columns=() if is_links else tuple(others),
        kind=None if is_links else name,
        key=key,
        edges=edges,
        both_ways=True,
        time_col=time,
        kinds=kinds,
    )


def _file(folder: Path, name: str, where: str) -> Path:
    """The one file of a table, or of a split of a task."""
    found = [path for path in sorted(folder.iterdir()) if is_table(path) and name_of(path) == name]
    if not found:
        raise ValueError(
            f"{where} has no file: {folder / name}.parquet (or .csv, .tsv, .txt, also gzipped) is missing."
        )
    if len(found) > 1:
        raise ValueError(f"{where} has two files, {found[0]} and {found[1]}: remove one of them.")
    return found[0]


_OF_PAIRS = {  # what a task that recommends calls these
    "entity_table": "src_entity_table",
    "entity_col": "src_entity_col",
    "target_col": "dst_entity_col",
}
OF_TASK = (
    *("task_type", "entity_table", "entity_col", "time_col", "target_col", "remove_columns", "kind"),
    *(*_OF_PAIRS.values(), "dst_entity_table", "eval_k"),
)


def _task(file: Path, tables: Mapping[str, TablePlan]) -> TaskSpec:
    said, name = Words(str(file), parsed(file)), file.parent.name
    of_nodes = [table for table, each in tables.items() if each.kind is not None]
    for word in map(str, said):
        if word not in OF_TASK and (near := get_close_matches(word, OF_TASK, n=1, cutoff=0.8)):
            raise ValueError(f"{file} says {word}, which nobody knows: did you mean {near[0]}?")
    kind = said.get("kind")
    if kind != AUTOCOMPLETE and get_close_matches(str(kind).lower(), [AUTOCOMPLETE], cutoff=0.8):
        raise ValueError(f"{file}: kind must be {AUTOCOMPLETE}, or a word that hides nothing, got {shown(kind)}.")
    task_type = said.one_of("task_type", said.get("task_type"), TASK_TYPES)
    recommends = task_type == RECOMMENDATION
    words = _OF_PAIRS if recommends else {word: word for word in _OF_PAIRS}
    of_entity, of_column, of_target = words.values()
    entity = said.one_of(of_entity, said.get(of_entity), of_nodes)
    column, time, targets = said.get(of_column), said.get("time_col"), said.get(of_target)
    if kind == AUTOCOMPLETE:
        column, time = column or tables[entity].key, time or tables[entity].time_col
    targets = tuple(targets) if isinstance(targets, list) else (targets,)
    if not isinstance(column, str) or not targets or not isinstance(targets[0], str):
        missing = of_target if isinstance(column, str) else of_column
        raise ValueError(f"{file} names no {missing}: the column of the task's tables that holds it.")
    hidden = _hidden(said, [[entity, target] for target in targets if kind == AUTOCOMPLETE], tables)
    files = _files(file.parent, file)
    for path in files.values():
        said.check_columns([(column, of_column), (time, "time_col")], path)
    if time is None and (recommends or any(table.time_col for table in tables.values())):
        raise ValueError(
            f"{file} has no time_col, and rows have times: without one a question would see its own future."
        )
    receiver, k = None, TaskSpec.k
    if recommends:
        receiver, k = said.one_of("dst_entity_table", said.get("dst_entity_table"), of_nodes), said.get("eval_k", k)
    if not is_integer(k) or k < 1 or (recommends and len(targets) > 1):
        raise ValueError(f"{file}: eval_k must be a number of rows to recommend, of one column, got {shown(k)}.")
    return TaskSpec(
        path=next(iter(files.values())),
        kind=name,
        edges={(entity, ASKED, name): (column, None)},
        name=name,
        files=files,
        task_type=task_type,
        entity_table=entity,
        entity_col=column,
        targets=targets,
        time_col=time,
        hidden=hidden,
        receiver=receiver,
        k=int(k),
    )


def _hidden(said: Words, more: list[Any], tables: Mapping[str, TablePlan]) -> tuple[tuple[str, str], ...]:
    """Table and column of what must not be seen, as the manifest of a task lists them, and more."""
    pairs = said.get("remove_columns") or ()
    if not isinstance(pairs, list | tuple) or not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        raise ValueError(
            f"{said.where}: remove_columns must be pairs of a table and a column, [[order, price]], got {shown(pairs)}."
        )
    hidden = sorted({(str(of), str(name)) for of, name in [*pairs, *more]})
    for of, name in hidden:
        if of not in tables or name not in columns_of(tables[of].path):
            raise ValueError(f"{said.where} hides the column {of}.{name}, and there is none: correct remove_columns.")
        if name in {tables[of].key, tables[of].time_col, *tables[of].fkeys}:
            raise ValueError(
                f"{said.where} hides {of}.{name}, which holds keys or times: hide columns of features alone."
            )
    return tuple(hidden)


def _files(folder: Path, file: Path) -> dict[str, Path]:
    """The tables of a task: one for each split, or one whose times, or whose column ``split``, tell it."""
    found = {name_of(path) for path in folder.iterdir() if is_table(path)}
    files = {name: _file(folder, name, f"{file}: {name}") for name in (*SPLITS, LABELS) if name in found}
    if LABELS in files and len(files) > 1:
        raise ValueError(
            f"{folder} has a table for all splits, {LABELS}, and one for {next(iter(files))}: leave one out."
        )
    if "train" not in files and LABELS not in files:
        raise ValueError(
            f"{folder} has no train.parquet (or .csv): write the tables of all splits there. RelBench does so for "
            "tasks of SQL by relbench.load_dataset(...).load_task(..., regenerate=True)."
        )
    return files
