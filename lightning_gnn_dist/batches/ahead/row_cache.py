"""A cache of rows that lie elsewhere, by Belady's rule: the rows that are needed last go first.

    next use of a row = the first of the coming bulks that has it      (draws are keyed: they are known ahead)

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. Rows that no
known bulk needs are kept by how many edges come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import move_rows
from lightning_gnn_dist.engine.row_kernels import find_places, merge_order
from lightning_gnn_dist.graph.rows import bytes_per_row

Arrays = dict[str, Tensor]
_MOST = (1 << 32) - 1  # edges that are counted


class RowCache:
    """Holds rows of some nodes. It changes what is sent, never what is computed.

    Args:
        arrays: Arrays with rows like those to hold, by name.
        num_rows: How many rows it may hold.
        count: Returns how likely each of some ids is to be needed at all, such as how many edges come from it.

    Attributes:
        rows: What is held, by slot.
        asked: How many rows were looked up.
        hits: How many of these were held.
    """

    def __init__(
        self,
        arrays: Arrays,
        num_rows: int,
        count: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        self.num_rows, self._count = num_rows, count
        self.rows = {name: array.new_empty((num_rows, *array.shape[1:])) for name, array in arrays.items()}
        nothing = torch.empty(0, dtype=torch.int64)
        self._ids, self._slots, self._counts = nothing, nothing, nothing
        self._free = torch.arange(num_rows)
        self._last: tuple[Tensor, Tensor, Arrays] = nothing, nothing, {}
        self.bytes_per_row, self.asked, self.hits = bytes_per_row(arrays), 0, 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return self.bytes_per_row * (self.asked - self.hits)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that it may hold."""
        return self.num_rows * self.bytes_per_row

    def look_up(self, ids: Tensor, coming: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return where the rows of some ids are, and which are to be fetched: these stand below the held ones.

        What is held stays as it is until the next call. Before it, :meth:`offer` is given what was fetched.

        Args:
            ids: Distinct ids, increasing.
            coming: The same for the bulks that will come next, as far as they are known.
        """
        if not self.num_rows:
            self.asked += len(ids)
            return torch.arange(len(ids)), ids
        self._settle([ids, *coming])
        places = torch.full_like(ids, -1)
        find_places(ids.numpy(), self._ids.numpy(), places.numpy(), -1)
        is_held = places >= 0
        places[is_held] = self._slots[places[is_held]]
        rest = ids[~is_held]
        places[~is_held] = torch.arange(len(rest)) + self.num_rows
        self.asked, self.hits = self.asked + len(ids), self.hits + len(ids) - len(rest)
        return places, rest

    def offer(self, ids: Tensor, rows: Arrays) -> None:
        """Take what was fetched, by name: the next call of :meth:`look_up` chooses what is held of it."""
        if self.num_rows:
            self._last = ids, self._count(ids), rows

    def _settle(self, coming: Sequence[Tensor]) -> None:
        """Choose what to hold, of what is held and what was fetched last, now that the next uses of both are known."""
        fetched, counts, rows = self._last
        ids, counts = torch.cat([self._ids, fetched]), torch.cat([self._counts, counts])
        is_kept = torch.ones_like(ids, dtype=torch.bool)
        if len(ids) > self.num_rows:
            is_kept[self._needed_last(fetched, coming, counts)] = False
        old, new = is_kept.split([len(self._ids), len(fetched)])
        free, admitted = torch.cat([self._free, self._slots[~old]]), new.nonzero().view(-1)
        taken, self._free = free.split([len(admitted), len(free) - len(admitted)])
        for name, table in self.rows.items() if rows else ():
            move_rows(rows[name], admitted, table, taken)
        order = torch.empty(int(is_kept.sum()), dtype=torch.int64)
        merge_order(self._ids[old].numpy(), fetched[new].numpy(), order.numpy())
        self._ids, self._counts = ids[is_kept][order], counts[is_kept][order]
        self._slots = torch.cat([self._slots[old], taken])[order]
        self._last = fetched[:0], counts[:0], {}

    def _needed_last(self, fetched: Tensor, coming: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Return the places, among the held and the fetched, of those for which there is no room."""
        uses = torch.full_like(counts, len(coming))
        for number in range(len(coming) - 1, -1, -1):
            for ids, of in zip((self._ids, fetched), uses.split([len(self._ids), len(fetched)]), strict=True):
                find_places(ids.numpy(), coming[number].numpy(), of.numpy(), number)
        haste = counts.clamp(max=_MOST) - uses * (_MOST + 1)  # the sooner the more
        surplus = len(counts) - self.num_rows
        return torch.from_numpy(np.argpartition(haste.numpy(), surplus)[:surplus])
