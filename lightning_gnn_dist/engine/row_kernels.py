"""The compiled loop in which a rank draws edges of its own rows for the batches of other ranks."""

from __future__ import annotations

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import Array, Rule, draw_row, is_whole

_U = np.uint64


@compiled
def draw_rows(
    indptr: Array,
    indices: Array,
    rows: Array,
    nodes: Array,
    keys: Array,
    fanout: int,
    rule: Rule,
    heights: Array,
    starts: Array,
    positions: Array,
) -> None:
    """Draw from ``rows`` the same edges that :func:`kernels.sample` draws for their nodes.

    Args:
        indptr: The row starts of this rank, int64.
        indices: The in-neighbours of its rows.
        rows: The rows to draw from, int64.
        nodes: The id of each row's node, int64.
        keys: The key of each row's batch and hop, uint64.
        fanout: Neighbours to draw; -1 takes all.
        rule: How neighbours are drawn.
        heights: Working memory, as long as the longest row, if edges have weights.
        starts: Where the edges of each row go in ``positions``.
        positions: Receives positions in ``indices``.
    """
    for i in range(len(rows)):
        row, out = _U(rows[_U(i)]), starts[_U(i)]
        first = indptr[row]
        degree = indptr[row + _U(1)] - first
        if is_whole(degree, fanout, rule.replace):
            for edge in range(degree):
                positions[_U(out + edge)] = first + edge
        else:
            draw_row(indices, first, degree, fanout, keys[_U(i)], nodes[_U(i)], rule, heights, positions, out)
