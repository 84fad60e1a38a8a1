"""What draws the batches of a task of a database, and whether nodes have labels in it."""

from __future__ import annotations

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

HOPS_OF_TASK = [1, 16, 8]  # the row that a question is about, then its neighbours of each type, then theirs
HOPS_OF_PAIRS = [16, 8, 4]  # the same, and the neighbours of what is recommended


def sampler_of_task(tables: Tables, task: str | None, *, has_labels: bool = False) -> Sampler | None:
    """Return what draws batches of a task; None where it is not said which.

    Args:
        tables: What became of the tables of the database.
        task: The task, or one of the tables. None stands for the only task that has labels.
        has_labels: Whether nodes are learned by labels: tasks that recommend are then refused.
    """
    if has_labels and task is not None and task not in tables.features and tables.task(task).receiver is not None:
        raise ValueError(
            f"task {shown(task)} recommends, and has no labels: learn it by LinkDataModule(graph, task=...)."
        )
    labelled = [name for name, each in tables.tasks.items() if each.receiver is None]
    if len(labelled) != 1 if task is None else task not in tables.tasks:
        return None
    hops = HOPS_OF_TASK if task is None or task in labelled else HOPS_OF_PAIRS
    if not tables.timed:
        return NeighborSampler(hops)
    timed: Sampler = extension("by time")(hops, tables.time, pick="latest")
    return timed
