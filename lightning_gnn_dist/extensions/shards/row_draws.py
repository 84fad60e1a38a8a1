"""Draws from rows of a shard, for ranks that ask: the same edges that the kernels of sampling draw for their nodes.

rows -> how many edges each gives -> which ones, row after row and in each row type after type
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import (
    BLOCK,
    ROWS_AHEAD,
    ZERO,
    Array,
    Csr,
    draw_row,
    end_of_piece,
    is_no_row,
    is_whole,
    prefetch_types,
    take_row,
)
from lightning_gnn_dist.engine.sample import csr_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import Piece, Rule, Weights, aside_for, prefetch_weights
from lightning_gnn_dist.extensions.temporal.times import BEFORE_ALL, TimeOrder
from lightning_gnn_dist.extensions.temporal.trees import first_later
from lightning_gnn_dist.graph.graph import Graph

_U = np.uint64


class RowRequest(NamedTuple):
    """The rows to draw from.

    Attributes:
        edge_type: The type of each edge of the shard; empty if there is one type alone.
        rows: Their numbers in the shard, int64.
        nodes: The ids of their nodes in the whole graph, int64.
        groups: The number of the batch, or of the tree by time, that each is for, int64.
        keys: The key of each group and edge type at this hop, uint64, shape (groups, types).
        fanouts: Neighbours to draw of each edge type, int64; -1 takes all, 0 none.
        rule: How the neighbours of one type are drawn. Weights are for a graph of one type.
        latest: Whether the latest edges are drawn, instead of any.
        after: Each group sees events later than this, int64. Empty if there are no times.
        upto: And no later than this.
        order: The edges by time; as :data:`NO_ORDER` if there are no times.
    """

    edge_type: Array
    rows: Array
    nodes: Array
    groups: Array
    keys: Array
    fanouts: Array
    rule: Rule
    latest: bool
    after: Array
    upto: Array
    order: TimeOrder


NO_ORDER = TimeOrder(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_))


def draw_from_rows(graph: Graph, asked: RowRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Draw edges of each type that leads to a row; a graph without types counts as one of one type.

    Returns how many each row gives, their places in the shard, row after row, and their senders.
    """
    csr, counts = csr_of(graph), np.empty(len(asked.rows), np.int64)
    longest = _count(csr, asked, counts)
    if longest < 0:
        raise graph_is_damaged(graph)
    starts = counts.cumsum() - counts
    positions = np.empty(int(counts.sum()), np.int64)
    senders = graph.indices.new_empty(len(positions))
    _draw(csr, asked, asked.rule.weights, longest, starts, positions, senders.numpy())
    return torch.from_numpy(counts), torch.from_numpy(positions), senders


@compiled
def _count(csr: Csr, asked: RowRequest, counts: Array) -> Any:
    """Count the edges that each row gives; return the length of the longest row.

    Or return -1, if one is no row of the graph, or has an edge of a type that is none.
    """
    longest: Any = ZERO
    for i in range(len(asked.rows)):
        prefetch(csr.indptr, asked.rows[_U(min(i + ROWS_AHEAD, len(asked.rows) - 1))])
        if len(asked.edge_type):
            soon = _U(asked.rows[_U(min(i + ROWS_AHEAD // 2, len(asked.rows) - 1))])
            prefetch_types(asked.edge_type, csr.indptr[soon], csr.indptr[soon + _U(1)] - csr.indptr[soon])
        row = _U(asked.rows[_U(i)])
        first, last, total = csr.indptr[row], csr.indptr[row + _U(1)], ZERO
        if is_no_row(first, last, len(csr.indices)):
            return -1
        longest = max(longest, last - first)
        while first < last:
            kind, stop = ZERO, last
            if len(asked.edge_type):
                kind, stop = np.int64(asked.edge_type[_U(first)]), end_of_piece(asked.edge_type, first, last)
            if _U(kind) >= _U(len(asked.fanouts)):  # read as unsigned, a negative number is large
                return -1
            start, end = _seen(asked, i, kind, first, stop)
            fanout = asked.fanouts[_U(kind)]
            total += end - start if is_whole(end - start, fanout, asked.rule.replace) else fanout
            first = stop
        counts[_U(i)] = total
    return longest


@compiled
def _draw(
    csr: Csr, asked: RowRequest, weights: Weights | None, longest: int, starts: Array, positions: Array, senders: Array
) -> None:
    """Write which edges the rows give, each row's from its place in ``starts`` on.

    What stands there is read a block of rows later: it was prefetched when it was drawn.
    """
    count, read = len(asked.rows), 0
    aside = None if weights is None else aside_for(weights, longest)
    for low in range(0, count + BLOCK, BLOCK):
        if weights is not None:
            for i in range(low + BLOCK, min(low + 2 * BLOCK, count) if len(weights.table) else 0):
                first, key = csr.indptr[_U(asked.rows[_U(i)])], asked.keys[_U(asked.groups[_U(i)]), ZERO]
                degree = csr.indptr[_U(asked.rows[_U(i)]) + _U(1)] - first
                if not is_whole(degree, asked.fanouts[ZERO], asked.rule.replace):
                    piece = Piece(first, degree, asked.fanouts[ZERO], key, asked.nodes[_U(i)])
                    prefetch_weights(piece, asked.rule.replace, weights)
        for i in range(low, min(low + BLOCK, count)):
            prefetch(csr.indptr, asked.rows[_U(min(i + ROWS_AHEAD, count - 1))])
            _draw_row(csr, asked, i, weights, aside, starts[_U(i)], positions)
        stop = starts[_U(low)] if low < count else len(positions)
        for edge in range(read, stop):
            senders[_U(edge)] = csr.indices[_U(positions[_U(edge)])]
        read = stop


@inlined
def _draw_row(
    csr: Csr, asked: RowRequest, i: int, weights: Weights | None, aside: Any, begin: int, positions: Array
) -> None:
    """Draw from row ``i``, of each edge type that leads to it."""
    row, node, out = _U(asked.rows[_U(i)]), asked.nodes[_U(i)], begin
    first, last = csr.indptr[row], csr.indptr[row + _U(1)]
    while first < last:
        kind, stop = ZERO, last
        if len(asked.edge_type):
            kind, stop = np.int64(asked.edge_type[_U(first)]), end_of_piece(asked.edge_type, first, last)
        start, end = _seen(asked, i, kind, first, stop)
        fanout, degree = asked.fanouts[_U(kind)], end - start
        if is_whole(degree, fanout, asked.rule.replace):
            take_row(csr.indices, start, degree, positions, out)
            out += degree
        elif asked.latest:
            take_row(csr.indices, end - fanout, fanout, positions, out)
            out += fanout
        else:
            piece = Piece(start, degree, fanout, asked.keys[_U(asked.groups[_U(i)]), _U(kind)], node)
            draw_row(csr.indices, piece, asked.rule.replace, weights, aside, positions, out)
            out += fanout
        first = stop
    if len(asked.order.places):
        for edge in range(begin, out):
            positions[_U(edge)] = csr.indptr[row] + asked.order.places[_U(positions[_U(edge)])]


@inlined
def _seen(asked: RowRequest, i: int, kind: int, first: int, stop: int) -> Any:
    """Where the edges of a type into row ``i`` that are seen start and end, in the order of time."""
    start, end = first, stop
    if len(asked.after) and asked.order.has_time[_U(kind)]:
        group = _U(asked.groups[_U(i)])
        if asked.after[group] != BEFORE_ALL:
            start = first_later(asked.order.times, first, stop, asked.after[group])
        end = first_later(asked.order.times, start, stop, asked.upto[group])
    return start, end
