"""Where the edges of one type into one node are in its row: a piece of it, as rows are in the order of types."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gnn_dist.engine.compiling import inlined
from lightning_gnn_dist.engine.intrinsics import RUN, prefetch, run_length
from lightning_gnn_dist.engine.kernels import Array

_U = np.uint64


@inlined
def prefetch_types(edge_type: Array, first: int, degree: int) -> None:
    """Ask for what :func:`end_of_piece` reads of a short row."""
    prefetch(edge_type, first)
    prefetch(edge_type, first + degree + RUN - 1)


@inlined
def end_of_piece(edge_type: Array, first: int, last: int) -> Any:
    """Where the edges of the type of edge ``first`` end in a row that ends at ``last``: past ``first`` in any case."""
    low = first + 1
    if first + RUN <= len(edge_type):
        low = first + run_length(edge_type, first)
        if low < first + RUN or low >= last:
            return min(low, last)
    kind, high = edge_type[_U(first)], last
    while low < high:
        middle = (low + high) // 2
        if edge_type[_U(middle)] == kind:
            low = middle + 1
        else:
            high = middle
    return low
