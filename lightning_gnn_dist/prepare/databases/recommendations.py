"""The tables of a task that recommends: a question for each row, and an edge from it to each right answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.graph.typed.tables import TableTask
from lightning_gnn_dist.prepare.databases.cells import Cells, joined
from lightning_gnn_dist.prepare.databases.keys import KEYS, write_keys
from lightning_gnn_dist.prepare.databases.questions import Questions
from lightning_gnn_dist.prepare.files.columns import SPLITS


class Recommendations(Questions):
    """Questions whose answers are keys of rows of another table, any number of them.

    A table of text has several keys in a cell, with spaces between them. A question without an answer that is known is
    not learned; what it is recommended is found all the same.
    """

    is_strict = True

    def _answers(self, piece: Mapping[str, Cells], path: Path, first: int) -> Cells:
        (target,) = self.spec.targets
        cells, told = piece[target], f"{path}: column {target!r} holds"
        if cells.are_dates:
            raise ValueError(f"{told} dates, and keys are whole numbers or words.")
        lists = np.empty(len(cells.missing), np.object_)
        for row, (cell, is_missing) in enumerate(zip(cells.values, cells.missing, strict=True)):
            lists[row] = np.array([]) if is_missing else _keys(cell)
            if lists[row].dtype.kind == "f" and (lists[row] % 1).any():
                raise ValueError(f"{told} {cell} in row {first + row + 1}, and keys are whole numbers or words.")
        return Cells(lists, np.array([not len(keys) for keys in lists], np.bool_))

    def _answered(self, answers: Cells, splits: Column, folder: Path) -> tuple[dict[str, Column], TableTask]:
        spec, there = self.spec, ~answers.missing
        lists = answers.values[there]
        rows = np.repeat(np.flatnonzero(there), [len(keys) for keys in lists])
        keys = joined(list(lists))
        keys = keys.astype(np.int64) if keys.dtype.kind == "f" else keys
        write_keys(folder / KEYS / spec.targets[0], 0, keys, rows)
        masks = {f"{split}_mask": splits == at for at, split in enumerate(SPLITS)}
        masks["train_mask"] &= there
        task = TableTask(spec.name, spec.task_type, spec.entity_table, 0, hidden=spec.hidden)
        return masks, TableTask(**(vars(task) | {"receiver": spec.receiver, "k": spec.k}))


def _keys(cell: object) -> Column:
    """The keys in a cell: a list, words with spaces between them, or one key."""
    return np.array(cell.split() if isinstance(cell, str) else cell).reshape(-1)
