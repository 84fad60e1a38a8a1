"""One hop of layer-wise sampling on rows that came from other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import REPEATED_SEED, ZERO, Array, Table, Work, place
from lightning_gnn_dist.engine.layer_kernels import LayerDraws, chances_of, choose, thin

_U = np.uint64


@compiled
def sample_layer(
    starts: Array,
    senders: Array,
    rows: Array,
    known: Array,
    begin: int,
    key: np.uint64,
    hop: int,
    layers: LayerDraws,
    work: Work,
    table: Table,
) -> Any:
    """One hop of :func:`sample_layers`, on rows of the frontier that came from other ranks; return the batch's nodes.

    ``work`` receives the hop's edges from its start on, and ``known`` followed by the new nodes.

    Args:
        starts: Where each row starts in ``senders``, int64.
        senders: The rows' entries.
        rows: The row of each node of the frontier, int64.
        known: The batch's nodes so far, int64.
        begin: The position in ``known`` at which the frontier begins.
        key: The hop's key.
        hop: The hop's number.
        layers: The same for all hops, except that ``values`` are in the order of ``senders``.
        work: Must have room for all nodes and edges.
        table: A table without valid entries.
    """
    for at in range(len(known)):
        work.columns[_U(at)] = known[_U(at)]
    end = place(ZERO, len(known), work, table, ZERO)
    if end != len(known):
        return REPEATED_SEED
    out = ZERO
    work.starts[_U(begin)] = out
    for i in range(begin, end):
        row = _U(rows[_U(i - begin)])
        for edge in range(starts[row], starts[row + _U(1)]):
            work.positions[_U(out)] = edge
            work.columns[_U(out)] = senders[_U(edge)]
            out += 1
        work.degree[_U(i - begin)] = starts[row + _U(1)] - starts[row]
        work.starts[_U(i + 1)] = out
    met = place(ZERO, out, work, table, end)
    inverse = chances_of(begin, end, met, hop, layers, work)
    choose(met, key, inverse, work)
    return thin(begin, end, met, layers, inverse, work)
