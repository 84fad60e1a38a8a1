"""The compiled loops of sampling per edge type.

The edges of one type into one node are a piece of the node's row, for rows are in the order of types. Each piece is
drawn from as if it were a row of a graph without types.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import (
    BLOCK,
    DAMAGED,
    REPEATED_SEED,
    ROWS_AHEAD,
    ZERO,
    Array,
    Rule,
    Table,
    Work,
    draw_row,
    is_no_row,
    is_whole,
    place,
    place_seeds,
    read_senders,
    take_row,
)
from lightning_gnn_dist.engine.weighted.draws import aside_for

NEAR = 16  # edges that are looked at one by one: in short rows that is faster than a search
_U = np.uint64
_ALL_BITS: Any = _U(2**64 - 1)  # a node's name is its id


class Draws(NamedTuple):
    """What is drawn of each edge type.

    Attributes:
        edge_type: The type of each edge of the graph; empty if there is one type alone.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all, 0 none.
        keys: The key of each hop and edge type, uint64, shape (hops, types).
        rule: How the neighbours of one type are drawn.
    """

    edge_type: Array
    fanouts: Array
    keys: Array
    rule: Rule


@compiled
def sample_typed(
    indptr: Array,
    indices: Array,
    seeds: Array,
    draws: Draws,
    kinds: Array,
    work: Work,
    table: Table,
    num_nodes: Array,
    num_edges: Array,
) -> Any:
    """Sample one batch into ``work``, and the types of its edges into ``kinds``; return as :func:`kernels.sample`."""
    begin, end = ZERO, place_seeds(seeds, work, table)
    if end != len(seeds):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(draws.fanouts)):
        if not open_rows(indptr, len(indices), begin, end, _ALL_BITS, work):
            return DAMAGED
        found = _expand(indices, len(indptr) - 1, len(seeds), begin, end, hop, draws, kinds, work, table)
        if found < 0:
            return DAMAGED
        total = work.starts[_U(end)]
        if len(seeds) + total > len(work.positions):
            return len(seeds) + total
        num_edges[hop] = total - work.starts[_U(begin)]
        num_nodes[hop + 1] = found - end
        begin, end = end, found
    return len(seeds) + work.starts[_U(begin)]


@part
def open_rows(indptr: Array, num_edges: int, begin: int, end: int, mask: np.uint64, work: Work) -> Any:
    """Find the rows of the frontier, whose nodes are these bits of their names; return whether all can be rows."""
    is_damaged: Any = False
    for i in range(begin, end):
        prefetch(indptr, _U(work.nodes[_U(min(i + ROWS_AHEAD, end - 1))]) & mask)
        node = _U(work.nodes[_U(i)]) & mask
        first, last = indptr[node], indptr[node + _U(1)]
        is_damaged |= is_no_row(first, last, num_edges)
        work.first[_U(i - begin)] = first
        work.degree[_U(i - begin)] = last - first
    return not is_damaged


@part
def _expand(
    indices: Array,
    nodes: int,
    num_seeds: int,
    begin: int,
    end: int,
    hop: int,
    draws: Draws,
    kinds: Array,
    work: Work,
    table: Table,
) -> Any:
    """One hop in four stages, each a block of rows behind the one before; return as :func:`kernels.expand` does.

    With too little room for all edges it counts them, and finds no more nodes.
    """
    found, blocks, total = end, (end - begin + BLOCK - 1) // BLOCK, work.starts[_U(begin)]
    for block in range(blocks + 3):
        low = begin + block * BLOCK
        for i in range(low, min(low + BLOCK, end)):
            prefetch(draws.edge_type, work.first[_U(i - begin)])
        low -= BLOCK
        if 1 <= block <= blocks:
            total = _draw_rows(indices, begin, low, min(low + BLOCK, end), total, num_seeds, hop, draws, kinds, work)
            if total < 0:
                return np.int64(DAMAGED)
        if num_seeds + total > len(work.positions):
            continue
        low -= BLOCK
        if 2 <= block <= blocks + 1:
            start, stop = work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))]
            if not read_senders(indices, nodes, start, stop, work, table):
                return np.int64(DAMAGED)
        low -= BLOCK
        if block >= 3:
            found = place(work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))], work, table, found)
    return found


@part
def _draw_rows(
    indices: Array,
    begin: int,
    low: int,
    high: int,
    total: int,
    num_seeds: int,
    hop: int,
    draws: Draws,
    kinds: Array,
    work: Work,
) -> Any:
    """Choose the edges of the frontier rows ``low`` to ``high``; return the batch's edges so far, or ``DAMAGED``."""
    num_types, room = draws.fanouts.shape[1], len(work.positions) - num_seeds
    aside = aside_for(draws.rule.weights, ZERO)  # edges of types have no weights
    for i in range(low, high):
        first, node = work.first[_U(i - begin)], work.nodes[_U(i)]
        last = first + work.degree[_U(i - begin)]
        while first < last:
            kind, stop = ZERO, last
            if len(draws.edge_type):
                kind = np.int64(draws.edge_type[_U(first)])
                stop = end_of_piece(draws.edge_type, first, last)
            if _U(kind) >= _U(num_types):  # read as unsigned, a negative number is large
                return np.int64(DAMAGED)
            fanout, degree = draws.fanouts[_U(hop), _U(kind)], stop - first
            takes_all = is_whole(degree, fanout, draws.rule.replace)
            out, total = total, total + (degree if takes_all else fanout)
            if total <= room:
                for edge in range(out, total):
                    kinds[_U(edge)] = kind
                if takes_all:
                    take_row(indices, first, degree, work.positions, out)
                else:
                    key = draws.keys[_U(hop), _U(kind)]
                    draw_row(indices, first, degree, fanout, key, node, draws.rule, aside, work.positions, out)
            first = stop
        work.starts[_U(i + 1)] = total
    return total


@inlined
def end_of_piece(edge_type: Array, first: int, last: int) -> Any:
    """Where the edges of the type of edge ``first`` end in a row that ends at ``last``: past ``first`` in any case."""
    kind = edge_type[_U(first)]
    low, near = first + 1, min(first + NEAR, last)
    while low < near and edge_type[_U(low)] == kind:
        low += 1
    if low < near or near == last:
        return low
    high = last
    while low < high:
        middle = (low + high) // 2
        if edge_type[_U(middle)] == kind:
            low = middle + 1
        else:
            high = middle
    return low
