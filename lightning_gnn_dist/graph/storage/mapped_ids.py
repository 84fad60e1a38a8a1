"""The ids that users' tables have for nodes, in mapped files of which no more is read than is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_gnn_dist.graph.storage.npy import Column

_AT_ONCE = 1 << 20  # ids that are compared, or written, together


class MappedIds:
    """The ids of nodes, that of node ``v`` at ``v``: those of a graph, and behind them those of its log.

    Args:
        files: The ids in each file.

    Attributes:
        files: The same.
        dtype: The type that holds all of them.
    """

    def __init__(self, files: Sequence[Column]) -> None:
        self.files, self.dtype = list(files), np.result_type(*files)
        self._starts = np.cumsum([0, *map(len, self.files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, nodes: NDArray[np.integer]) -> Column:
        """Return the ids of some nodes."""
        found = np.empty(nodes.shape, self.dtype)
        of_file = self._starts.searchsorted(nodes, "right") - 1
        for number in np.unique(of_file):
            some = of_file == number
            found[some] = self.files[number][nodes[some] - self._starts[number]]
        return found

    def first(self, count: int) -> MappedIds:
        """Return the ids of the first so many nodes."""
        starts = self._starts.tolist()
        return MappedIds([file[: max(0, count - start)] for file, start in zip(self.files, starts, strict=False)])

    def pieces(self) -> Iterator[Column]:
        """Yield all ids in order, piece by piece."""
        for file in self.files:
            for start in range(0, len(file), _AT_ONCE):
                yield file[start : start + _AT_ONCE].astype(self.dtype, copy=False)

    def whole(self) -> Column:
        """Return all ids, mapped where they are in one file."""
        return self.files[0] if len(self.files) == 1 else np.concatenate(self.files)

    def places(self, asked: Column) -> NDArray[np.int64]:
        """Return the node that has each id, -1 where none has it, by one pass over all of them."""
        order, first = asked.argsort(kind="stable"), 0
        found, in_order = np.full(len(asked), -1), asked[order]
        for piece in self.pieces():
            start, end = np.searchsorted(in_order, piece, "left"), np.searchsorted(in_order, piece, "right")
            for at in np.flatnonzero(end > start):
                found[order[start[at] : end[at]]] = first + at
            first += len(piece)
        return found


class IdIndex:
    """Finds the nodes that have ids one by one: it sorts once, keeps 8 bytes a node, and reads what it compares.

    Args:
        ids: The ids.
    """

    def __init__(self, ids: MappedIds) -> None:
        self._parts, first = list[tuple[int, Column, Column]](), 0
        for file in ids.files:
            self._parts.append((first, file, file.argsort(kind="stable")))
            first += len(file)

    def find(self, asked: object) -> int | None:
        """Return the node that has an id; None where none has it, or where ids are of another kind."""
        for first, file, order in self._parts:
            if (key := _as_key(asked, file.dtype)) is not None:
                at = int(file.searchsorted(key, sorter=order))
                if at < len(order) and file[order[at]].item() == asked:
                    return first + int(order[at])
        return None


def _as_key(asked: object, dtype: np.dtype) -> Column | None:
    """Return an id as one of this type, which a search then takes without a copy of all; None where it is none."""
    if type(asked) is str and dtype.kind == "U" and len(asked) <= dtype.itemsize // 4:
        return np.array(asked, dtype)
    if type(asked) is int and dtype.kind in "iu" and np.iinfo(dtype).min <= asked <= np.iinfo(dtype).max:
        return np.array(asked, dtype)
    return None
