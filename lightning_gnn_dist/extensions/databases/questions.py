"""The tables of a task as nodes: a question for each row, of one row of another table at one time.

Where a task recommends, an edge leads from a question to each right answer, which nobody sees. A question without an
answer that is known is not learned; what it is recommended is found all the same.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.extensions.databases.manifest import LABELS, Manifest, TaskSpec
from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import ANSWERED, NEVER, TIME, TableTask, as_told
from lightning_gnn_dist.prepare.arrays import SPLIT_WORDS, SPLITS, check_classes
from lightning_gnn_dist.prepare.columns import BOOL, FLOAT, LONG, Columns, Made
from lightning_gnn_dist.prepare.engine import NO_ROWS, OWN, ROW, WHOLE, Table, Work, literal, quoted, told
from lightning_gnn_dist.prepare.reading import bad_lines, load
from lightning_gnn_dist.prepare.unpack import with_keys

SPLIT, ASKED_AT = (f'"{OWN}{name}"' for name in ("split", "time"))  # columns of the split and time of a question
QUESTION = f"{OWN}question"  # the column of the row of the question of an answer


class Questions:
    """The questions of a task as one table, in the order of its files, that of train first, then val and test.

    Args:
        work: Reads the files.
        name: What the table is called.
        spec: What is known of the task.
        manifest: What is known of all tables.
    """

    def __init__(self, work: Work, name: str, spec: TaskSpec, manifest: Manifest) -> None:
        self.work, self.spec, self.manifest = work, spec, manifest
        parts, rows, lengths, num_rows = list[Table](), list[str](), dict[Path, str](), 0
        for split, path in spec.files.items():
            with told(path):
                parts.append(part := load(work, f"{name} {split}", path))
                self._check_targets(part, split)
                at = SPLITS.index(split) if split in SPLITS else -1
                rows.append(f"SELECT * REPLACE ({ROW} + {num_rows} AS {ROW}), {at} AS {SPLIT} FROM {part.name}")
                lengths[path] = f"SELECT count(*) FROM {part.name}"
                if len(spec.files) > 1:
                    num_rows += (count := work.look(part, "count(*)")[0])
                    if not count and split == "val" and manifest.val_time is None:  # then it says what is trained on
                        work.problems.append(NO_ROWS.format(part.source))
        table = Table(quoted(name), spec.path if len(parts) == 1 else spec.path.parent, {})
        work.run(f"CREATE OR REPLACE VIEW {table.name} AS {' UNION ALL BY NAME '.join(rows)}")
        table = replace(
            table,
            types={column: kind for column, kind, *_ in work.run(f"DESCRIBE {table.name}")},
            is_typed=all(part.is_typed for part in parts),
            check=partial(bad_lines, [text for part in parts for text in part.texts]),
            lengths=lengths if len(parts) > 1 else {},
        )
        self.table = with_keys(work, f"task {spec.name}", table, [spec.entity_col], spec.time_col, digits=True)
        self.time = self.table.time
        self.cells = [self.table.cells(target) for target in spec.targets]
        self.where = f"{spec.path}: the answers {', '.join(map(repr, spec.targets))}"
        self.split = self._split()

    def _check_targets(self, part: Table, split: str) -> None:
        """Refuse a file without a column of answers, unless it is to test."""
        without = [target for target in self.spec.targets if target not in part.types]
        if without and split != "test":
            raise ValueError(
                f"{part.source} has no column {without[0]!r}, the answers of the task: it has {sorted(part.types)}."
            )

    def _split(self) -> str:
        """The SQL of the place of a question's split in ``SPLITS``; note questions about no row, or without a time."""
        spec, bounds = self.spec, self.manifest
        bad = [(spec.entity_col, f"{quoted(spec.entity_col)} IS NULL", "and a question is about a row.")]
        if spec.time_col is not None:
            bad.append((spec.time_col, self.table.cells(spec.time_col).is_empty, "and a question has a time."))
        self.work.refuse_cells(self.table, bad)
        if LABELS not in spec.files:
            return SPLIT
        if "split" in self.table.types:
            word = "lower(coalesce(CAST(split AS VARCHAR), ''))"
            known = ", ".join(map(literal, SPLIT_WORDS))
            what = "where train, val or test is known."
            self.work.refuse_cells(self.table, [("split", f"{word} NOT IN ({known})", what)])
            cases = (f"WHEN {literal(each)} THEN {SPLITS.index(split)}" for each, split in SPLIT_WORDS.items())
            return f"CASE {word} {' '.join(cases)} END"
        if self.time is None or None in (bounds.val_time, bounds.test_time):
            raise ValueError(
                f"{self.table.source} does not say which question is to train on: give {bounds.path} a "
                "val_timestamp and a test_timestamp, this table a column split, or write train, val and test apart."
            )
        of_test = f"CAST({self.time} >= {bounds.test_time} AS BIGINT)"
        return f"(CAST({self.time} >= {bounds.val_time} AS BIGINT) + {of_test})"

    @property
    def first_to_validate(self) -> int | None:
        """The time of the first question to validate."""
        first: int | None = self._look(f"min({self.time}) FILTER ({self.split} = {SPLITS.index('val')})")[0]
        return first

    @property
    def answers(self) -> str:
        """The SQL of the keys that a task recommends, as a list of words."""
        (cells,) = self.cells
        if cells.is_list:
            return f"CAST({cells.name} AS VARCHAR[])"
        return f"string_split_regex(trim({cells.name}), '\\s+')" if cells.is_text else f"[{cells.word}]"

    def answer_table(self, name: str) -> Table:
        """The answers of a task that recommends, a row for each."""
        (target,), (cells,) = self.spec.targets, self.cells
        time = "" if self.time is None else f", {self.time} AS {ASKED_AT}"
        rows = f"SELECT unnest({self.answers}) AS {quoted(target)}, {ROW}{time} FROM {self.table.name}"
        self.work.run(
            f"CREATE OR REPLACE VIEW {quoted(name)} AS SELECT * FROM ({rows}) WHERE {quoted(target)} IS NOT NULL"
        )
        are_words = self.table.is_typed and cells.type.startswith("VARCHAR")
        table = replace(self.table, name=quoted(name), types={target: "VARCHAR"}, is_typed=are_words)
        before = len(self.work.problems)
        keyed = with_keys(self.work, f"keys of {name}", table, [target], None, digits=True)
        if not keyed.num_rows:
            del self.work.problems[before:]  # then no question is to train on, which is said
        numbered = f'SELECT * EXCLUDE {ROW}, {ROW} AS "{QUESTION}", row_number() OVER () - 1 AS {ROW}'
        self.work.run(f"CREATE OR REPLACE VIEW {quoted(f'rows of {name}')} AS {numbered} FROM {keyed.name}")
        types = {QUESTION: "BIGINT", **keyed.types}
        return replace(keyed, name=quoted(f"rows of {name}"), types=types, row=quoted(QUESTION))

    def columns(self) -> Columns:
        """Masks, labels and times of all questions; what the task asks is found out on the way."""
        spec = self.spec
        task = TableTask(spec.name, spec.task_type, spec.entity_table, 0, hidden=spec.hidden)
        made, of_masks, there = list[Made](), "true", "true"
        if spec.receiver is not None:
            task = replace(task, receiver=spec.receiver, k=spec.k)
            there = f"coalesce(len(list_filter({self.answers}, lambda e: e IS NOT NULL)) > 0, false)"
        else:
            label, there, task = self._label(task)
            made, of_masks = [label], there
        for at, split in enumerate(SPLITS):
            made.append(Made(f"{split}_mask", BOOL, f"{self.split} = {at} AND {there if not at else of_masks}"))
        if not self._look(f"count(*) FILTER ({self._train(there)})")[0]:
            told_way = "fill some, or give a later val_timestamp"
            raise ValueError(f"{self.where} are those of no question to train on: {told_way}.")
        if self.time is not None:
            self._check_order()
            made = [Made(TIME, LONG, self.time), *made]
        self.task = replace(task, are_dates=self.time is not None and self.table.are_dates)
        return Columns(self.work, self.table, made)

    def carried_by_answers(self, table: Table) -> Columns:
        """What answers carry: times at which nobody sees them, and those of their questions."""
        made = [Made(TIME, LONG, str(NEVER)), Made(ANSWERED, LONG, ASKED_AT)]
        return Columns(self.work, table, [] if self.time is None else made)

    def tell(self, folder: Path) -> dict[str, Any]:
        """Keep whom questions are about, and when, as their tables tell it; return what is to be known of the task."""
        (folder / "own").mkdir(parents=True, exist_ok=True)
        moment = f"epoch_us({self.table.cells(str(self.spec.time_col)).moment})" if self.table.are_dates else "0"
        cells = f"{quoted(self.spec.entity_col)} AS e, {self.time or 0} AS t, {moment} AS m"
        columns: dict[str, Column] = self.work.db.sql(
            f"SELECT {cells} FROM {self.table.name} ORDER BY {ROW}"
        ).fetchnumpy()
        entities, times = np.asarray(columns["e"]), np.asarray(columns["t"])
        own = {self.spec.entity_col: entities.astype(np.str_) if entities.dtype.kind == "O" else entities}
        if self.time is not None:
            seconds, moments = times.astype("datetime64[s]"), np.asarray(columns["m"]).astype("datetime64[us]")
            dates = seconds if (seconds == moments).all() else moments
            own[str(self.spec.time_col)] = dates if self.table.are_dates else times
        for at, (name, column) in enumerate(own.items()):
            save(folder / "own" / f"{at} {name.replace('/', '_')}.npy", column)
        span = None if self.time is None else span_of(times, self.table.are_dates)
        return {"task": asdict(self.task), "notes": [], "times": span}

    def _look(self, what: str) -> tuple[Any, ...]:
        return self.work.look(self.table, what)

    def _train(self, there: str) -> str:
        return f"{self.split} = 0 AND {there}"

    def _label(self, task: TableTask) -> tuple[Made, str, TableTask]:
        """The labels of all questions, the SQL of whether there is one, and what the task asks."""
        kind, (first, *_) = self.spec.task_type, self.cells
        if kind == "multilabel_classification":
            return self._labels(task)
        if first.is_list:
            raise ValueError(f"{self.where} are lists, and those of a {kind} are none.")
        is_number = f"{first.real} IS NOT NULL"
        is_word = f"{first.value} IS NOT NULL AND NOT {is_number} AND lower({first.word}) <> 'nan'"
        wrong = f"{first.number} % 1.0::DOUBLE <> 0 OR {first.number} < 0"
        are_words, infinite, odd, highest = self._look(
            f"count(*) FILTER ({is_word}), count(*) FILTER (isinf({first.number})), "
            f"count(*) FILTER ({is_number} AND ({wrong})), max({first.number}) FILTER ({is_number})"
        )
        there = f"{first.value} IS NOT NULL" if are_words else is_number
        if kind == "regression":
            if are_words or infinite:
                raise ValueError(f"{self.where} must be finite numbers of a regression.")
            rows = f"SELECT {first.number} AS n FROM {self.table.name} WHERE {self._train(there)} ORDER BY {ROW}"
            if len(numbers := np.asarray(self.work.db.sql(rows).fetchnumpy()["n"], np.float64)):
                std = float(numbers.std(ddof=int(len(numbers) > 1))) or 1.0
                task = replace(task, mean=float(numbers.mean()), std=std)
            label = Made("y", FLOAT, f"coalesce({first.number}, 'nan'::DOUBLE)")
            return label, there, replace(task, num_outputs=1)
        distinct = f"SELECT DISTINCT {first.value} FROM {self.table.name} WHERE"
        words = sorted(word for (word,) in self.work.run(f"{distinct} {self._train(there)}"))
        label = Made("y", LONG, f"coalesce(TRY_CAST({first.number} AS BIGINT), -1)")
        if are_words:
            found = [word for (word,) in self.work.run(f"{distinct} {there} ORDER BY 1")]
            check_classes(found, self.where)
            if unknown := [word for word in found if word not in words]:
                raise ValueError(f"{self.where} hold {unknown[0]!r}, which no question to train on has as answer.")
            label, odd, highest = Made("y", LONG, first.value, words=words), 0, len(words) - 1
        is_binary = kind == "binary_classification"
        if odd or (is_binary and (len(words) > 2 or (highest or 0) > 1)):
            wanted = "0 and 1, or two words" if is_binary else "whole numbers from 0, or words"
            raise ValueError(f"{self.where} must be {wanted} of a {kind}, and are {', '.join(words[:5])}.")
        return label, there, replace(task, num_outputs=1 if is_binary else int(highest or 0) + 1)

    def _labels(self, task: TableTask) -> tuple[Made, str, TableTask]:
        """The same of several labels, in a list or in columns."""
        (first, *others), width = self.cells, len(self.cells)
        there, of_all = f"{first.name} IS NOT NULL", first.name
        if first.is_list:
            shortest, width = self._look(f"min({first.length}), max({first.length})")
            if shortest != width or first.type.removesuffix("[]") not in WHOLE | {"FLOAT", "DOUBLE"}:
                told_way = "of words: a number per label is needed"
                raise ValueError(f"{self.where} holds lists of unequal length, or {told_way}.")
        else:
            there = " AND ".join(f"{each.real} IS NOT NULL" for each in self.cells)
            words = (f"count({each.value}) > count({each.number})" for each in self.cells)
            if not others or self._look(" OR ".join(words))[0]:
                raise ValueError(
                    f"{self.spec.path}: the answers {self.spec.targets[0]!r} must be lists of 0 and 1 (in Parquet), or "
                    "a column for each label, target_col: [first, second]."
                )
            of_all = f"[{', '.join(f'coalesce({each.real}, 0)' for each in self.cells)}]"
        fits = f"list_bool_and(list_transform({of_all}, lambda e: coalesce(e IN (0, 1), false)))"
        if self._look(f"count(*) FILTER ({there} AND NOT {fits})")[0]:
            raise ValueError(f"{self.where} must be one 0 or 1 for each label of a multilabel_classification.")
        none = f"[{', '.join('0' * width)}]"
        label = Made("y", LONG, f"CAST(coalesce({of_all}, {none}) AS BIGINT[])", width)
        return label, there, replace(task, num_outputs=width)

    def _check_order(self) -> None:
        """Refuse questions to train on that are asked when others judge."""
        last, first = self._look(
            f"max({self.time}) FILTER ({self.split} = 0), min({self.time}) FILTER ({self.split} > 0)"
        )
        if first is not None and (last > first or (self.spec.receiver is not None and last == first)):
            at, judge = as_told(last, self.table.are_dates), as_told(first, self.table.are_dates)
            raise ValueError(
                f"Task {self.spec.name!r} is trained at {at}, {'not before' if last == first else 'later than'} its "
                f"first question to validate or test ({judge}): it would learn from the future of what judges it."
            )


def span_of(times: Column, are_dates: bool) -> tuple[int, int, bool] | None:
    """The first and the last of some times, and whether they are dates, if there are any."""
    known = times[times != NEVER]
    return (int(known.min()), int(known.max()), are_dates) if known.size else None
