"""The tables of a task as nodes: a question for each row, of one row of another table at one time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column, save
from lightning_gnn_dist.graph.typed.tables import NEVER, TIME, TableTask, as_told
from lightning_gnn_dist.prepare.databases.cells import Cells, CellTable, as_keys, as_numbers, as_times, joined
from lightning_gnn_dist.prepare.databases.columns import as_words
from lightning_gnn_dist.prepare.databases.keys import KEYS, write_keys
from lightning_gnn_dist.prepare.databases.manifest import LABELS, Manifest, TaskSpec
from lightning_gnn_dist.prepare.databases.times import Span
from lightning_gnn_dist.prepare.files.columns import SPLIT_WORDS, SPLITS, check_classes
from lightning_gnn_dist.prepare.one_shard import Part
from lightning_gnn_dist.prepare.reading import Progress
from lightning_gnn_dist.prepare.tables.reading import columns_of, count_rows


class Asked(NamedTuple):
    """Some questions: their keys, times, answers, where these are missing, and the place of their split in SPLITS."""

    keys: Column
    times: Column | None
    answers: Cells
    splits: Column
    are_dates: bool


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of a task, in the order of their tables, that of train first, then val and test.

    Args:
        spec: What is known of the task.
        manifest: What is known of all tables.
    """

    spec: TaskSpec
    manifest: Manifest
    is_strict: ClassVar[bool] = False  # whether all to train on are asked before all others

    @property
    def num_rows(self) -> int:
        """How many rows there are; an estimate for text."""
        return sum(map(count_rows, self.spec.files.values()))

    @property
    def num_numbers(self) -> int:
        """How many numbers a row becomes, about."""
        return 8

    def unpack(
        self, folder: Path, part_of: Callable[[int], Part], memory_bytes: int, progress: Progress
    ) -> dict[str, Any]:
        """Turn the tables into arrays, as :meth:`DatabaseTable.unpack` does."""
        asked = [each for split, path in self.spec.files.items() for each in self._read(split, path, memory_bytes)]
        progress(0.5)
        count = sum(len(each.splits) for each in asked)
        answers = Cells(
            _stacked([each.answers.values for each in asked]), np.concatenate([each.answers.missing for each in asked])
        )
        splits = np.concatenate([each.splits for each in asked])
        if not ((splits == 0) & ~answers.missing).any():
            told = "fill some, or give a later val_timestamp"
            raise ValueError(f"{self._where} are those of no question to train on: {told}.")
        arrays, task = self._answered(answers, splits, folder)
        span = Span()
        if self.spec.time_col is not None:
            arrays[TIME] = np.concatenate([each.times for each in asked if each.times is not None])
            self._check_order(arrays[TIME], splits, asked[0].are_dates)
            span.add(arrays[TIME], are_dates=asked[0].are_dates)
            task = _with(task, are_dates=asked[0].are_dates)
        (folder / "arrays").mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            save(folder / "arrays" / f"{name}.npy", array)
        save(folder / "arrays" / "num_nodes.npy", np.array(count))
        save(folder / "ids.npy", np.arange(count))
        write_keys(folder / KEYS / self.spec.entity_col, 0, joined([each.keys for each in asked]), np.arange(count))
        return {"task": asdict(task), "notes": [], "times": span.fact}

    def _read(self, split: str, path: Path, memory_bytes: int) -> list[Asked]:
        """The questions of a table."""
        spec, there = self.spec, set(columns_of(path))
        without = [target for target in spec.targets if target not in there]
        if without and split != "test":
            raise ValueError(f"{path} has no column {without[0]!r}, the answers of the task: it has {sorted(there)}.")
        names = [spec.entity_col, *([spec.time_col] if spec.time_col else []), *([] if without else spec.targets)]
        names += ["split"] if split == LABELS and "split" in there else []
        found = []
        for first, piece in CellTable(path, list(dict.fromkeys(names)), memory_bytes, lambda share: None):
            keys, count = piece[spec.entity_col], len(piece[spec.entity_col].missing)
            if keys.missing.any():
                row = first + int(keys.missing.argmax()) + 1
                raise ValueError(
                    f"{path}: column {spec.entity_col!r} is empty in row {row}, and a question is about a row."
                )
            times, are_dates = None, False
            if spec.time_col is not None:
                times, are_dates = as_times(spec.time_col, piece[spec.time_col], path, first)
                if (times == NEVER).any():
                    row = first + int((times == NEVER).argmax()) + 1
                    raise ValueError(
                        f"{path}: column {spec.time_col!r} is empty in row {row}, and a question has a time."
                    )
            of_row = np.full(count, SPLITS.index(split)) if split in SPLITS else self._splits(piece, times, path, first)
            answers = (
                Cells(np.full(count, np.nan), np.ones(count, np.bool_))
                if without
                else self._answers(piece, path, first)
            )
            found.append(Asked(as_keys(spec.entity_col, keys, path, first), times, answers, of_row, are_dates))
        return found

    def _splits(self, piece: Mapping[str, Cells], times: Column | None, path: Path, first: int) -> Column:
        """The splits of questions of one table for all of them."""
        if "split" in piece:
            words = np.char.lower(as_words(piece["split"]))
            known = np.isin(words, list(SPLIT_WORDS))
            if not known.all():
                told = piece["split"].first_bad(~known, first)
                raise ValueError(f"{path}: column 'split' {told}: train, val or test is known.")
            return np.array([SPLITS.index(SPLIT_WORDS[word]) for word in words.tolist()])
        if times is None or self.manifest.val_time is None or self.manifest.test_time is None:
            raise ValueError(
                f"{path} does not say which question is to train on: give {self.manifest.path} a val_timestamp and a "
                "test_timestamp, this table a column split, or write train, val and test apart."
            )
        return (times >= self.manifest.val_time).astype(np.int64) + (times >= self.manifest.test_time)

    def _answers(self, piece: Mapping[str, Cells], path: Path, first: int) -> Cells:
        """The answers: words or numbers, or of several labels a row of numbers for each question."""
        of_columns = [piece[target] for target in self.spec.targets]
        if self.spec.task_type != "multilabel_classification":
            return of_columns[0]
        if of_columns[0].are_lists:
            return _in_columns(of_columns[0], f"{path}: column {self.spec.targets[0]!r}")
        numbers = [as_numbers(cells) for cells in of_columns]
        for target, column in zip(self.spec.targets, numbers, strict=True):
            if column is None or len(numbers) == 1:
                raise ValueError(
                    f"{path}: the answers {target!r} must be lists of 0 and 1 (in Parquet), or a column for each "
                    "label, target_col: [first, second]."
                )
        return Cells(np.column_stack([c for c in numbers if c is not None]), np.any([c.missing for c in of_columns], 0))

    def _answered(self, answers: Cells, splits: Column, folder: Path) -> tuple[dict[str, Column], TableTask]:
        """The masks and labels of all questions, and what the task asks."""
        masks = {f"{split}_mask": (splits == at) & ~answers.missing for at, split in enumerate(SPLITS)}
        y, task = self._labels(answers, splits)
        return {**masks, "y": y}, task

    def _labels(self, answers: Cells, splits: Column) -> tuple[Column, TableTask]:
        """The labels of all questions, and what the task asks."""
        spec, is_train = self.spec, (splits == 0) & ~answers.missing
        task, kind = TableTask(spec.name, spec.task_type, spec.entity_table, 1, hidden=spec.hidden), spec.task_type
        if answers.are_lists:
            raise ValueError(f"{self._where} are lists, and those of a {kind} are none.")
        if kind == "multilabel_classification":
            y = np.nan_to_num(answers.values).astype(np.int64).reshape(len(splits), -1)
            if not np.isin(answers.values[~answers.missing], (0, 1)).all():
                raise ValueError(f"{self._where} must be one 0 or 1 for each label of a multilabel_classification.")
            return y, _with(task, num_outputs=y.shape[1])
        numbers = as_numbers(answers)
        if kind == "regression":
            if numbers is None or np.isinf(numbers).any():
                raise ValueError(f"{self._where} must be finite numbers of a regression.")
            mean, std = float(numbers[is_train].mean()), float(numbers[is_train].std(ddof=int(is_train.sum() > 1)))
            return numbers.astype(np.float32), _with(task, mean=mean, std=std or 1.0)
        words = sorted(set(as_words(Cells(answers.values[is_train], answers.missing[is_train])).tolist()))
        if numbers is None:
            found = as_words(answers)
            check_classes(found, self._where)
            unknown = ~np.isin(found, words) & ~answers.missing
            if unknown.any():
                raise ValueError(
                    f"{self._where} hold {str(found[unknown][0])!r}, which no question to train on has as answer."
                )
            numbers = np.searchsorted(words, found).astype(np.float64)
        there = numbers[~answers.missing]
        if (there % 1).any() or (there < 0).any() or (kind[0] == "b" and (len(words) > 2 or not (there <= 1).all())):
            wanted = "0 and 1, or two words" if kind[0] == "b" else "whole numbers from 0, or words"
            raise ValueError(f"{self._where} must be {wanted} of a {kind}, and are {', '.join(words[:5])}.")
        y = np.where(answers.missing, -1, np.nan_to_num(numbers)).astype(np.int64)
        return y, _with(task, num_outputs=1 if kind[0] == "b" else int(y.max()) + 1)

    def _check_order(self, times: Column, splits: Column, are_dates: bool) -> None:
        """Refuse questions to train on that are asked when others judge."""
        last, first = int(times[splits == 0].max(initial=-NEVER)), int(times[splits > 0].min(initial=NEVER))
        if last > first or (self.is_strict and last == first):
            at, judge = as_told(last, are_dates), as_told(first, are_dates)
            raise ValueError(
                f"Task {self.spec.name!r} is trained at {at}, {'not before' if last == first else 'later than'} its "
                f"first question to validate or test ({judge}): it would learn from the future of what judges it."
            )

    @property
    def _where(self) -> str:
        path = next(iter(self.spec.files.values()))
        return f"{path}: the answers {', '.join(map(repr, self.spec.targets))}"


def _with(task: TableTask, **more: Any) -> TableTask:
    return TableTask(**(vars(task) | more))


def _in_columns(lists: Cells, where: str) -> Cells:
    """Lists of numbers as a row of numbers each; without any they are one number, which nobody reads."""
    there = lists.values[~lists.missing]
    if len({len(each) for each in there}) > 1 or any(each.dtype.kind not in "biuf" for each in there):
        raise ValueError(f"{where} holds lists of unequal length, or of words, and each must have a number per label.")
    rows = np.zeros((len(lists.missing), *there[:1][0].shape) if len(there) else len(lists.missing))
    if len(there):
        rows[~lists.missing] = np.stack(list(there))
    return Cells(rows, lists.missing)


def _stacked(answers: list[Column]) -> Column:
    """Answers one after the other; those of a split without any become as wide as the others."""
    wide = next((each for each in answers if each.ndim == 2), None)
    if wide is not None:
        answers = [each if each.ndim == 2 else np.zeros((len(each), wide.shape[1])) for each in answers]
    if any(each.dtype.kind == "U" for each in answers):
        answers = [each.astype(np.str_) for each in answers]
    return np.concatenate(answers)
