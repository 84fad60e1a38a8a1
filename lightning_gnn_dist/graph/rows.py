"""Rows of a CSR and of arrays, by ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Lookup:
    """Finds the positions of node ids in ``nodes``, without an array as long as the graph."""

    def __init__(self, nodes: Tensor) -> None:
        self.order: Tensor | None = None
        if bool((nodes[1:] > nodes[:-1]).all()):
            self.ids = nodes
            return
        self.ids, self.order = nodes.sort()
        if (self.ids[1:] == self.ids[:-1]).any():
            twice = int(self.ids[1:][self.ids[1:] == self.ids[:-1]][0])
            raise ValueError(f"Every node may be given once, but node {twice} is given twice.")

    def contains(self, ids: Tensor) -> Tensor:
        return self._nearest(ids)[1]

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The positions in ``nodes`` of those ids that it holds, and a boolean per id: whether it holds it."""
        at, found = self._nearest(ids)
        return at[found] if self.order is None else self.order[at[found]], found

    def _nearest(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.ids.numel() == 0:
            return ids, torch.zeros_like(ids, dtype=torch.bool)
        at = torch.searchsorted(self.ids, ids).clamp_(max=self.ids.numel() - 1)
        return at, self.ids[at] == ids


def edge_positions(indptr: Tensor, rows: Tensor) -> Tensor:
    """The positions in ``indices`` of the edges of ``rows``, row after row."""
    start = indptr[rows]
    degree = indptr[rows + 1] - start
    before = degree.cumsum(0) - degree
    return torch.arange(int(degree.sum())) + (start - before).repeat_interleave(degree)


def bytes_per_row(arrays: Mapping[str, Tensor]) -> int:
    """The bytes of one row of every array, added up."""
    return sum(array[:1].nbytes for array in arrays.values())


def take_rows(array: Tensor, rows: Tensor) -> Tensor:
    """A copy of ``array[rows]`` in RAM; a memory map is read forwards, whatever the order of ``rows``."""
    if rows.numel() < 2 or bool((rows[1:] > rows[:-1]).all()):
        return array.index_select(0, rows)
    order = rows.argsort()
    out = array.new_empty((rows.numel(), *array.shape[1:]))
    out[order] = array.index_select(0, rows[order])
    return out


def count_per_row(indptr: Tensor, rows: Tensor, found: Tensor) -> Tensor:
    """How many edges of each row ``found`` marks, a boolean for each edge of ``rows``."""
    degree = indptr[rows + 1] - indptr[rows]
    row = torch.arange(rows.numel()).repeat_interleave(degree)
    return torch.bincount(row[found], minlength=rows.numel())
