"""A cache of rows that lie elsewhere, by Belady's rule: the rows that are needed last go first.

    next use of a row = the first of the coming bulks that has it      (draws are keyed: they are known ahead)

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. Rows that no
known bulk needs are kept by how many edges come from them. Rows of all types share the same bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.graph.storage.mapped import DO_NOT_NEED, libc

Arrays = dict[str, Tensor]
_MOST = (1 << 32) - 1  # edges that are counted


class RowCache:
    """Holds rows of some nodes of a type. It changes what is sent, never what is computed.

    Args:
        arrays: Arrays with rows like those to hold, by name.
        num_rows: How many rows it may hold at most. Their memory is taken as they come.
        count: Returns how likely each of some ids is to be needed at all, such as how many edges come from it.

    Attributes:
        rows: What is held, by slot: the first ones are filled.
        asked: How many rows were looked up.
        hits: How many of these were held.
    """

    def __init__(self, arrays: Arrays, num_rows: int, count: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        self.num_rows, self._count = num_rows, count
        self.rows = {name: array.new_empty((num_rows, *array.shape[1:])) for name, array in arrays.items()}
        nothing = torch.empty(0, dtype=torch.int64)
        self._ids, self._slots, self._counts = nothing, nothing, nothing
        self._last: tuple[Tensor, Tensor, Arrays] = nothing, nothing, {}
        self.bytes_per_row, self.asked, self.hits = bytes_per_row(arrays), 0, 0

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return self.bytes_per_row * (self.asked - self.hits)

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the rows of some ids are, and which are to be fetched: these stand below the held ones.

        What is held stays as it is until :meth:`Caches.settle` is called. Before it, :meth:`offer` is given what was
        fetched.

        Args:
            ids: Distinct ids, increasing.
        """
        if not self.num_rows:
            self.asked += len(ids)
            return torch.arange(len(ids)), ids
        places = places_of(ids, self._ids)
        is_held = places >= 0
        places[is_held] = self._slots[places[is_held]]
        rest = ids[~is_held]
        places[~is_held] = torch.arange(len(rest)) + self.num_rows
        self.asked, self.hits = self.asked + len(ids), self.hits + len(ids) - len(rest)
        return places, rest

    def offer(self, ids: Tensor, rows: Arrays) -> None:
        """Take what was fetched, by name: :meth:`Caches.settle` chooses what is held of it."""
        if self.num_rows:
            self._last = ids, self._count(ids), rows

    def haste(self, coming: Sequence[Tensor]) -> Tensor:
        """Return how soon each row is needed that is held, and that was fetched last: the sooner the more."""
        fetched, new, _ = self._last
        counts = torch.cat([self._counts, new])
        uses = torch.full_like(counts, len(coming))
        for number in range(len(coming) - 1, -1, -1):
            for ids, of in zip((self._ids, fetched), uses.split([len(self._ids), len(fetched)]), strict=True):
                places = places_of(coming[number], ids)
                of[places[places >= 0]] = number
        return counts.clamp(max=_MOST) - uses * (_MOST + 1)

    def keep(self, is_kept: Tensor) -> None:
        """Hold those rows alone, of what is held and was fetched last, that are marked."""
        fetched, counts, rows = self._last
        old, new = is_kept.split([len(self._ids), len(fetched)])
        slots, admitted, before = self._slots[old], new.nonzero().view(-1), len(self._ids)
        num_held = len(slots) + len(admitted)
        is_free, is_beyond = torch.ones(num_held, dtype=torch.bool), slots >= num_held
        is_free[slots[~is_beyond]] = False
        nearer, taken = is_free.nonzero().view(-1).split([int(is_beyond.sum()), len(admitted)])
        with torch.inference_mode():  # as tables may be of an evaluation, and another thread writes to them
            for name, table in self.rows.items():
                table[nearer] = table[slots[is_beyond]]
                if rows:
                    table[taken] = rows[name][admitted]
                let_go_of_memory(table[num_held:before])
        slots[is_beyond] = nearer
        order = merge_order(self._ids[old], fetched[new])
        self._ids = torch.cat([self._ids[old], fetched[new]])[order]
        self._counts = torch.cat([self._counts[old], counts[new]])[order]
        self._slots = torch.cat([slots, taken])[order]
        self._last = fetched[:0], counts[:0], {}


class Caches:
    """The caches of all node types, whose rows share so many bytes: those that are needed soonest stay.

    Args:
        caches: One for each type.
        num_bytes: What all rows may take; a row without arrays counts as a byte.
    """

    def __init__(self, caches: Sequence[RowCache], num_bytes: int) -> None:
        self._caches, self.num_bytes = caches, num_bytes

    @property
    def has_room(self) -> bool:
        return any(cache.num_rows for cache in self._caches)

    @property
    def asked(self) -> int:
        return sum(cache.asked for cache in self._caches)

    @property
    def hits(self) -> int:
        return sum(cache.hits for cache in self._caches)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return sum(cache.fetched_bytes for cache in self._caches)

    def settle(self, coming: Sequence[Sequence[Tensor]]) -> None:
        """Choose what to hold, of what is held and was fetched last, now that the next uses of both are known.

        Args:
            coming: For each type the ids that the next bulk looks up, and those after it, as far as they are known.
        """
        if not self.has_room:
            return
        hastes = [cache.haste(ids) for cache, ids in zip(self._caches, coming, strict=True)]
        lengths, haste = list(map(len, hastes)), torch.cat(hastes)
        sizes = torch.tensor([max(1, cache.bytes_per_row) for cache in self._caches])
        is_kept = torch.ones_like(haste, dtype=torch.bool)
        is_kept[_needed_last(haste, sizes.repeat_interleave(torch.tensor(lengths)), self.num_bytes)] = False
        for cache, of_type in zip(self._caches, is_kept.split(lengths), strict=True):
            cache.keep(of_type)


def _needed_last(haste: Tensor, sizes: Tensor, num_bytes: int) -> Tensor:
    """Return the places of those rows for which so many bytes have no room; each row has a size."""
    surplus = int(sizes.sum()) - num_bytes
    if surplus <= 0:
        return torch.empty(0, dtype=torch.int64)
    most = min(-(-surplus // int(sizes.min())), len(haste))
    last = torch.from_numpy(np.argpartition(haste.numpy(), min(most, len(haste) - 1))[:most])
    last = last[haste[last].argsort(stable=True)]
    freed = sizes[last].cumsum(0)
    return last[: int(torch.searchsorted(freed, surplus)) + 1]


def places_of(ids: Tensor, among: Tensor) -> Tensor:
    """Return the place of each of some ids among others, which increase; -1 where it is not there."""
    if not len(among):
        return torch.full_like(ids, -1)
    at = torch.searchsorted(among, ids).clamp_(max=len(among) - 1)
    return torch.where(among[at] == ids, at, -1)


def merge_order(left: Tensor, right: Tensor) -> Tensor:
    """Return the order in which two increasing vectors of ids, one after the other, are increasing."""
    at = torch.searchsorted(left, right) + torch.arange(len(right))
    is_left = torch.ones(len(left) + len(right), dtype=torch.bool)
    is_left[at] = False
    order = is_left.cumsum(0) - 1
    order[at] = torch.arange(len(right)) + len(left)
    return order


def let_go_of_memory(array: Tensor) -> None:
    """Give the system back the whole pages of an array in RAM that is written anew before it is read."""
    first, last = array.data_ptr(), array.data_ptr() + array.nbytes
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc().madvise(start, end - start, DO_NOT_NEED)
