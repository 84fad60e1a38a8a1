"""A cache of rows that other ranks own, by Belady's rule: the rows that are needed last go first.

    next use of a row = the first of the coming bulks that has it      (draws are keyed: they are known ahead)

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. Rows that no
known bulk needs are kept by how many edges of the own shard come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.row_kernels import mark_uses

Rows = dict[str, Tensor]


class RowCache:
    """Holds rows of some nodes. It changes what is sent, never what is computed.

    Args:
        arrays: Arrays with rows like those to hold, by name.
        num_rows: How many rows it may hold.
        fetch: Returns the rows of every array for some increasing ids.
        count: Returns how many edges of the own shard come from each of some ids.
    """

    def __init__(
        self,
        arrays: Rows,
        num_rows: int,
        fetch: Callable[[Tensor], Rows],
        count: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        self.num_rows, self._fetch, self._count = num_rows, fetch, count
        self.rows = {name: array.new_empty((num_rows, *array.shape[1:])) for name, array in arrays.items()}
        self._ids, self._slots = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._free = torch.arange(num_rows)
        self._last: tuple[Tensor, Rows] = torch.empty(0, dtype=torch.int64), {}
        self.asked = self.hits = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    def look_up(self, ids: Tensor, coming: Sequence[Tensor]) -> tuple[Tensor, Rows]:
        """Return where the rows of some ids are, and those that were fetched for it, which stand below the held ones.

        What is held stays as it is until the next call.

        Args:
            ids: Distinct ids, increasing.
            coming: The same for the bulks that will come next, as far as they are known.
        """
        if not self.num_rows:
            self.asked += len(ids)
            return torch.arange(len(ids)), self._fetch(ids)
        self._settle([ids, *coming])
        at = torch.searchsorted(self._ids, ids).clamp_(max=max(0, len(self._ids) - 1))
        is_held = self._ids[at] == ids if len(self._ids) else torch.zeros_like(ids, dtype=torch.bool)
        places = torch.empty_like(ids)
        places[is_held] = self._slots[at[is_held]]
        rest = ids[~is_held]
        places[~is_held] = torch.arange(len(rest)) + self.num_rows
        self.asked, self.hits = self.asked + len(ids), self.hits + len(ids) - len(rest)
        self._last = rest, self._fetch(rest)
        return places, self._last[1]

    def _settle(self, coming: Sequence[Tensor]) -> None:
        """Choose what to hold, of what is held and what was fetched last, now that the next uses of both are known."""
        fetched, rows = self._last
        ids = torch.cat([self._ids, fetched])
        is_kept = torch.ones_like(ids, dtype=torch.bool)
        if len(ids) > self.num_rows:
            is_kept[self._needed_last(ids, coming)] = False
        old, new = is_kept.split([len(self._ids), len(fetched)])
        free = torch.cat([self._free, self._slots[~old]])
        taken, self._free = free.split([int(new.sum()), len(free) - int(new.sum())])
        for name, table in self.rows.items():
            table[taken] = rows[name][new] if rows else table[taken]
        order = ids[is_kept].argsort()
        self._ids, self._slots = ids[is_kept][order], torch.cat([self._slots[old], taken])[order]

    def _needed_last(self, ids: Tensor, coming: Sequence[Tensor]) -> Tensor:
        """Return the places of those of ``ids`` for which there is no room."""
        in_order, order = ids.sort()
        uses = np.full(len(ids), len(coming), np.int64)
        for number in range(len(coming) - 1, -1, -1):
            mark_uses(in_order.numpy(), coming[number].numpy(), number, uses)
        haste = torch.from_numpy(uses) * -(1 << 32)  # the sooner the more
        haste += self._count(in_order).clamp(max=(1 << 32) - 1)
        worst = torch.from_numpy(np.argpartition(haste.numpy(), len(ids) - self.num_rows)[: len(ids) - self.num_rows])
        return order[worst]
