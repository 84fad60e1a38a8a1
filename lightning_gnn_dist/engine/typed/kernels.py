"""The compiled loops of sampling per edge type.

The edges of one type into one node are a piece of the node's row, for rows are in the order of types. Each piece is
drawn from as if it were a row of a graph without types.

Pieces are short, a few edges each, so what takes time is not the edges but the branches that no processor can predict:
how long a piece is, and whether it is taken whole. So both are computed without a branch: as many edges as are to be
drawn are taken from the front of every piece, some too many at once, which the next piece overwrites. The pieces that
are not taken whole are noted, and drawn from once the block is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import RUN, fill_run, prefetch, run_length
from lightning_gnn_dist.engine.kernels import (
    AT_ONCE,
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
    place,
    place_seeds,
    read_senders,
)
from lightning_gnn_dist.engine.weighted.draws import aside_for

NOTES = 256  # pieces that may wait to be drawn from
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
    notes = np.empty((NOTES + draws.fanouts.shape[1], 3), np.int64)
    for block in range(blocks + 3):
        low = begin + block * BLOCK
        for i in range(low, min(low + BLOCK, end)):
            prefetch_types(draws.edge_type, work.first[_U(i - begin)], work.degree[_U(i - begin)])
        low -= BLOCK
        if 1 <= block <= blocks:
            high = min(low + BLOCK, end)
            total = _draw_rows(indices, begin, low, high, total, num_seeds, hop, draws, kinds, work, notes)
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
    notes: Array,
) -> Any:
    """Choose the edges of the frontier rows ``low`` to ``high``; return the batch's edges so far, or ``DAMAGED``."""
    num_types, room, noted = draws.fanouts.shape[1], len(work.positions) - num_seeds, ZERO
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
            is_whole = (fanout < 0) | ((degree <= fanout) & (not draws.rule.replace))
            count = degree if is_whole else fanout
            if total + count <= room:
                _take_first(indices, first, count, kind, kinds, work.positions, total)
                notes[_U(noted), 0], notes[_U(noted), 1], notes[_U(noted), 2] = total, degree, node
                noted += np.int64((not is_whole) & (fanout > 0))
            first, total = stop, total + count
        work.starts[_U(i + 1)] = total
        if noted >= NOTES:  # the next row may add one for each type
            noted = _draw_noted(indices, notes, noted, hop, draws, kinds, work.positions)
    _draw_noted(indices, notes, noted, hop, draws, kinds, work.positions)
    return total


@inlined
def _take_first(indices: Array, first: int, count: int, kind: int, kinds: Array, positions: Array, out: int) -> None:
    """Choose the first edges of a piece. What is written past them belongs to the next piece, or to nobody."""
    for edge in range(0, count, RUN):
        fill_run(kinds, out + edge, kind)
    for edge in range(0, count, AT_ONCE):
        for i in range(AT_ONCE):
            positions[_U(out + edge + i)] = first + edge + i
        prefetch(indices, first + edge)
    prefetch(indices, first + count - 1)


@part
def _draw_noted(
    indices: Array, notes: Array, noted: int, hop: int, draws: Draws, kinds: Array, positions: Array
) -> Any:
    """Draw from the pieces that were noted, whose first edge and type stand where their edges go; return 0."""
    aside = aside_for(draws.rule.weights, ZERO)  # edges of types have no weights
    for i in range(noted):
        out, degree, node = notes[_U(i), 0], notes[_U(i), 1], notes[_U(i), 2]
        first, kind = positions[_U(out)], kinds[_U(out)]
        fanout, key = draws.fanouts[_U(hop), _U(kind)], draws.keys[_U(hop), _U(kind)]
        draw_row(indices, first, degree, fanout, key, node, draws.rule, aside, positions, out)
    return ZERO


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
