"""Sampling by time in a graph that this host has: a tree for each seed, in one loop, faster than :mod:`row_draws`.

What a node may receive depends on the time of the seed that it is reached from, so a node is in the batch once for each
tree that it is in. It is called ``tree << bits | node`` here, and the table of a batch tells such names apart as it
tells nodes. The edges of a type into a node are in order of time, so those that a seed may see are next to each other:
two binary searches find them, and they are drawn from as if they were a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import (
    BLOCK,
    DAMAGED,
    REPEATED_SEED,
    ZERO,
    Array,
    Csr,
    Table,
    Work,
    draw_row,
    end_of_piece,
    is_whole,
    open_rows,
    place,
    place_seeds,
    prefetch_types,
    slot_of,
    take_row,
)
from lightning_gnn_dist.engine.rng import draw
from lightning_gnn_dist.engine.weighted import Piece
from lightning_gnn_dist.extensions.temporal.row_draws import first_later
from lightning_gnn_dist.extensions.temporal.times import TimeOrder

_U = np.uint64


class Trees(NamedTuple):
    """The roots of the trees.

    Attributes:
        seeds: Their ids, int64.
        upto: Each tree sees events no later than this, int64.
        bits: How many bits of a name are the node's id.
    """

    seeds: Array
    upto: Array
    bits: int


class TimedDraws(NamedTuple):
    """What is drawn of each edge type.

    Attributes:
        edge_type: The type of each edge of the graph; empty if there is one type alone.
        order: The edges by time.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all, 0 none.
        keys: The key of each hop and edge type, uint64, shape (hops, types).
        latest: Whether the latest ones are taken, instead of any.
    """

    edge_type: Array
    order: TimeOrder
    fanouts: Array
    keys: Array
    latest: bool


@compiled
def sample_trees(
    csr: Csr,
    roots: Array,
    trees: Trees,
    draws: TimedDraws,
    work: Work,
    table: Table,
    num_nodes: Array,
    num_edges: Array,
) -> Any:
    """Sample one batch into ``work``, by the names of nodes; ``roots`` are those of the seeds.

    Return as :func:`kernels.sample` does.
    """
    begin, end = ZERO, place_seeds(roots, work, table)
    mask = (_U(1) << _U(trees.bits)) - _U(1)
    if end != len(roots):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(draws.fanouts)):
        if not open_rows(csr, begin, end, mask, work):
            return DAMAGED
        found = _expand(csr, begin, end, hop, trees, draws, work, table)
        if found < 0:
            return DAMAGED
        total = work.starts[_U(end)]
        if len(roots) + total > len(work.positions):
            return len(roots) + total
        num_edges[hop] = total - work.starts[_U(begin)]
        num_nodes[hop + 1] = found - end
        begin, end = end, found
    return len(roots) + work.starts[_U(begin)]


@part
def _expand(csr: Csr, begin: int, end: int, hop: int, trees: Trees, draws: TimedDraws, work: Work, table: Table) -> Any:
    """One hop in five stages, each a block of rows behind the one before; return as :func:`kernels.expand` does.

    With too little room for all edges it counts them, and finds no more nodes.
    """
    found, blocks, total = end, (end - begin + BLOCK - 1) // BLOCK, work.starts[_U(begin)]
    for block in range(blocks + 4):
        low = begin + block * BLOCK
        for i in range(low, min(low + BLOCK, end)):
            first, degree = work.first[_U(i - begin)], work.degree[_U(i - begin)]
            prefetch_types(draws.edge_type, first, degree)
            prefetch(draws.order.times, first)
            prefetch(draws.order.times, first + degree // 2)
        low -= BLOCK
        if 1 <= block <= blocks:
            total = _draw_rows(begin, low, min(low + BLOCK, end), total, hop, trees, draws, work)
            if total < 0:
                return np.int64(DAMAGED)
        if len(trees.seeds) + total > len(work.positions):
            continue
        low -= BLOCK
        is_right: Any = True
        if 2 <= block <= blocks + 1:
            is_right = _find_edges(csr.indices, begin, low, min(low + BLOCK, end), draws.order.places, work)
        low -= BLOCK
        if is_right and 3 <= block <= blocks + 2:
            is_right = _read_senders(csr, low, min(low + BLOCK, end), trees.bits, work, table)
        if not is_right:
            return np.int64(DAMAGED)
        low -= BLOCK
        if block >= 4:
            found = place(work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))], work, table, found)
    return found


@part
def _draw_rows(
    begin: int, low: int, high: int, total: int, hop: int, trees: Trees, draws: TimedDraws, work: Work
) -> Any:
    """Choose the edges of the frontier rows ``low`` to ``high``, by their places in the order of time.

    Return the batch's edges so far, or ``DAMAGED``.
    """
    num_types, room = draws.fanouts.shape[1], len(work.positions) - len(trees.seeds)
    for i in range(low, high):
        first, tree = work.first[_U(i - begin)], _U(work.nodes[_U(i)]) >> _U(trees.bits)
        node: Any = _U(work.nodes[_U(i)]) ^ (tree << _U(trees.bits))
        last = first + work.degree[_U(i - begin)]
        while first < last:
            kind, stop = ZERO, last
            if len(draws.edge_type):
                kind = np.int64(draws.edge_type[_U(first)])
                stop = end_of_piece(draws.edge_type, first, last)
            if _U(kind) >= _U(num_types):  # read as unsigned, a negative number is large
                return np.int64(DAMAGED)
            end = stop
            if draws.order.has_time[_U(kind)]:  # a function of its own would take a fifth longer
                end = first_later(draws.order.times, first, stop, trees.upto[tree])
            fanout, degree = draws.fanouts[_U(hop), _U(kind)], end - first
            takes_all = is_whole(degree, fanout, False)
            out, total = total, total + (degree if takes_all else fanout)
            if total <= room:
                if takes_all or draws.latest:
                    take_row(draws.order.places, end - total + out, total - out, work.positions, out)
                else:  # what a tree draws does not depend on the other trees of its batch
                    places, key = draws.order.places, draw(draws.keys[_U(hop), _U(kind)], trees.seeds[tree], 0)
                    piece = Piece(first, degree, fanout, key, node)
                    draw_row(places, piece, False, None, None, work.positions, out)  # times, so no weights
            first = stop
        work.starts[_U(i + 1)] = total
    return total


@part
def _find_edges(indices: Array, begin: int, low: int, high: int, places: Array, work: Work) -> Any:
    """Turn places in the order of time into positions of edges; return whether they are in their rows."""
    is_damaged: Any = False
    for i in range(low, high):
        first, degree = work.first[_U(i - begin)], work.degree[_U(i - begin)]
        for edge in range(work.starts[_U(i)], work.starts[_U(i + 1)]):
            if len(places):
                within = places[_U(work.positions[_U(edge)])]
                is_damaged |= _U(within) >= _U(degree)
                work.positions[_U(edge)] = first + within
            prefetch(indices, work.positions[_U(edge)])
    return not is_damaged


@part
def _read_senders(csr: Csr, low: int, high: int, bits: int, work: Work, table: Table) -> Any:
    """Name the senders of the edges of some rows; return whether all are nodes of the graph."""
    is_damaged: Any = False
    for i in range(low, high):
        tree = _U(work.nodes[_U(i)]) >> _U(bits) << _U(bits)
        for edge in range(work.starts[_U(i)], work.starts[_U(i + 1)]):
            source = _U(csr.indices[_U(work.positions[_U(edge)])])
            is_damaged |= source >= _U(len(csr.indptr) - 1)  # read as unsigned, a negative id is large
            name = tree | source
            work.columns[_U(edge)] = name
            prefetch(table.entries, slot_of(name, table.shift))
    return not is_damaged
