"""The compiled loops of subgraph sampling: find the nodes, then keep every edge between two of them."""

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
    Draws,
    Table,
    Work,
    expand,
    is_no_row,
    place,
    place_seeds,
    slot_of,
)
from lightning_gnn_dist.engine.rng import below, draw

_U = np.uint64


@compiled
def walk(csr: Csr, seeds: Array, key: np.uint64, length: int, out: Array) -> bool:
    """Walk ``length`` steps from each seed, each to a random sender if there is one. False if the graph is damaged."""
    for i in range(len(seeds)):
        node = np.int64(seeds[_U(i)])
        for step in range(length):
            first, last = csr.indptr[_U(node)], csr.indptr[_U(node + 1)]
            if is_no_row(first, last, len(csr.indices)):
                return False
            if last > first:
                node = np.int64(csr.indices[_U(first + below(draw(key, seeds[_U(i)], step), last - first))])
            if _U(node) >= _U(len(csr.indptr) - 1):
                return False
            out[_U(i * length + step)] = node
    return True


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
    needed = _induce(csr, count, work, table)
    if 0 <= needed <= len(work.positions):
        _count_hops(len(seeds), count, work, num_nodes, num_edges)
    return needed


@compiled
def sample_egos(csr: Csr, seeds: Array, draws: Draws, work: Work, table: Table, roots: Array) -> Any:
    """Sample a graph for each seed into ``work``, one behind the other; ``roots`` receives where they start.

    The nodes of a graph are those that neighbour sampling finds. It is sampled into views of ``work`` that begin where
    the graph before ended, with an epoch that hides the table's entries of that graph.
    """
    room, nodes, edges = len(work.positions), ZERO, ZERO
    work.starts[0] = 0
    for i in range(len(seeds)):
        mine = _behind(work, nodes, edges)
        own = Table(table.entries, table.shift, table.epoch + nodes)
        count = place_seeds(seeds[i : i + 1], mine, own)
        begin = ZERO
        for hop in range(len(draws.fanouts)):
            others = nodes + count + 1
            met = expand(csr, begin, count, others, hop, draws, draws.edge_type, draws.rule.weights, mine, own)
            if met < 0:
                return DAMAGED
            total = mine.starts[_U(count)]
            if nodes + edges + count + total >= room:
                return 2 * room + total
            begin, count = count, met
        total = _induce(csr, count, mine, own)
        if total < 0:
            return DAMAGED
        if nodes + edges + count + total >= room:
            return 2 * room + total
        roots[_U(i)] = nodes
        for row in range(count + 1):
            mine.starts[_U(row)] += edges
        nodes, edges = nodes + count, edges + total
    roots[_U(len(seeds))] = nodes
    return edges


@part
def _behind(work: Work, nodes: int, edges: int) -> Any:
    """Views of ``work`` that begin after ``nodes`` nodes and ``edges`` edges."""
    return Work(
        work.nodes[nodes:],
        work.starts[nodes:],
        work.positions[edges:],
        work.columns[edges:],
        work.first,
        work.degree,
        work.weights,
        work.kinds[edges:],
    )


@part
def _induce(csr: Csr, count: int, work: Work, table: Table) -> Any:
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
