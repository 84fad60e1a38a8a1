"""A database as a graph: rows become nodes, foreign keys edges in both directions, and questions nodes with answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.databases.manifest import PLAIN, RELBENCH, AnswerSpec, Manifest, TaskSpec
from lightning_gnn_dist.extensions.databases.questions import QUESTION, Questions, span_of
from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import ANSWER, NEVER, TIME, Tables, TableTask, as_told
from lightning_gnn_dist.graph.typed.tables import Feature as Place
from lightning_gnn_dist.graph.typed.types import EdgeType, check_names
from lightning_gnn_dist.prepare.arrays import Drop
from lightning_gnn_dist.prepare.columns import LONG, Columns, Cut, Feature, Made
from lightning_gnn_dist.prepare.engine import Table
from lightning_gnn_dist.prepare.plan import EdgeFiles, NodeFiles, Plan, TablePlan
from lightning_gnn_dist.prepare.reading import columns_of
from lightning_gnn_dist.prepare.text import embedding
from lightning_gnn_dist.prepare.unpack import Unpacking, unit_of

LAYOUTS = {RELBENCH: f"RelBench's layout ({RELBENCH}, db, tasks)", PLAIN: f"the tables that {PLAIN} describes"}


def plan_of_database(folder: Path, drop: Drop) -> Plan:
    """What a folder says of its tables. Columns that ``drop`` names are left out, wherever they are."""
    manifest = Manifest.of(folder)
    tables, kept = list[TablePlan](), set[str | None]()
    for table in manifest.tables.values():
        left = set(drop.kept(columns_of(table.path)))
        tables.append(replace(table, columns=tuple(name for name in table.columns if name in left)))
        kept |= {table.key, table.time_col, *table.fkeys}
    drop.check(folder)
    if wrong := sorted(name for name in drop.names if name in kept):
        raise ValueError(
            f"{folder}: {shown(wrong)} hold keys or times, which a graph is made of: they cannot be dropped."
        )
    nodes, all_tables = {table.kind: NodeFiles(table.path) for table in tables if table.kind is not None}, [*tables]
    for task in manifest.tasks.values():
        nodes[task.name] = NodeFiles(task.path, float_labels=task.task_type == "regression")
        all_tables.append(task)
        if task.receiver is not None:
            edges_of = {(task.name, ANSWER, task.receiver): (QUESTION, task.targets[0])}
            all_tables.append(AnswerSpec(path=task.path, edges=edges_of, task=task))
    edges: dict[EdgeType, EdgeFiles] = {each: EdgeFiles() for table in all_tables for each in table.all_edges}
    if not edges:
        raise ValueError(
            f"{manifest.path} names no foreign keys and there is no task, so no row has to do with another."
            + "".join(f" {note}" for note in manifest.notes)
        )
    check_names(tuple(nodes), tuple(edges))
    time = TIME if any(table.time_col for table in all_tables) else None
    unpacking = partial(DatabaseUnpacking, manifest)
    given = nodes, edges, LAYOUTS[manifest.path.name], tuple(all_tables), time
    return Plan(*given, unpacking=unpacking, headings=manifest.lines)


class DatabaseUnpacking(Unpacking):
    """The work of turning a database into arrays.

    Args:
        manifest: What is known of the tables; then what :class:`Unpacking` takes.
    """

    of_database = True

    def __init__(self, manifest: Manifest, *given: Any) -> None:
        super().__init__(*given)
        self.manifest, self.questions = manifest, dict[str, Questions]()
        self.may_dangle = manifest.path.name == RELBENCH  # as there

    def load(self, name: str, plan: TablePlan) -> Table:
        if isinstance(plan, AnswerSpec):
            return self.questions[plan.task.name].answer_table(name)
        if isinstance(plan, TaskSpec):
            self.questions[plan.name] = Questions(self.work, name, plan, self.manifest)
            return self.questions[plan.name].table
        return super().load(name, plan)

    @cached_property
    def cut(self) -> int | None:
        """The time from which on rows are in no statistics: as told, or that of the first question to validate."""
        if self.manifest.val_time is not None:
            return self.manifest.val_time
        asked = [each for each in self.questions.values() if each.time is not None and "val" in each.spec.files]
        return min((time for each in asked if (time := each.first_to_validate) is not None), default=None)

    def carried(self, plan: TablePlan, made: Mapping[str, Column]) -> dict[str, Column]:
        """What edges carry of the arrays of a table. A row that is asked about is seen whenever it was there."""
        if isinstance(plan, TaskSpec) and TIME in made:
            return {TIME: made[TIME] - 1}
        return super().carried(plan, made)

    def columns(self, at: int, plan: TablePlan, table: Table) -> Columns:
        if isinstance(plan, AnswerSpec):
            return self.questions[plan.task.name].carried_by_answers(table)
        if isinstance(plan, TaskSpec):
            self.work.check()
            return self.questions[plan.name].columns()
        seen = "true" if table.time is None else f"{table.time} < {NEVER if self.cut is None else self.cut}"
        hidden = self.manifest.hidden(plan.kind) if plan.kind else ()
        cut = Cut(seen, plan.time_col, embedding(self.manifest.text), hidden)
        names = [name for name in plan.columns if name != plan.time_col or table.are_dates]
        features = [Feature(name, table.cells(name), cut=cut, asked=plan.kinds.get(name)) for name in names]
        made = [] if table.time is None else [Made(TIME, LONG, table.time)]
        return Columns(self.work, table, made, features)

    def tell(self, at: int, plan: TablePlan, columns: Columns) -> dict[str, Any]:
        if plan.kind is None or self.work.problems:
            return {}
        if isinstance(plan, TaskSpec):
            return self.questions[plan.name].tell(self.place(at))
        notes, times = [f"{plan.kind}.{name} {why}: it is left out." for name, why in columns.left_out.items()], None
        if (table := self.loaded[at]).time is not None:
            of_rows = np.load(self.place(at) / "arrays" / f"{TIME}.npy", mmap_mode="r")
            times = span_of(of_rows, table.are_dates)
            if num_missing := int((of_rows == NEVER).sum()):
                notes.append(f"{num_missing:,} rows of {plan.kind} have no time, and no question sees them.")
        widths, features = dict[str, int](), []
        for each in columns.features:
            for array, width in each.widths.items():
                features.append(asdict(Place(each.name, array, widths.get(array, 0), width, each.size)))
                widths[array] = widths.get(array, 0) + width
        return {"features": features, "notes": notes, "times": times}

    def run(self) -> Plan:
        """The same, with what became of the tables, by what writing each of them has told."""
        made = super().run()
        facts = {plan.kind: told for plan, told in zip(self.plan.tables, self.facts, strict=True) if plan.kind}
        features = {
            name: tuple(Place(**each) for each in told["features"])
            for name, told in facts.items()
            if "features" in told
        }
        tasks = {name: TableTask(**told["task"]) for name, told in facts.items() if "task" in told}
        notes = self.manifest.notes + tuple(note for told in facts.values() for note in told["notes"])
        timed = tuple(name for name in features if facts[name]["times"] is not None)
        seen = tuple(kind for kind in made.edges if kind not in {task.answers for task in tasks.values()})
        return replace(made, of_tables=Tables(features, tasks, seen, self._span(facts), timed, notes))

    def _span(self, facts: Mapping[str, Mapping[str, Any]]) -> float:
        """The time from the earliest row to the cut, or to the latest row. Times of several units are refused."""
        found = {name: told["times"] for name, told in facts.items() if told["times"]}
        if not found:
            return 1.0
        units = {name: "seconds" if is_dates else unit_of(last) for name, (_, last, is_dates) in found.items()}
        told = {name: f"{name} ({as_told(first, d)} to {as_told(last, d)})" for name, (first, last, d) in found.items()}
        (one, unit), *others = units.items()
        for other, another in others:
            if another != unit:
                raise ValueError(
                    f"{self.manifest.path}: times of {told[one]} are {unit}, and those of {told[other]} {another}: "
                    "give all in one unit, or as dates."
                )
        earliest, latest = min(span[0] for span in found.values()), max(span[1] for span in found.values())
        if self.cut is not None and not earliest < self.cut <= latest:
            are_dates = any(span[2] for span in found.values())
            at, first, last = (as_told(time, are_dates) for time in (self.cut, earliest, latest))
            raise ValueError(
                f"{self.manifest.path}: val_timestamp ({at}) is not among the times of rows and questions, {first} to "
                f"{last}: rows before it are trained on, and later ones judge."
            )
        return float(max((latest if self.cut is None else self.cut) - earliest, 1))
