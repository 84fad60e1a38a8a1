"""A cache of feature rows that other ranks own and batches ask for again and again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class RowCache:
    """Holds the rows of some nodes for good. It changes what is sent, never what is computed.

    Args:
        ids: The nodes whose rows it holds, distinct.
        fetch: Returns the rows of every node array for some ids. It may be collective.
    """

    def __init__(self, ids: Tensor, fetch: Callable[[Tensor], dict[str, Tensor]]) -> None:
        self._ids = ids.sort().values
        self._rows = fetch(self._ids)
        self.asked = 0
        self.hits = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    def find(self, ids: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the positions in ``ids`` that are held with their places here, and the other positions."""
        at = torch.searchsorted(self._ids, ids).clamp_(max=max(0, self._ids.numel() - 1))
        is_held = self._ids[at] == ids if self._ids.numel() else torch.zeros_like(ids, dtype=torch.bool)
        positions = is_held.nonzero().view(-1)
        self.asked, self.hits = self.asked + ids.numel(), self.hits + positions.numel()
        return (positions, at[positions]), (~is_held).nonzero().view(-1)

    def fill(self, rows: dict[str, Tensor], held: tuple[Tensor, Tensor], rest: Tensor) -> dict[str, Tensor]:
        """Return the rows of all ids in order: ``rows`` at the positions ``rest``, and those that are held."""
        positions, at = held
        if not positions.numel():
            return rows
        return {name: self._merge(array, self._rows[name], positions, at, rest) for name, array in rows.items()}

    @staticmethod
    def _merge(new: Tensor, kept: Tensor, positions: Tensor, at: Tensor, rest: Tensor) -> Tensor:
        out = new.new_empty((positions.numel() + rest.numel(), *new.shape[1:]))
        out[positions], out[rest] = kept[at], new
        return out
