"""The compiled loops of sampling: fused draw, gather and deduplication.

One hop reads three arrays at random: a row's start in ``indptr``, its neighbours in ``indices``, and the table of
the nodes that are already in the batch. None of them fits a cache, so the loops walk the frontier in blocks of
``BLOCK`` rows, and every place is prefetched one block before it is read.

Kernels check what they read from the graph, row by row and sender by sender: an array, or a file under its map, may be
changed after the graph was checked, and a loop that follows a wrong number ends the process. That takes 0 to 2% of a
batch's time. Their Python callers check all else. Kernels hold no lock, and threads share none of their arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.rng import below, draw
from lightning_gnn_dist.engine.weighted.draws import (
    Aside,
    Weights,
    aside_for,
    draw_by_weight,
    prefetch_weights,
)

Array = npt.NDArray[Any]

BLOCK = 64  # frontier rows per stage: 32 to 128 take the same time
ROWS_AHEAD = 48  # reads of indptr in flight
LINE = 64  # bytes of a cache line
AT_ONCE = 8  # positions that may be written together: ``Work.positions`` has memory for so many past its end
REPEATED_SEED = -1  # a kernel returns this if a seed was given twice
DAMAGED = -2  # and this if a row or a sender lies outside the graph

# numba compiles a function once more for every literal that it is given.
ZERO: Any = np.int64(0)
ALL: Any = np.int64(-1)  # neighbours of a node
_U = np.uint64  # with indices of this type, numba leaves out the test for negative ones
_HASH = _U(0x9E3779B97F4A7C15)


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
    """

    nodes: Array
    starts: Array
    positions: Array
    columns: Array
    first: Array
    degree: Array
    weights: Array


class Rule(NamedTuple):
    """How a row's edges are drawn.

    Attributes:
        weights: How likely each edge of the graph is.
        replace: Whether an edge may be drawn more than once.
    """

    weights: Weights
    replace: bool


@compiled
def sample(
    indptr: Array,
    indices: Array,
    seeds: Array,
    fanouts: Array,
    keys: Array,
    rule: Rule,
    work: Work,
    table: Table,
    num_nodes: Array,
    num_edges: Array,
) -> Any:
    """Sample one batch into ``work``; return how many seeds and edges it has.

    If ``work`` has room for fewer, the batch is not complete: the caller makes room and starts again.
    Or return ``REPEATED_SEED`` or ``DAMAGED``.

    Args:
        indptr: The graph's row starts, int64.
        indices: The graph's in-neighbours, int32 or int64.
        seeds: The batch's first nodes, int64; ``work`` has room for them.
        fanouts: Neighbours to draw per hop, int64; -1 takes all.
        keys: The key of each hop, uint64.
        rule: How neighbours are drawn.
        work: Receives the batch.
        table: A table without valid entries.
        num_nodes: Receives the new nodes per hop, the seeds first.
        num_edges: Receives the edges per hop.
    """
    begin, end = ZERO, place_seeds(seeds, work, table)
    if end != len(seeds):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(fanouts)):
        total = open_rows(indptr, len(indices), begin, end, fanouts[hop], rule.replace, work)
        if total < 0:
            return DAMAGED
        if len(seeds) + total > len(work.positions):
            return len(seeds) + total
        found = expand(indices, len(indptr) - 1, begin, end, fanouts[hop], keys[hop], rule, work, table)
        if found < 0:
            return DAMAGED
        num_edges[hop] = total - work.starts[begin]
        num_nodes[hop + 1] = found - end
        begin, end = end, found
    return len(seeds) + work.starts[begin]


@part
def place_seeds(seeds: Array, work: Work, table: Table) -> Any:
    """Begin a batch; return how many distinct seeds there are."""
    work.starts[0] = 0
    for i in range(len(seeds)):  # as a slice this line would take longer to compile than all others
        work.columns[_U(i)] = seeds[_U(i)]
    return place(ZERO, len(seeds), work, table, ZERO)


@part
def open_rows(indptr: Array, num_edges: int, begin: int, end: int, fanout: int, replace: bool, work: Work) -> Any:
    """Find the frontier's rows and where their edges go; return the batch's edges including these, or ``DAMAGED``."""
    total, is_damaged = work.starts[_U(begin)], False
    for i in range(begin, end):
        prefetch(indptr, work.nodes[_U(min(i + ROWS_AHEAD, end - 1))])
        node = _U(work.nodes[_U(i)])
        first, last = indptr[node], indptr[node + _U(1)]
        degree = last - first
        is_damaged |= is_no_row(first, last, num_edges)
        work.first[_U(i - begin)] = first
        work.degree[_U(i - begin)] = degree
        if not is_whole(degree, fanout, replace):
            degree = fanout
        total += degree
        work.starts[_U(i + 1)] = total
    return np.int64(DAMAGED) if is_damaged else total


@inlined
def is_no_row(first: int, last: int, num_edges: int) -> bool:
    """Whether a row cannot be one: it ends before it begins, or lies outside the edges."""
    return (first < 0) | (last < first) | (last > num_edges)


@inlined
def is_whole(degree: int, fanout: int, replace: bool) -> bool:
    """Whether all edges of a row are taken."""
    return fanout < 0 or degree == 0 or (degree <= fanout and not replace)


