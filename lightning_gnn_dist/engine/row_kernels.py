"""Compiled loops over rows of the graph: hops of what other ranks answer, reach, places of ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import BLOCK, REPEATED_SEED, ZERO, Array, Table, Work, is_no_row, place, slot_of

_U = np.uint64


@compiled
def reach(
    indptr: Array, indices: Array, seeds: Array, most_edges: int, found: Array, queue: Array, nodes: Array, edges: Array
) -> bool:
    """Find all nodes within some hops of the seeds. False if the graph is damaged.

    Args:
        indptr: The row starts of the graph.
        indices: The in-neighbours of its rows.
        seeds: Distinct nodes, int64.
        most_edges: Stop when edges into the nodes of all hops but the last are more.
        found: False for every node of the graph, and so again at the end.
        queue: Receives the nodes, hop after hop; as long as the graph has nodes.
        nodes: Receives how many nodes lie within 0, 1, 2 ... hops, one number more than there are hops.
        edges: Receives how many edges lead to nodes within 0, 1 ... hops, one number for each hop.
    """
    size, num_nodes, first, total, is_whole_graph = len(seeds), len(indptr) - 1, 0, 0, True
    for i in range(size):
        queue[_U(i)] = seeds[_U(i)]
        found[_U(seeds[_U(i)])] = True
    nodes[0] = size
    for hop in range(len(edges)):
        last = size
        for i in range(first, last):
            if total > most_edges or not is_whole_graph:
                break
            start, end = indptr[_U(queue[_U(i)])], indptr[_U(queue[_U(i)] + 1)]
            if is_no_row(start, end, len(indices)):
                is_whole_graph = False
                break
            total += end - start
            for edge in range(start, end):
                sender = np.int64(indices[_U(edge)])
                if _U(sender) >= _U(num_nodes):
                    is_whole_graph = False
                    break
                if not found[_U(sender)]:
                    found[_U(sender)] = True
                    queue[_U(size)] = sender
                    size += 1
        first, edges[hop], nodes[hop + 1] = last, total, size
    for i in range(size):
        found[_U(queue[_U(i)])] = False
    return is_whole_graph


@compiled
def put_rows(rows: Array, counts: Array, source: Array, starts: Array, out: Array) -> None:
    """Copy what lies row after row in ``source`` to the place of each of ``rows`` in ``out``.

    Args:
        rows: The rows, int64.
        counts: The length of each of them.
        source: Their entries.
        starts: Where every row begins in ``out``, int64.
        out: Receives the entries.
    """
    at = 0
    for i in range(len(rows)):
        start = starts[_U(rows[_U(i)])]
        for j in range(np.int64(counts[_U(i)])):
            out[_U(start + j)] = source[_U(at)]
            at += 1


@compiled
def find_places(ids: Array, among: Array, places: Array, number: int) -> None:
    """Set ``places`` of each of ``ids`` that is ``among`` others to its place there, or to a ``number`` other than -1.

    Both are increasing, int64; the places of others stay as they are.
    """
    at = 0
    for i in range(len(ids)):
        while at < len(among) and among[_U(at)] < ids[_U(i)]:
            at += 1
        if at < len(among) and among[_U(at)] == ids[_U(i)]:
            places[_U(i)] = at if number == -1 else number


@compiled
def merge_order(left: Array, right: Array, order: Array) -> None:
    """Write the order in which two increasing vectors of ids, one after the other, are increasing; int64."""
    at, other = 0, 0
    for i in range(len(order)):
        if other == len(right) or (at < len(left) and left[_U(at)] < right[_U(other)]):
            order[_U(i)] = at
            at += 1
        else:
            order[_U(i)] = len(left) + other
            other += 1


@compiled
def join_hop(known: Array, senders: Array, work: Work, table: Table) -> Any:
    """Find the nodes that a hop adds to a batch, as :func:`kernels.sample` does; return how many nodes it has then.

    Or return ``REPEATED_SEED``.

    Args:
        known: The batch's nodes, int64, which ``work.nodes`` begins with at the end.
        senders: The senders of the hop's edges. Their positions in ``work.nodes`` are left in ``work.columns``.
        work: Has room for the nodes that are known and the edges together.
        table: A table without valid entries.
    """
    found = _place_all(known, work, table, ZERO)
    if found != len(known):
        return np.int64(REPEATED_SEED)
    return _place_all(senders, work, table, found)


@part
def _place_all(ids: Array, work: Work, table: Table, found: Any) -> Any:
    for low in range(0, len(ids) + BLOCK, BLOCK):  # each block is prefetched before the one before it is placed
        for i in range(low, min(low + BLOCK, len(ids))):
            work.columns[_U(i)] = ids[_U(i)]
            prefetch(table.entries, slot_of(_U(ids[_U(i)]), table.shift))
        if low:
            found = place(low - BLOCK, min(low, len(ids)), work, table, found)
    return found
