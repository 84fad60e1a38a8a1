"""Some rows of a table, of which there are more and more, in the memory of those that there are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent

_GROWTH = 1.5  # of the memory, where it is too small
_LEAST_BYTES = 1 << 26  # on a CPU, where memory that holds no rows yet is not taken, and so large a piece is given back


class GrowingRows:
    """Rows of several tensors, by id. A row has a slot, in the order in which rows came, which it keeps.

    Attributes:
        starts: By the name of each tensor, the row that an id has there before it gets one, of shape (1, ...).
    """

    def __init__(self) -> None:
        self.starts: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._ids)

    def clear(self) -> None:
        """Forget all rows."""
        self._ids = torch.empty(0, dtype=torch.int64)  # increasing
        self._slots = self._ids  # of each of them
        self._tensors = {name: start[:0] for name, start in self.starts.items()}

    def declare(self, name: str, start: Tensor) -> None:
        """Add a tensor, in which all rows are ``start``, unless there is one of that name."""
        if name not in self.starts:
            self.starts[name] = start
            self._tensors[name] = start.repeat(len(self), *[1] * (start.dim() - 1))

    def slots(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, which increase; -1 where there is no row. All on the CPU."""
        if not len(self):
            return torch.full_like(ids, -1)
        places = torch.searchsorted(self._ids, ids).clamp_(max=len(self) - 1)
        return torch.where(self._ids[places] == ids, self._slots[places], -1)

    def add(self, ids: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Add rows of ids that increase and have none; return their slots. Of a tensor left out they are its start."""
        first, count = len(self), len(ids)
        slots = torch.arange(first, first + count)
        is_new = torch.zeros(first + count, dtype=torch.bool)
        is_new[torch.searchsorted(self._ids, ids) + torch.arange(count)] = True
        self._ids, self._slots = _mixed(is_new, ids, self._ids), _mixed(is_new, slots, self._slots)
        for name, start in self.starts.items():
            tensor = self._tensors[name] = _grown(self._tensors[name], first, first + count)
            tensor[first : first + count] = rows.get(name, start)
        return slots

    def slots_with(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, which increase; those that have no row get the start."""
        slots = self.slots(ids)
        if bool((is_new := slots < 0).any()):
            slots[is_new] = self.add(ids[is_new], {})
        return slots

    def take(self, name: str, slots: Tensor) -> Tensor:
        """Return a copy of rows of a tensor."""
        tensor = self._tensors[name]
        return tensor.index_select(0, sent(slots, tensor.device))

    def put(self, name: str, slots: Tensor, rows: Tensor) -> None:
        """Replace rows of a tensor."""
        tensor = self._tensors[name]
        tensor.index_copy_(0, sent(slots, tensor.device), rows)

    def all_of(self, name: str) -> Tensor:
        """Return the rows of a tensor in the order of slots, in its memory."""
        return self._tensors[name][: len(self)]

    def by_id(self) -> tuple[Tensor, Tensor]:
        """Return all ids, increasing, and their slots."""
        return self._ids, self._slots

    def in_ranges(self, ranges: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return the ids that lie in some ranges, one behind the other, and their slots."""
        ends = torch.searchsorted(self._ids, torch.tensor(ranges)).tolist()
        ids, slots = (torch.cat([each[start:stop] for start, stop in ends]) for each in (self._ids, self._slots))
        return ids, slots


def _mixed(is_new: Tensor, new: Tensor, old: Tensor) -> Tensor:
    mixed = torch.empty(len(is_new), dtype=old.dtype)
    mixed[is_new], mixed[~is_new] = new, old
    return mixed


def _grown(tensor: Tensor, used: int, needed: int) -> Tensor:
    if needed <= len(tensor):
        return tensor
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    least = _LEAST_BYTES // row_bytes if tensor.device.type == "cpu" else 0
    grown = tensor.new_empty((max(needed, least, int(_GROWTH * len(tensor))), *tensor.shape[1:]))
    grown[:used] = tensor[:used]
    return grown
