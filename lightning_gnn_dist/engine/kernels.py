"""The compiled loops of sampling: fused draw, gather and deduplication.

One hop reads three arrays at random: a row's start in ``indptr``, its neighbours in ``indices``, and the table of
the nodes that are already in the batch. None of them fits a cache, so the loops walk the frontier in blocks of
``BLOCK`` rows, and every place is prefetched one block before it is read.

Kernels check what they read from the graph, row by row and sender by sender: an array, or a file under its map, may be
changed after the graph was checked, and a loop that follows a wrong number ends the process. That takes 0 to 2% of a
batch's time. Their Python callers check all else. Kernels hold no lock, and threads share none of their arrays.

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
import numpy.typing as npt

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import LINE, RUN, fill_run, prefetch, run_length
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.engine.weighted import Piece, Rule, Weights, aside_for, draw_by_weight, prefetch_weights

Array = npt.NDArray[Any]

BLOCK = 64  # frontier rows per stage: 32 to 128 take the same time
ROWS_AHEAD = 48  # reads of indptr in flight
AT_ONCE = 8  # positions that may be written together: ``Work.positions`` has memory for so many past its end
REPEATED_SEED = -1  # a kernel returns this if a seed was given twice
DAMAGED = -2  # and this if a row or a sender lies outside the graph

# numba compiles a function once more for every literal that it is given.
ZERO: Any = np.int64(0)
ALL_BITS: Any = np.uint64(2**64 - 1)  # of a node's name, where this is its id
_U = np.uint64  # with indices of this type, numba leaves out the test for negative ones
_HASH = _U(0x9E3779B97F4A7C15)
NOTES = 256  # pieces that may wait to be drawn from
ONE_TYPE = np.empty(0, np.uint8)  # the types of edges where rows are not divided


class Csr(NamedTuple):
    """The edges of a graph, or of a shard.

    Attributes:
        indptr: Where each row starts, int64.
        indices: The in-neighbours, row after row, int32 or int64.
    """

    indptr: Array
    indices: Array


class Table(NamedTuple):
    """The position of each node in the batch: a hash table with open addressing, or a slot for every node.

    Attributes:
        entries: ``epoch`` plus the position of the node in the batch, uint32.
        shift: 64 minus the bits of a slot's number, or 0 when the slot of a node is its id.
        epoch: Entries below this number are of earlier batches: the slot is free.
    """

    entries: Array
    shift: int
    epoch: int


class Work(NamedTuple):
    """The arrays that one batch is sampled into.

    Attributes:
        nodes: The batch's nodes in the order in which they were found.
        starts: Where each expanded node's edges start in ``positions`` and ``columns``, int64.
        positions: Each edge's position in the graph's ``indices``, int64.
        columns: Each edge's sender, at first its id, in the end its position in ``nodes``.
        first: Where the row of each frontier node starts in the graph's ``indices``, int64.
        degree: The length of that row, int64.
        weights: Each edge's weight, float32, if the kernel gives edges weights.
        kinds: Each edge's type, as the graph numbers them, where the kernel draws from several.
    """

    nodes: Array
    starts: Array
    positions: Array
    columns: Array
    first: Array
    degree: Array
    weights: Array
    kinds: Array


@part
def place_seeds(seeds: Array, work: Work, table: Table) -> Any:
    """Begin a batch; return how many distinct seeds there are."""
    work.starts[0] = 0
    for i in range(len(seeds)):  # as a slice this line would take longer to compile than all others
        work.columns[_U(i)] = seeds[_U(i)]
    return place(ZERO, len(seeds), work, table, ZERO)


@part
def open_rows(csr: Csr, begin: int, end: int, mask: np.uint64, work: Work) -> Any:
    """Find the rows of the frontier, whose nodes are these bits of their names; return whether all can be rows."""
    is_damaged: Any = False
    for i in range(begin, end):
        prefetch(csr.indptr, _U(work.nodes[_U(min(i + ROWS_AHEAD, end - 1))]) & mask)
        node = _U(work.nodes[_U(i)]) & mask
        first, last = csr.indptr[node], csr.indptr[node + _U(1)]
        is_damaged |= is_no_row(first, last, len(csr.indices))
        work.first[_U(i - begin)] = first
        work.degree[_U(i - begin)] = last - first
    return not is_damaged


@inlined
def is_no_row(first: int, last: int, num_edges: int) -> bool:
    """Whether a row cannot be one: it ends before it begins, or lies outside the edges."""
    return (first < 0) | (last < first) | (last > num_edges)


@inlined
def is_whole(degree: int, fanout: int, replace: bool) -> bool:
    """Whether all edges of a row are taken."""
    return fanout < 0 or degree == 0 or (degree <= fanout and not replace)


@inlined
def take_row(indices: Array, first: int, degree: int, positions: Array, out: int) -> None:
    """Choose all edges of a row."""
    for edge in range(degree):
        positions[_U(out + edge)] = first + edge
    for edge in range(0, degree, LINE // 8):
        prefetch(indices, first + edge)


@inlined
def draw_row(indices: Array, piece: Piece, replace: bool, weights: Any, aside: Any, positions: Array, out: int) -> None:
    """Choose ``piece.fanout`` edges of a row that is not taken whole."""
    if weights is None:
        if replace:
            _draw_any(indices, piece, positions, out)
        else:
            _draw_distinct(indices, piece, positions, out)
    else:
        draw_by_weight(indices, piece, replace, weights, aside, positions, out)


@inlined
def _draw_distinct(indices: Array, piece: Piece, positions: Array, out: int) -> None:
    """Floyd's algorithm (Bentley and Floyd, CACM 1987): ``fanout`` of ``degree`` edges, none twice.

    It reads none of the edges. Looking for repetitions takes time quadratic in ``fanout``, but up to some hundred
    neighbours that is cheaper than a set, because the comparisons run side by side.
    """
    for i in range(piece.fanout):
        last = piece.degree - piece.fanout + i
        chosen = piece.first + below(draw(piece.key, piece.node, i), last + 1)
        is_taken = False
        for j in range(i):
            is_taken |= positions[_U(out + j)] == chosen
        chosen = piece.first + last if is_taken else chosen
        positions[_U(out + i)] = chosen
        prefetch(indices, chosen)


@inlined
def _draw_any(indices: Array, piece: Piece, positions: Array, out: int) -> None:
    """Draw ``fanout`` of ``degree`` edges with replacement."""
    for i in range(piece.fanout):
        chosen = piece.first + below(draw(piece.key, piece.node, i), piece.degree)
        positions[_U(out + i)] = chosen
        prefetch(indices, chosen)


@part
def read_senders(csr: Csr, low: int, high: int, work: Work, table: Table) -> Any:
    """Fetch the senders of the edges ``low`` to ``high``; return whether all are nodes of the graph."""
    is_damaged: Any = False
    for edge in range(low, high):
        source = csr.indices[_U(work.positions[_U(edge)])]
        work.columns[_U(edge)] = source
        is_damaged |= _U(source) >= _U(len(csr.indptr) - 1)  # read as unsigned, a negative id is large
        prefetch(table.entries, slot_of(_U(source), table.shift))
    return not is_damaged


@inlined
def slot_of(node: np.uint64, shift: int) -> np.uint64:
    return (node * (_HASH if shift else _U(1))) >> _U(shift)


@part
def place(low: int, high: int, work: Work, table: Table, found: Any) -> Any:
    """Turn the senders of the edges ``low`` to ``high`` into positions in ``nodes``; append new nodes, and return
    the number of nodes.

    No processor can predict whether a node is new, so the common path has no branch: a known node's entry is written
    again, and its append is undone by not counting it.
    """
    epoch, mask = _U(table.epoch), _U(len(table.entries) - 1)
    for edge in range(low, high):
        node = _U(work.columns[_U(edge)])
        slot = slot_of(node, table.shift)
        at = _U(table.entries[slot]) - epoch
        is_new = at >> _U(63)  # the difference wrapped, as the entry is below the epoch
        if table.shift:  # otherwise only the node itself uses its slot
            while (is_new - _U(1)) & (_U(work.nodes[at & (is_new - _U(1))]) ^ node):
                slot = (slot + _U(1)) & mask
                at = _U(table.entries[slot]) - epoch
                is_new = at >> _U(63)
        is_old = is_new - _U(1)  # all bits
        at = (at & is_old) | (_U(found) & ~is_old)
        table.entries[slot] = at + epoch
        work.nodes[_U(found)] = node
        work.columns[_U(edge)] = at
        found += np.int64(is_new)
    return found


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
