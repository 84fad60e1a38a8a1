"""The compiled loops of layer-wise sampling: read all edges of a frontier, and keep those from nodes that are drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import (
    DAMAGED,
    REPEATED_SEED,
    ZERO,
    Array,
    Csr,
    Draws,
    Table,
    Work,
    expand,
    is_no_row,
    place,
    place_seeds,
)
from lightning_gnn_dist.engine.rng import draw, unit

_U = np.uint64


class LayerDraws(NamedTuple):
    """What distinguishes one layer-wise sampler from another. A is the weighted adjacency matrix, a row per receiver.

    Attributes:
        sizes: Nodes to draw per hop, on average, int64.
        values: The entries of A, float32 in the order of the graph's edges; empty for 1 / in-degree of the receiver.
        importance: The importance of each node, float64; empty for its squared column norm in the frontier's rows.
        scales: A factor for each hop, float64: a node's probability is ``min(1, scale * importance)``.
        normalize: Whether to scale the weights of each row to the sum that the row has in A.
    """

    sizes: Array
    values: Array
    importance: Array
    scales: Array
    normalize: bool


@compiled
def sample_layers(
    csr: Csr,
    seeds: Array,
    draws: Draws,
    layers: LayerDraws,
    work: Work,
    table: Table,
    num_nodes: Array,
    num_edges: Array,
) -> Any:
    """Sample one batch into ``work``, as :func:`kernels.sample` does; ``draws`` reads all edges of a node.

    The table is opened anew for each hop, because it also holds nodes that were met but not drawn.
    """
    begin, end = ZERO, place_seeds(seeds, work, table)
    if end != len(seeds):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(draws.fanouts)):
        met = expand(csr, begin, end, end, hop, draws, draws.edge_type, draws.rule.weights, work, table)
        if met < 0:
            return DAMAGED
        total = work.starts[_U(end)]
        if end + total > len(work.positions):
            return end + total
        inverse = chances_of(begin, end, met, hop, layers, work)
        choose(met, draws.keys[hop, 0], inverse, work)
        found = thin(begin, end, met, layers, inverse, work)
        num_edges[hop] = work.starts[_U(end)] - work.starts[_U(begin)]
        num_nodes[hop + 1] = found - end
        begin, end = end, found
        needed = work.starts[_U(begin)] + end
        if needed > len(work.positions):
            return needed
        table = Table(table.entries, table.shift, table.epoch + len(work.positions))
        _place_again(end, work.starts[_U(begin)], work, table)
    return len(seeds) + work.starts[begin]


@part
def _value(edge: int, row: int, begin: int, values: Array, work: Work) -> Any:
    """The entry of A that belongs to an edge of the frontier row ``row``."""
    if len(values):
        return np.float64(values[_U(work.positions[_U(edge)])])
    return 1.0 / work.degree[_U(row - begin)]


@part
def chances_of(begin: int, end: int, met: int, hop: int, layers: LayerDraws, work: Work) -> Any:
    """The probability that each node met so far is drawn, float64, shape (met,)."""
    chances = np.zeros(met)
    if len(layers.importance):
        scale = layers.scales[hop]
        for at in range(met):
            chances[_U(at)] = layers.importance[_U(work.nodes[_U(at)])]
    else:
        for row in range(begin, end):
            for edge in range(work.starts[_U(row)], work.starts[_U(row + 1)]):
                value = _value(edge, row, begin, layers.values, work)
                chances[_U(work.columns[_U(edge)])] += value * value
        scale = scale_to(chances, layers.sizes[hop])
    for at in range(met):
        if chances[_U(at)] > 0.0:
            chances[_U(at)] = min(1.0, scale * chances[_U(at)])
    return chances


@compiled
def scale_to(importance: Array, size: int) -> Any:
    """The factor with which ``min(1, factor * importance)`` sums to ``size``; infinite if no more are above 0."""
    positive = 0
    for value in importance:
        positive += value > 0.0
    if positive <= size:
        return np.inf
    factor, previous = 0.0, -1.0
    while factor > previous:  # an entry that reaches 1 takes no more, so the factor of the others grows
        room, mass, previous = np.float64(size), 0.0, factor
        for value in importance:
            if value * factor >= 1.0:
                room -= 1.0
            else:
                mass += value
        if room > 0.0 and mass > 0.0:
            factor = max(factor, room / mass)
    return factor


@part
def choose(met: int, key: np.uint64, chances: Array, work: Work) -> None:
    """Draw nodes independently. A probability is replaced by its inverse, or by 0 if the node is not drawn."""
    for at in range(met):
        chance = chances[_U(at)]
        is_drawn = unit(draw(key, work.nodes[_U(at)], 0)) < chance
        chances[_U(at)] = 1.0 / chance if is_drawn else 0.0


@part
def thin(begin: int, end: int, met: int, layers: LayerDraws, inverse: Array, work: Work) -> Any:
    """Remove the nodes that were not drawn and their edges; return how many nodes are left."""
    moved, found = np.empty(met, np.int64), end
    for at in range(met):
        if at < end:
            moved[_U(at)] = at
        elif inverse[_U(at)] > 0.0:
            work.nodes[_U(found)] = work.nodes[_U(at)]
            moved[_U(at)] = found
            found += 1
    low = out = work.starts[_U(begin)]
    for row in range(begin, end):
        high, whole, kept, start = work.starts[_U(row + 1)], 0.0, 0.0, out
        for edge in range(low, high):
            value, column = _value(edge, row, begin, layers.values, work), _U(work.columns[_U(edge)])
            whole += value
            if inverse[column] > 0.0:
                work.positions[_U(out)] = work.positions[_U(edge)]
                work.columns[_U(out)] = moved[column]
                work.weights[_U(out)] = value * inverse[column]
                kept += value * inverse[column]
                out += 1
        work.starts[_U(row + 1)] = out
        if layers.normalize and kept > 0.0:
            for edge in range(start, out):
                work.weights[_U(edge)] *= whole / kept
        low = high
    return found


@part
def _place_again(count: int, start: int, work: Work, table: Table) -> None:
    """Enter the batch's nodes into a new table, by way of the free space in ``work.columns`` from ``start`` on."""
    for at in range(count):
        work.columns[_U(start + at)] = work.nodes[_U(at)]
    place(start, start + count, work, table, ZERO)


@compiled
def add_column_norms(csr: Csr, values: Array, norms: Array) -> bool:
    """Add each column's squared norm in these rows of A to ``norms``, float64; return False if the graph is damaged."""
    for row in range(len(csr.indptr) - 1):
        low, high = csr.indptr[row], csr.indptr[row + 1]
        if is_no_row(low, high, len(csr.indices)):
            return False
        for edge in range(low, high):
            value = np.float64(values[edge]) if len(values) else 1.0 / (high - low)
            column = _U(csr.indices[edge])
            if column >= _U(len(norms)):
                return False
            norms[column] += value * value
    return True
