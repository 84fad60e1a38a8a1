"""Finds nodes by their users' ids, one at a time."""

from __future__ import annotations

import numpy as np

from lightning_gnn_dist.graph.user_ids import Ids


class IdIndex:
    """Finds the nodes that have ids one by one: it sorts once, keeps 8 bytes a node, and reads what it compares.

    Args:
        ids: The ids, that of node ``v`` at ``v``.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids, self._order = ids, ids.argsort(kind="stable")

    def find(self, asked: object) -> int | None:
        """Return the node that has an id; None where none has it, or where ids are of another kind."""
        if (key := _as_key(asked, self._ids.dtype)) is None:
            return None
        at = int(self._ids.searchsorted(key, sorter=self._order))
        return int(self._order[at]) if at < len(self._order) and self._ids[self._order[at]].item() == asked else None


def _as_key(asked: object, dtype: np.dtype) -> Ids | None:
    """Return an id as one of this type, which a search then takes without a copy of all; None where it is none."""
    if type(asked) is str and dtype.kind == "U" and len(asked) <= dtype.itemsize // 4:
        return np.array(asked, dtype)
    if type(asked) is int and dtype.kind in "iu" and np.iinfo(dtype).min <= asked <= np.iinfo(dtype).max:
        return np.array(asked, dtype)
    return None
