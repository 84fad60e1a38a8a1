"""The tables of a task as nodes: a question for each row, of one row of another table at one time.

Where a task recommends, an edge leads from a question to each right answer, which nobody sees. A question without an
answer that is known is not learned; what it is recommended is found all the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.extensions.databases.keyed import Keyed, span_of
from lightning_gnn_dist.extensions.databases.manifest import LABELS, Manifest, TaskSpec
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import ANSWER, ANSWERED, ASKED, NEVER, TIME, TableTask, as_told
from lightning_gnn_dist.prepare.files.arrays import SPLIT_WORDS, SPLITS, check_classes
from lightning_gnn_dist.prepare.tables.engine import ROW, Work, literal, numpy_of, quoted, told
from lightning_gnn_dist.prepare.tables.rows import Ids, query_of, write_edges


class Answers(NamedTuple):
    """The answers of some questions.

    Attributes:
        words: The answers as words, None where one is missing.
        numbers: The answers as numbers, of several labels a row for each question; NaN where one is missing or a word.
        missing: Which answers are missing.
        are_words: Whether some are no numbers.
    """

    words: Column
    numbers: Column
    missing: Column
    are_words: bool


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of a task, in the order of their tables, that of train first, then val and test.

    Args:
        spec: What is known of the task.
        manifest: What is known of all tables.
        work: Reads the tables.
        folder: Gets the arrays.
        ids: The ids of the rows of each table.
    """

    spec: TaskSpec
    manifest: Manifest
    work: Work
    folder: Path
    ids: Mapping[str, Ids]

    def write(self) -> dict[str, Any]:
        """Write the arrays and the edges; return what is to be known of the task."""
        shutil.rmtree(self.folder, ignore_errors=True)
        spec, tables = self.spec, dict[str, Keyed]()
        for split, path in spec.files.items():
            with told(path):
                tables[split] = Keyed.load(self.work, self._name(split), path, [spec.entity_col], spec.time_col)
                self._check_cells(tables[split], split)
        self.work.check()
        asked, starts = self._read(tables), np.cumsum([0, *(each.num_rows for each in tables.values())])
        entities, times, splits = (asked[name].to_numpy() for name in ("n0", "t", "s"))
        count, of_time = len(splits), spec.time_col is not None
        if spec.receiver is not None:
            of_splits = zip(tables.items(), starts, strict=False)
            edges = [self._answer_edges(table, split, int(first)) for (split, table), first in of_splits]
        self.work.check()
        task = TableTask(spec.name, spec.task_type, spec.entity_table, 0, hidden=spec.hidden)
        if spec.receiver is None:
            arrays, task = self._labels(self._answers(asked), splits)
        else:
            rows, found = (np.concatenate(each) for each in zip(*edges, strict=True))
            task = replace(task, receiver=spec.receiver, k=spec.k)
            arrays = {f"{split}_mask": splits == at for at, split in enumerate(SPLITS)}
            arrays["train_mask"] &= np.isin(np.arange(count), rows)
        if not arrays["train_mask"].any():
            told_way = "fill some, or give a later val_timestamp"
            raise ValueError(f"{self._where} are those of no question to train on: {told_way}.")
        are_dates = any(table.are_dates for table in tables.values())
        if of_time:
            arrays[TIME] = times
            self._check_order(times, splits, are_dates)
            task = replace(task, are_dates=are_dates)
        (self.folder / "arrays").mkdir(parents=True, exist_ok=True)
        for name, array in (arrays | {"num_nodes": np.array(count)}).items():
            save(self.folder / "arrays" / f"{name}.npy", array)
        save(self.folder / "ids.npy", np.arange(count))
        self._keep_own(asked["f"].to_numpy(), times if of_time else None, are_dates)
        folder, numbered = self.folder / "edges", Ids(self._path, count)
        seen = {TIME: times - 1} if of_time else {}  # a row that is asked about is seen whenever it was there
        write_edges(folder / ASKED, (self.ids[spec.entity_table], numbered), entities, np.arange(count), **seen)
        if spec.receiver is not None:
            never = {TIME: np.full(len(rows), NEVER), ANSWERED: times[rows]} if of_time else {}
            write_edges(folder / ANSWER, (numbered, self.ids[spec.receiver]), rows, found, **never)
        return {"task": asdict(task), "notes": [], "times": span_of(times, are_dates) if of_time else None}

    def _keep_own(self, entities: Column, times: Column | None, are_dates: bool) -> None:
        """Keep whom questions are about, and when, as their tables tell it; files are numbered in order."""
        own = {self.spec.entity_col: entities.astype(np.str_) if entities.dtype.kind == "O" else entities}
        if times is not None:
            own[self.spec.time_col or ""] = times.astype("datetime64[s]") if are_dates else times
        (self.folder / "own").mkdir(parents=True)
        for at, (name, column) in enumerate(own.items()):
            save(self.folder / "own" / f"{at} {name.replace('/', '_')}.npy", column)

    def _name(self, split: str) -> str:
        return f"task {self.spec.name} {split}"

    def _targets(self, table: Keyed, split: str) -> tuple[str, ...]:
        """The columns of answers; none of a table to test that has none."""
        there, path = table.table.types, table.table.source
        without = [target for target in self.spec.targets if target not in there]
        if without and split != "test":
            raise ValueError(f"{path} has no column {without[0]!r}, the answers of the task: it has {sorted(there)}.")
        return () if without else self.spec.targets

    def _check_cells(self, table: Keyed, split: str) -> None:
        """Note questions about no row, or without a time, or of an unknown split."""
        note, spec = self.work.refuse_cells, self.spec
        note(table.table, spec.entity_col, f"{quoted(spec.entity_col)} IS NULL", "and a question is about a row.")
        if table.time is not None:
            assert spec.time_col is not None
            note(table.table, spec.time_col, f"{table.time} = {NEVER}", "and a question has a time.")
        if split == LABELS and "split" in table.table.types:
            known = ", ".join(map(literal, SPLIT_WORDS))
            bad = f"lower(coalesce(CAST(split AS VARCHAR), '')) NOT IN ({known})"
            note(table.table, "split", bad, "where train, val or test is known.")
        elif split == LABELS and (table.time is None or None in (self.manifest.val_time, self.manifest.test_time)):
            raise ValueError(
                f"{table.table.source} does not say which question is to train on: give {self.manifest.path} a "
                "val_timestamp and a test_timestamp, this table a column split, or write train, val and test apart."
            )

    def _read(self, tables: Mapping[str, Keyed]) -> Any:
        """The questions of all tables, of pyarrow: their entities ``f`` and rows ``n0``, times, splits and answers."""
        spec, queries = self.spec, list[str]()
        ids = self.ids[spec.entity_table]
        for at, (split, table) in enumerate(tables.items()):
            of_split = str(SPLITS.index(split)) if split in SPLITS else self._split(table)
            asked = {"f": quoted(spec.entity_col), "t": str(table.time or 0), "s": of_split, "file": str(at)}
            for place, name in enumerate(self._targets(table, split) if spec.receiver is None else ()):
                cells = table.table.cells(name)
                asked |= {f"w{place}": cells.name if cells.is_list else cells.value, f"v{place}": cells.number}
            queries.append(query_of(table.table, asked, [(spec.entity_col, ids)], digits=True))
        rows = self.work.db.sql(f"{' UNION ALL BY NAME '.join(queries)} ORDER BY file, row").to_arrow_table()
        unknown = set(rows["file"].to_numpy()[rows["n0"].to_numpy() < 0].tolist())
        for at, table in enumerate(tables.values()):
            if at in unknown and not self.manifest.may_dangle:
                key = self.manifest.tables[spec.entity_table].pkey or ""
                table.refuse_unknown(self.work, spec.entity_col, ids, spec.entity_table, key)
        return rows

    def _split(self, table: Keyed) -> str:
        """The SQL of the place of a question's split in ``SPLITS``, in one table for all of them."""
        if "split" in table.table.types:
            cases = (f"WHEN {literal(word)} THEN {SPLITS.index(split)}" for word, split in SPLIT_WORDS.items())
            return f"CASE lower(CAST(split AS VARCHAR)) {' '.join(cases)} END"
        of_test = f"CAST({table.time} >= {self.manifest.test_time} AS BIGINT)"
        return f"CAST({table.time} >= {self.manifest.val_time} AS BIGINT) + {of_test}"

    def _answers(self, asked: Any) -> Answers:
        """The answers of all questions; none are known where there is no column."""
        words = [asked[f"w{at}"].to_pylist() for at in range(len(self.spec.targets))]
        if str(asked["w0"].type).startswith("list"):
            return self._of_lists(words[0])
        of_columns = []
        for at, each in enumerate(words):
            column = np.array([*each, None], np.object_)[:-1]
            numbers = asked[f"v{at}"].to_numpy().astype(np.float64)
            is_none = np.array([word is None for word in each], np.bool_)
            are_words = bool((np.isnan(numbers) & ~is_none & (np.char.lower(column.astype(np.str_)) != "nan")).any())
            of_columns.append(Answers(column, numbers, is_none if are_words else np.isnan(numbers), are_words))
        if self.spec.task_type != "multilabel_classification":
            return of_columns[0]
        if len(words) == 1 or any(column.are_words for column in of_columns):
            raise ValueError(
                f"{self._path}: the answers {self.spec.targets[0]!r} must be lists of 0 and 1 (in Parquet), or a "
                "column for each label, target_col: [first, second]."
            )
        numbers = np.column_stack([column.numbers for column in of_columns])
        return Answers(of_columns[0].words, numbers, np.any([column.missing for column in of_columns], 0), False)

    def _of_lists(self, lists: list[Any]) -> Answers:
        """Lists of numbers as a row of numbers each."""
        if self.spec.task_type != "multilabel_classification":
            raise ValueError(f"{self._where} are lists, and those of a {self.spec.task_type} are none.")
        missing = np.array([each is None for each in lists])
        there = [np.array(each) for each in lists if each is not None]
        if len({each.shape for each in there}) > 1 or any(each.dtype.kind not in "biuf" for each in there):
            raise ValueError(f"{self._where} holds lists of unequal length, or of words: a number per label is needed.")
        rows = np.zeros((len(lists), *there[0].shape) if there else len(lists))
        if there:
            rows[~missing] = np.stack(there)
        return Answers(np.full(len(lists), None, np.object_), rows, missing, False)

    def _answer_edges(self, table: Keyed, split: str, first: int) -> tuple[Column, Column]:
        """The questions of a table, and the row that each of their answers names, or -1."""
        none = np.empty(0, np.int64), np.empty(0, np.int64)
        if not (targets := self._targets(table, split)):
            return none
        (target,), name = targets, f"answers of {self._name(split)}"
        kind, cell = table.table.types[target], quoted(target)
        lists = f"[{cell}]" if kind != "VARCHAR" else f"string_split_regex(trim({cell}), '\\s+')"
        of_lists = f"SELECT unnest({cell if kind.endswith(']') else lists}) AS {cell}, {ROW} FROM {table.table.name}"
        self.work.run(f"CREATE OR REPLACE VIEW {quoted(name)} AS SELECT * FROM ({of_lists}) WHERE {cell} IS NOT NULL")
        keys = replace(table.table, name=quoted(name), types={target: kind.removesuffix("[]")})
        before = len(self.work.problems)
        keyed = Keyed.of(self.work, f"keys of {name}", keys, [target])
        if not keyed.num_rows:
            del self.work.problems[before:]
        if not keyed.num_rows or len(self.work.problems) > before:
            return none
        ids, receiver = self.ids[self.spec.receiver or ""], self.spec.receiver or ""
        query = query_of(keyed.table, {}, [(target, ids)], digits=True)
        pieces = [*self.work.stream(query, keyed.table)]
        question, n = (np.concatenate([numpy_of(piece[name]) for piece in pieces]) for name in ("row", "n0"))
        if (n < 0).any() and not self.manifest.may_dangle:
            keyed.refuse_unknown(self.work, target, ids, receiver, self.manifest.tables[receiver].pkey or "")
        order = np.argsort(question, kind="stable")
        return question[order] + first, n[order]

    def _labels(self, answers: Answers, splits: Column) -> tuple[dict[str, Column], TableTask]:
        """The masks and labels of all questions, and what the task asks."""
        spec, is_there, kind = self.spec, ~answers.missing, self.spec.task_type
        masks = {f"{split}_mask": (splits == at) & is_there for at, split in enumerate(SPLITS)}
        task = TableTask(spec.name, kind, spec.entity_table, 1, hidden=spec.hidden)
        numbers, is_train = answers.numbers, masks["train_mask"]
        if kind == "multilabel_classification":
            if not np.isin(numbers[is_there], (0, 1)).all():
                raise ValueError(f"{self._where} must be one 0 or 1 for each label of a multilabel_classification.")
            y = np.nan_to_num(numbers).astype(np.int64).reshape(len(splits), -1)
            return masks | {"y": y}, replace(task, num_outputs=y.shape[1])
        if kind == "regression":
            if answers.are_words or np.isinf(numbers).any():
                raise ValueError(f"{self._where} must be finite numbers of a regression.")
            if is_train.any():
                std = float(numbers[is_train].std(ddof=int(is_train.sum() > 1))) or 1.0
                task = replace(task, mean=float(numbers[is_train].mean()), std=std)
            return masks | {"y": numbers.astype(np.float32)}, task
        words = sorted(set(answers.words[is_train].tolist()))
        if answers.are_words:
            found = answers.words[is_there].astype(np.str_)
            check_classes(found, self._where)
            if (unknown := found[~np.isin(found, words)]).size:
                raise ValueError(
                    f"{self._where} hold {str(unknown[0])!r}, which no question to train on has as answer."
                )
            numbers = np.full(len(splits), np.nan)
            numbers[is_there] = np.searchsorted(words, found)
            self.folder.mkdir(parents=True, exist_ok=True)
            save(self.folder / "classes.npy", np.array(words, np.str_))
        there = numbers[is_there]
        if (there % 1).any() or (there < 0).any() or (kind[0] == "b" and (len(words) > 2 or not (there <= 1).all())):
            wanted = "0 and 1, or two words" if kind[0] == "b" else "whole numbers from 0, or words"
            raise ValueError(f"{self._where} must be {wanted} of a {kind}, and are {', '.join(words[:5])}.")
        y = np.where(answers.missing, -1, np.nan_to_num(numbers)).astype(np.int64)
        return masks | {"y": y}, replace(task, num_outputs=1 if kind[0] == "b" else int(y.max()) + 1)

    def _check_order(self, times: Column, splits: Column, are_dates: bool) -> None:
        """Refuse questions to train on that are asked when others judge."""
        last, first = int(times[splits == 0].max(initial=-NEVER)), int(times[splits > 0].min(initial=NEVER))
        if last > first or (self.spec.receiver is not None and last == first):
            at, judge = as_told(last, are_dates), as_told(first, are_dates)
            raise ValueError(
                f"Task {self.spec.name!r} is trained at {at}, {'not before' if last == first else 'later than'} its "
                f"first question to validate or test ({judge}): it would learn from the future of what judges it."
            )

    @property
    def _path(self) -> Path:
        return next(iter(self.spec.files.values()))

    @property
    def _where(self) -> str:
        return f"{self._path}: the answers {', '.join(map(repr, self.spec.targets))}"
