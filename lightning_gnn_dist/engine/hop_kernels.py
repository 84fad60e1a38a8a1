"""The compiled loops of sampling neighbours: hops of a batch, in which nodes draw from their rows.

The edges of one type into one node are a piece of the node's row, for rows are in the order of types; where there is
one type, a piece is a row. Each piece is drawn from by itself.

What a graph lacks, types or weights, is None, which numba knows as it compiles: what needs them is not compiled then.
Only branches on an argument of the function itself are left out, so ``edge_type`` and ``weights`` are handed down.

Pieces are short, a few edges each, so what takes time is not the edges but the branches that no processor can predict:
how long a piece is, and whether it is taken whole. So both are computed without a branch: as many edges as are to be
drawn are taken from the front of every piece, some too many at once, which the next piece overwrites. The pieces that
are not taken whole are noted, and drawn from once the block is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import RUN, fill_run, prefetch
from lightning_gnn_dist.engine.kernels import (
    ALL_BITS,
    AT_ONCE,
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
    open_rows,
    place,
    place_seeds,
    prefetch_types,
    read_senders,
)
from lightning_gnn_dist.engine.weighted import Piece, Rule, Weights, aside_for, prefetch_weights

NOTES = 256  # pieces that may wait to be drawn from
ONE_TYPE = np.empty(0, np.uint8)  # the types of edges where rows are not divided
_U = np.uint64


class Draws(NamedTuple):
    """What is drawn of each edge type.

    Attributes:
        edge_type: The type of each edge of the graph; None if there is one type alone.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all, 0 none.
        keys: The key of each hop and edge type, uint64, shape (hops, types).
        rule: How the neighbours of one type are drawn.
    """

    edge_type: Array | None
    fanouts: Array
    keys: Array
    rule: Rule


@compiled
def sample(csr: Csr, seeds: Array, draws: Draws, work: Work, table: Table, num_nodes: Array, num_edges: Array) -> Any:
    """Sample one batch into ``work``; return how many seeds and edges it has.

    If ``work`` has room for fewer, the batch is not complete: the caller makes room and starts again.
    Or return ``REPEATED_SEED`` or ``DAMAGED``.

    Args:
        csr: The graph.
        seeds: The batch's first nodes, int64; ``work`` has room for them.
        draws: What is drawn.
        work: Receives the batch.
        table: A table without valid entries.
        num_nodes: Receives the new nodes per hop, the seeds first.
        num_edges: Receives the edges per hop.
    """
    begin, end = ZERO, place_seeds(seeds, work, table)
    if end != len(seeds):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(draws.fanouts)):
        found = expand(csr, begin, end, len(seeds), hop, draws, draws.edge_type, draws.rule.weights, work, table)
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
def expand(
    csr: Csr,
    begin: int,
    end: int,
    others: int,
    hop: int,
    draws: Draws,
    edge_type: Any,
    weights: Any,
    work: Work,
    table: Table,
) -> Any:
    """One hop, of which ``work`` must have room for the edges and ``others``; return the batch's nodes, or ``DAMAGED``.

    It has four stages, each a block of rows behind the one before. With too little room for all edges it counts them,
    and finds no more nodes.
    """
    if not open_rows(csr, begin, end, ALL_BITS, work):
        return np.int64(DAMAGED)
    found, blocks, room = end, (end - begin + BLOCK - 1) // BLOCK, len(work.positions) - others
    total = work.starts[_U(begin)]
    notes = np.empty((NOTES + draws.fanouts.shape[1], 4), np.int64)
    aside = None if weights is None else aside_for(weights, _longest(end - begin, work))
    for block in range(blocks + 3):
        low = begin + block * BLOCK
        if edge_type is not None:
            for i in range(low, min(low + BLOCK, end)):
                prefetch_types(edge_type, work.first[_U(i - begin)], work.degree[_U(i - begin)])
        low -= BLOCK
        if 1 <= block <= blocks:
            high, given = min(low + BLOCK, end), (edge_type, weights, work, notes, aside)
            total = _draw_rows(csr.indices, begin, low, high, total, room, hop, draws, *given)
            if total < 0:
                return np.int64(DAMAGED)
        if total > room:
            continue
        low -= BLOCK
        if 2 <= block <= blocks + 1:
            start, stop = work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))]
            if not read_senders(csr, start, stop, work, table):
                return np.int64(DAMAGED)
        low -= BLOCK
        if block >= 3:
            found = place(work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))], work, table, found)
    return found


@part
def _longest(rows: int, work: Work) -> Any:
    """The length of the frontier's longest row; a frontier may have no row."""
    longest = ZERO
    for i in range(rows):
        longest = max(longest, work.degree[_U(i)])
    return longest


