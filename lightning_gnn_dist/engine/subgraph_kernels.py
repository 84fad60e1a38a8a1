"""Compiled loops that find nodes: all edges between two of some, and all within some hops."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import (
    DAMAGED,
    REPEATED_SEED,
    ZERO,
    Array,
    Csr,
    Table,
    Work,
    is_no_row,
    place,
    place_seeds,
    slot_of,
)

_U = np.uint64


@compiled
def sample_induced(
    csr: Csr, seeds: Array, others: Array, work: Work, table: Table, num_nodes: Array, num_edges: Array
) -> Any:
    """Sample the seeds, ``others`` (ids may repeat) and all edges among them; return as :func:`kernels.sample`."""
    needed = len(seeds) + len(others)
    if needed > len(work.positions):
        return needed
    count = place_seeds(seeds, work, table)
    if count != len(seeds):
        return REPEATED_SEED
    for i in range(len(others)):
        work.columns[_U(i)] = others[_U(i)]
    count = place(ZERO, len(others), work, table, count)
    needed = induce(csr, count, work, table)
    if 0 <= needed <= len(work.positions):
        _count_hops(len(seeds), count, work, num_nodes, num_edges)
    return needed


@part
def induce(csr: Csr, count: int, work: Work, table: Table) -> Any:
    """Find the edges among the first ``count`` nodes; return how many, even if ``work`` has room for fewer."""
    out, room, num_nodes, is_damaged = 0, len(work.positions), _U(len(csr.indptr) - 1), False
    work.starts[0] = 0
    for row in range(count):
        node = _U(work.nodes[_U(row)])
        first, last = csr.indptr[node], csr.indptr[node + _U(1)]
        if is_no_row(first, last, len(csr.indices)):
            return DAMAGED
        for edge in range(first, last):
            sender = _U(csr.indices[_U(edge)])
            is_node = sender < num_nodes
            is_damaged |= not is_node
            at = _find(sender * _U(is_node), work, table)  # a branch here would take a fifth longer
            if at >= 0:
                if out < room:
                    work.positions[_U(out)] = edge
                    work.columns[_U(out)] = at
                out += 1
        work.starts[_U(row + 1)] = out
    return DAMAGED if is_damaged else out


@part
def _find(node: np.uint64, work: Work, table: Table) -> Any:
    """The position of a node in the batch, or -1."""
    epoch, mask = _U(table.epoch), _U(len(table.entries) - 1)
    slot = slot_of(node, table.shift)
    entry = _U(table.entries[slot])
    if table.shift:
        while entry >= epoch and _U(work.nodes[entry - epoch]) != node:
            slot = (slot + _U(1)) & mask
            entry = _U(table.entries[slot])
    return np.int64(entry - epoch) if entry >= epoch else np.int64(-1)


@part
def _count_hops(seeds: int, count: int, work: Work, num_nodes: Array, num_edges: Array) -> None:
    """Report all other nodes as found at hop 1, and their edges as those of the second hop."""
    num_nodes[0], num_nodes[1] = seeds, count - seeds
    num_edges[0] = work.starts[_U(seeds)]
    num_edges[1] = work.starts[_U(count)] - work.starts[_U(seeds)]


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