@part
def expand(
    indices: Array, nodes: int, begin: int, end: int, fanout: int, key: np.uint64, rule: Rule, work: Work, table: Table
) -> Any:
    """One hop in three stages, each a block behind the one before; return the batch's nodes so far, or ``DAMAGED``."""
    found = end
    aside = aside_for(rule.weights, _longest(end - begin, work))
    blocks = (end - begin + BLOCK - 1) // BLOCK
    for block in range(blocks + 2):
        low = begin + block * BLOCK
        if block < blocks:
            for i in range(low + BLOCK, min(low + 2 * BLOCK, end) if len(rule.weights.table) else 0):
                prefetch_row(
                    rule, work.first[_U(i - begin)], work.degree[_U(i - begin)], fanout, key, work.nodes[_U(i)]
                )
            _draw_rows(indices, begin, low, min(low + BLOCK, end), fanout, key, rule, aside, work)
        if 1 <= block <= blocks:
            is_right = read_senders(indices, nodes, work.starts[low - BLOCK], work.starts[min(low, end)], work, table)
            if not is_right:
                return np.int64(DAMAGED)
        if block >= 2:
            low -= 2 * BLOCK
            found = place(work.starts[low], work.starts[min(low + BLOCK, end)], work, table, found)
    return found


@part
def _longest(rows: int, work: Work) -> Any:
    """The length of the frontier's longest row; a frontier may have no row."""
    longest = ZERO
    for i in range(rows):
        longest = max(longest, work.degree[_U(i)])
    return longest


@inlined
def prefetch_row(rule: Rule, first: int, degree: int, fanout: int, key: np.uint64, node: int) -> None:
    """Ask for what draws by weight from a row will read."""
    if not is_whole(degree, fanout, rule.replace):
        prefetch_weights(rule.weights, first, degree, fanout, rule.replace, key, node)


@part
def _draw_rows(
    indices: Array,
    begin: int,
    low: int,
    high: int,
    fanout: int,
    key: np.uint64,
    rule: Rule,
    aside: Aside,
    work: Work,
) -> None:
    """Choose the edges of the frontier rows ``low`` to ``high``."""
    for i in range(low, high):
        out, first, degree = work.starts[_U(i)], work.first[_U(i - begin)], work.degree[_U(i - begin)]
        node = work.nodes[_U(i)]
        if is_whole(degree, fanout, rule.replace):
            take_row(indices, first, degree, work.positions, out)
        else:
            draw_row(indices, first, degree, fanout, key, node, rule, aside, work.positions, out)


@inlined
def take_row(indices: Array, first: int, degree: int, positions: Array, out: int) -> None:
    """Choose all edges of a row."""
    for edge in range(degree):
        positions[_U(out + edge)] = first + edge
    for edge in range(0, degree, LINE // 8):
        prefetch(indices, first + edge)


@inlined
def draw_row(
    indices: Array,
    first: int,
    degree: int,
    fanout: int,
    key: np.uint64,
    node: int,
    rule: Rule,
    aside: Aside,
    positions: Array,
    out: int,
) -> None:
    """Choose ``fanout`` edges of a row that is not taken whole."""
    if len(rule.weights.values) == 0:
        if rule.replace:
            _draw_any(indices, first, degree, fanout, key, node, positions, out)
        else:
            _draw_distinct(indices, first, degree, fanout, key, node, positions, out)
    else:
        draw_by_weight(indices, rule.weights, first, degree, fanout, rule.replace, key, node, aside, positions, out)


@inlined
def _draw_distinct(
    indices: Array, first: int, degree: int, fanout: int, key: np.uint64, node: int, positions: Array, out: int
) -> None:
    """Floyd's algorithm (Bentley and Floyd, CACM 1987): ``fanout`` of ``degree`` edges, none twice.

    It reads none of the edges. Looking for repetitions takes time quadratic in ``fanout``, but up to some hundred
    neighbours that is cheaper than a set, because the comparisons run side by side.
    """
    for i in range(fanout):
        last = degree - fanout + i
        chosen = first + below(draw(key, node, i), last + 1)
        is_taken = False
        for j in range(i):
            is_taken |= positions[_U(out + j)] == chosen
        chosen = first + last if is_taken else chosen
        positions[_U(out + i)] = chosen
        prefetch(indices, chosen)


@inlined
def _draw_any(
    indices: Array, first: int, degree: int, fanout: int, key: np.uint64, node: int, positions: Array, out: int
) -> None:
    """Draw ``fanout`` of ``degree`` edges with replacement."""
    for i in range(fanout):
        chosen = first + below(draw(key, node, i), degree)
        positions[_U(out + i)] = chosen
        prefetch(indices, chosen)


@part
def read_senders(indices: Array, num_nodes: int, low: int, high: int, work: Work, table: Table) -> Any:
    """Fetch the senders of the edges ``low`` to ``high``; return whether all are nodes of the graph."""
    is_damaged: Any = False
    for edge in range(low, high):
        source = indices[_U(work.positions[_U(edge)])]
        work.columns[_U(edge)] = source
        is_damaged |= _U(source) >= _U(num_nodes)  # read as unsigned, a negative id is large
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