@part
def _draw_rows(
    indices: Array,
    begin: int,
    low: int,
    high: int,
    total: int,
    room: int,
    hop: int,
    draws: Draws,
    edge_type: Array | None,
    weights: Weights | None,
    work: Work,
    notes: Array,
    aside: Any,
) -> Any:
    """Choose the edges of the frontier rows ``low`` to ``high``; return the batch's edges so far, or ``DAMAGED``."""
    num_types, rule, noted = draws.fanouts.shape[1], draws.rule, ZERO
    for i in range(low, high):
        first = work.first[_U(i - begin)]
        node: Any = np.int64(work.nodes[_U(i)])
        last = first + work.degree[_U(i - begin)]
        while first < last:
            kind, stop = ZERO, last
            if edge_type is not None:
                kind = np.int64(edge_type[_U(first)])
                stop = end_of_piece(edge_type, first, last)
            if _U(kind) >= _U(num_types):  # read as unsigned, a negative number is large
                return np.int64(DAMAGED)
            fanout, degree = draws.fanouts[_U(hop), _U(kind)], stop - first
            is_whole = (fanout < 0) | ((degree <= fanout) & (not rule.replace))
            count = degree if is_whole else fanout
            if total + count <= room:
                if edge_type is not None:
                    for edge in range(0, count, RUN):
                        fill_run(work.kinds, total + edge, kind)
                _take_first(indices, first, count, work.positions, total)
                notes[_U(noted), 0], notes[_U(noted), 1] = total, degree
                notes[_U(noted), 2], notes[_U(noted), 3] = node, kind
                noted += np.int64((not is_whole) & (fanout > 0))
                if weights is not None and len(weights.table) and not is_whole:
                    piece = Piece(first, degree, fanout, draws.keys[_U(hop), _U(kind)], node)
                    prefetch_weights(piece, rule.replace, weights)
            first, total = stop, total + count
        work.starts[_U(i + 1)] = total
        if noted >= NOTES:  # the next row may add one for each type
            noted = _draw_noted(indices, notes, noted, hop, draws, weights, aside, work.positions)
    _draw_noted(indices, notes, noted, hop, draws, weights, aside, work.positions)
    return total


@inlined
def _take_first(indices: Array, first: int, count: int, positions: Array, out: int) -> None:
    """Choose the first edges of a piece. What is written past them belongs to the next piece, or to nobody."""
    for edge in range(0, count, AT_ONCE):
        for i in range(AT_ONCE):
            positions[_U(out + edge + i)] = first + edge + i
        prefetch(indices, first + edge)
    prefetch(indices, first + count - 1)


@part
def _draw_noted(
    indices: Array, notes: Array, noted: int, hop: int, draws: Draws, weights: Any, aside: Any, positions: Array
) -> Any:
    """Draw from the pieces that were noted, whose first edge stands where their edges go; return 0."""
    for i in range(noted):
        out, degree, node, kind = notes[_U(i), 0], notes[_U(i), 1], notes[_U(i), 2], notes[_U(i), 3]
        fanout, key = draws.fanouts[_U(hop), _U(kind)], draws.keys[_U(hop), _U(kind)]
        piece = Piece(positions[_U(out)], degree, fanout, key, node)
        draw_row(indices, piece, draws.rule.replace, weights, aside, positions, out)
    return ZERO
