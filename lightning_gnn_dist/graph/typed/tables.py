"""What the columns of a database's tables are in a graph, and what its tasks ask: ``graph.types.tables``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from lightning_gnn_dist.answers import did_you_mean
from lightning_gnn_dist.checks import shown

NUMBERS, CATEGORIES, MOMENTS = "x", "categories", "moments"  # node arrays; of a hidden column "<column>_x", ...
TIME = "time"  # the array of the time of each row, in whose order edges come
NEVER = 2**62  # the time of a row without one: later than all seeds
NO_MOMENT = -(2**62)  # stands for a missing moment
ASKED = "asked"  # edges from what is asked about to questions
ANSWER = "answer"  # edges from questions to what is recommended
ANSWERED = "edge_time"  # the times of these questions
MISSING, UNSEEN = 0, 1  # rows of a category's table; those of known words follow


@dataclass(frozen=True)
class Feature:
    """Where a column of a table is.

    Args:
        column: Its name in the table.
        array: The node array: of numbers ``x``, of ``categories`` or of ``moments``. A column that a task hides has
            arrays of its own, ``<column>_x``.
        first: The first column of the array.
        width: The number of columns of the array.
        size: Of a category, the number of its values, with those for missing and for unseen ones.
    """

    column: str
    array: str
    first: int
    width: int
    size: int = 0

    @property
    def kind(self) -> str:
        """Which of the three arrays it is in, or would be in."""
        return self.array.rpartition("_")[2]


@dataclass(frozen=True)
class TableTask:
    """What a task asks.

    Args:
        name: Its name, which is that of the node type of its questions.
        task_type: ``binary_classification``, ``multiclass_classification``, ``multilabel_classification``,
            ``regression`` or ``recommendation``.
        entity: The table whose rows are asked about.
        num_outputs: Numbers that a model says about a question; none if it recommends.
        mean: Of a regression the mean of the training questions.
        std: Of a regression their standard deviation, by which RelBench divides a mean absolute error.
        hidden: Table and column of what must not be seen.
        receiver: The table whose rows are recommended, if the task recommends.
        k: How many of them are judged.
        are_dates: Whether times of questions are dates, kept as seconds since 1970.
    """

    name: str
    task_type: str
    entity: str
    num_outputs: int
    mean: float = 0.0
    std: float = 1.0
    hidden: tuple[tuple[str, str], ...] = ()
    receiver: str | None = None
    k: int = 10
    are_dates: bool = False

    @property
    def answers(self) -> tuple[str, str, str] | None:
        """The type of the edges from questions to right answers, which nobody sees, if the task recommends."""
        return None if self.receiver is None else (self.name, ANSWER, self.receiver)


@dataclass(frozen=True)
class Tables:
    """What became of the tables of a database.

    Args:
        features: For each table, where its columns are.
        tasks: The tasks, by name.
        span: From the earliest row to the training cut, in the unit of times: ages are told as shares of it.
        edge_types: The edge types of the graph that messages travel along.
        timed: The tables whose rows have times.
        notes: What was left out, and why, one sentence each.
    """

    features: Mapping[str, tuple[Feature, ...]]
    tasks: Mapping[str, TableTask]
    edge_types: tuple[tuple[str, str, str], ...]
    span: float = 1.0
    timed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    time: ClassVar[str] = TIME

    def task(self, name: str) -> TableTask:
        """The task of this name."""
        if name not in self.tasks:
            meant = did_you_mean(str(name), self.tasks)
            raise ValueError(f"task must be one of {shown(list(self.tasks))}, got {shown(name)}.{meant}")
        return self.tasks[name]

    def seen_by(self, task: str | None) -> dict[str, tuple[Feature, ...]]:
        """For each table the features that a task may see."""
        hidden = set() if task is None else set(self.task(task).hidden)
        return {
            table: tuple(feature for feature in features if (table, feature.column) not in hidden)
            for table, features in self.features.items()
        }

    def hidden_arrays(self, seeds: str) -> dict[str, set[str]]:
        """For each table the arrays that must not be seen if these nodes are learned from, which may be no task."""
        hidden = set(self.tasks[seeds].hidden) if seeds in self.tasks else set()
        return {
            table: {feature.array for feature in features if (table, feature.column) in hidden}
            for table, features in self.features.items()
        }

    @property
    def lines(self) -> list[str]:
        """What to tell of the tasks, of the columns of each table, and of what was left out."""
        told = [
            f"task {task.name}: {task.task_type} of {task.entity}"
            + (f", among {task.receiver}" if task.receiver else "")
            + "".join(f", without {table}.{column}" for table, column in task.hidden)
            for task in self.tasks.values()
        ]
        for table, features in self.features.items():
            columns = dict.fromkeys(feature.column for feature in features)
            told.append(f"columns of {table}: {', '.join(columns) or 'none'}")
        return [*told, *self.notes]

    @property
    def about(self) -> dict[str, Any]:
        """All of it, as ``meta.json`` has it."""
        return asdict(self)

    @classmethod
    def saved(cls, about: Mapping[str, Any]) -> Tables:
        """Make it of what ``meta.json`` says."""
        features = {table: tuple(Feature(**each) for each in of_table) for table, of_table in about["features"].items()}
        tasks = {
            name: TableTask(**{**task, "hidden": tuple((table, column) for table, column in task["hidden"])})
            for name, task in about["tasks"].items()
        }
        edge_types = tuple((source, name, target) for source, name, target in about["edge_types"])
        return cls(features, tasks, edge_types, about["span"], tuple(about["timed"]), tuple(about["notes"]))


def as_told(time: float, are_dates: bool) -> str:
    """A time as errors tell it: a date where tables have dates."""
    return str(np.datetime64(int(time), "s")).replace("T", " ") if are_dates else str(time)
