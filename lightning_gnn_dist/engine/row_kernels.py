"""The compiled loop of an owner of rows: draw for nodes that others have in their batches.

Touch this file after a change in kernels.py: numba keeps compiled kernels until their own file changes.
"""

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
    """Draw from many rows what :func:`kernels.sample` draws for their nodes.

    Args:
        indptr: The owner's row starts, int64.
        indices: The rows' entries.
        rows: Which rows, int64.
        nodes: The nodes that these rows belong to, int64.
        keys: The key of each draw's hop, uint64.
        fanout: Neighbours to draw; -1 takes all.
        rule: How they are drawn.
        heights: Room for the longest row.
        starts: Where in ``positions`` the edges of each row go.
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
