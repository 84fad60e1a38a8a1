"""Finds nodes by the ids that users' tables have for them, in mapped files: it reads no more than it compares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_gnn_dist.graph.storage.npy import Column

_AT_ONCE = 1 << 20  # ids that are compared together


def places_of(ids: Column, asked: Column) -> NDArray[np.int64]:
    """Return the node that has each id, -1 where none has it, by one pass over all of them."""
    order = asked.argsort(kind="stable")
    found, in_order = np.full(len(asked), -1), asked[order]
    for first in range(0, len(ids), _AT_ONCE):
        piece = ids[first : first + _AT_ONCE]
        start, end = np.searchsorted(in_order, piece, "left"), np.searchsorted(in_order, piece, "right")
        for at in np.flatnonzero(end > start):
            found[order[start[at] : end[at]]] = first + at
    return found


class IdIndex:
    """Finds the nodes that have ids one by one: it sorts once, keeps 8 bytes a node, and reads what it compares.

    Args:
        ids: The ids, that of node ``v`` at ``v``.
    """

    def __init__(self, ids: Column) -> None:
        self._ids, self._order = ids, ids.argsort(kind="stable")

    def find(self, asked: object) -> int | None:
        """Return the node that has an id; None where none has it, or where ids are of another kind."""
        if (key := _as_key(asked, self._ids.dtype)) is None:
            return None
        at = int(self._ids.searchsorted(key, sorter=self._order))
        return int(self._order[at]) if at < len(self._order) and self._ids[self._order[at]].item() == asked else None


def _as_key(asked: object, dtype: np.dtype) -> Column | None:
    """Return an id as one of this type, which a search then takes without a copy of all; None where it is none."""
    if type(asked) is str and dtype.kind == "U" and len(asked) <= dtype.itemsize // 4:
        return np.array(asked, dtype)
    if type(asked) is int and dtype.kind in "iu" and np.iinfo(dtype).min <= asked <= np.iinfo(dtype).max:
        return np.array(asked, dtype)
    return None
