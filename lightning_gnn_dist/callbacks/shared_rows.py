"""One file with a row for every node, to which all ranks write at once."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_gnn_dist.graph.storage.parquet_rows import TABLES, write_table
from lightning_gnn_dist.graph.storage.row_file import RowFile, make
from lightning_gnn_dist.graph.user_ids import Columns, NodeColumns
from lightning_gnn_dist.wire import collectives


class SharedRows:
    """Rows in a draft beside ``path``, until :meth:`publish` gives it that name, or writes its table there.

    To construct it is collective.

    Args:
        path: The file. Ranks on several hosts need storage that they share.
        num_rows: Number of rows of all ranks together.
        device: The device of the ranks' messages.
        says: What returned the rows, for error messages.
        columns: Returns the columns of some rows, if the path is that of a table, given the number of the first.
    """

    def __init__(
        self,
        path: Path,
        num_rows: int,
        device: torch.device,
        says: str = "predict_step",
        columns: Columns = NodeColumns(),  # noqa: B008  # frozen
    ) -> None:
        token = torch.tensor([uuid.uuid4().int >> 66], device=device)
        collectives.broadcast_([token])
        self.draft = path.parent / f".{path.name}.{int(token):x}"
        self._path, self._num_rows, self._device, self._says = path, num_rows, device, says
        self._columns = columns
        self._file: RowFile | None = None

    def write(self, ids: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Write ``rows[i]`` as the row of node ``ids[i]``. Collective the first time, when rank 0 makes the file."""
        if ids.size and int(ids.max()) >= self._num_rows:
            raise ValueError(
                f"There is a row for node {int(ids.max())}, and the graph has {self._num_rows} nodes to predict: its "
                "array n_id holds ids of a larger graph that it was cut from, as by Graph.induced. Take the array out, "
                'graph.node_arrays.pop("n_id"), of a graph with types graph.types.node_arrays["paper"].pop("n_id"), '
                "and rows are those of the graph itself."
            )
        self.open(rows)
        assert self._file is not None
        self._file.write(ids, rows)

    def open(self, like: NDArray[Any]) -> None:
        """Make the file, if it is not there, of rows of this type and shape. Collective the first time."""
        if self._file is None:
            self._file = self._opened(like)

    def publish(self) -> None:
        """Rename the draft to ``path`` when all ranks have written every row. Collective."""
        assert self._file is not None
        self._file.close()
        written = self._sum(self._file.written)
        if written != self._num_rows:
            raise RuntimeError(f"{written} rows were written, but the graph has {self._num_rows} nodes.")
        if collectives.rank() == 0:
            if self._path.suffix in TABLES:
                write_table(self.draft, self._table, self._columns, self._path.suffix)
                self.draft.unlink()
                os.replace(self._table, self._path)
            else:
                os.replace(self.draft, self._path)
        self._sum(0)  # so that no rank looks for the file before it is there

    def discard(self) -> None:
        """Close the draft, and delete it unless it was published. Not collective."""
        if self._file is not None:
            self._file.close()
        self.draft.unlink(missing_ok=True)
        self._table.unlink(missing_ok=True)

    @property
    def _table(self) -> Path:
        """The draft of a table."""
        return self.draft.with_name(f"{self.draft.name}.table")

    def _opened(self, like: NDArray[Any]) -> RowFile:
        if collectives.rank() == 0:
            make(self.draft, self._num_rows, like)
        self._sum(0)
        if not self.draft.exists():
            raise FileNotFoundError(
                f"Rank {collectives.rank()} does not see {self.draft}, which rank 0 has made: write to storage that "
                "all hosts share. predict_by_layer(on_rows=...) gives every rank its own rows, without a file."
            )
        return RowFile(self.draft, self._says)

    def _sum(self, number: int) -> int:
        return int(collectives.all_gather_rows(torch.tensor([number], device=self._device)).sum())
