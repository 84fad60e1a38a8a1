"""Draws per edge type from rows of a shard, for ranks that ask: those of :mod:`typed.kernels`, :mod:`temporal.kernels`.

rows -> how many edges each gives -> which ones, row after row and in each row type after type
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import ROWS_AHEAD, ZERO, Array, Rule, draw_row, is_no_row, is_whole, take_row
from lightning_gnn_dist.engine.temporal.kernels import BEFORE_ALL, first_later
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.typed.hops import edge_types_of
from lightning_gnn_dist.engine.typed.kernels import end_of_piece, prefetch_types
from lightning_gnn_dist.engine.weighted.draws import EVEN, aside_for
from lightning_gnn_dist.graph.graph import Graph

_U = np.uint64


class Asked(NamedTuple):
    """The rows to draw from.

    Attributes:
        rows: Their numbers in the shard, int64.
        nodes: The ids of their nodes in the whole graph, int64.
        batches: The number of the batch that each is for, int64.
        keys: The key of each batch and edge type at this hop, uint64, shape (batches, types).
        fanouts: Neighbours to draw of each edge type, int64; -1 takes all, 0 none.
        replace: Whether an edge may be drawn more than once.
        latest: Whether the latest edges are drawn, instead of any.
        after: Each batch sees events later than this, int64. Empty if there are no times.
        upto: And no later than this.
        order: The edges by time; as :data:`NO_ORDER` if there are no times.
    """

    rows: Array
    nodes: Array
    batches: Array
    keys: Array
    fanouts: Array
    replace: bool
    latest: bool
    after: Array
    upto: Array
    order: TimeOrder


NO_ORDER = TimeOrder(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_))


def draw_of_types(graph: Graph, asked: Asked) -> tuple[Tensor, Tensor]:
    """Return how many edges are drawn for each row, and their positions in ``graph.indices``.

    A graph without types counts as one of one type.
    """
    kinds = np.empty(0, np.uint8) if graph.types is None else edge_types_of(graph.types)
    csr = graph.indptr.numpy(), graph.indices.numpy(), kinds
    counts = np.empty(len(asked.rows), np.int64)
    if not _count(*csr, asked, counts):
        raise graph_is_damaged(graph)
    starts = counts.cumsum() - counts
    positions = np.empty(int(counts.sum()), np.int64)
    _draw(*csr, asked, Rule(EVEN, asked.replace), starts, positions)
    return torch.from_numpy(counts), torch.from_numpy(positions)


@compiled
def _count(indptr: Array, indices: Array, edge_type: Array, asked: Asked, counts: Array) -> bool:
    """Count the edges that each row gives; return whether all are rows of the graph, and of types that it has."""
    for i in range(len(asked.rows)):
        prefetch(indptr, asked.rows[_U(min(i + ROWS_AHEAD, len(asked.rows) - 1))])
        soon = _U(asked.rows[_U(min(i + ROWS_AHEAD // 2, len(asked.rows) - 1))])
        prefetch_types(edge_type, indptr[soon], indptr[soon + _U(1)] - indptr[soon])
        row = _U(asked.rows[_U(i)])
        first, last, total = indptr[row], indptr[row + _U(1)], ZERO
        if is_no_row(first, last, len(indices)):
            return False
        while first < last:
            kind, stop = ZERO, last
            if len(edge_type):
                kind, stop = np.int64(edge_type[_U(first)]), end_of_piece(edge_type, first, last)
            if _U(kind) >= _U(len(asked.fanouts)):  # read as unsigned, a negative number is large
                return False
            start, end = _seen(asked, i, kind, first, stop)
            fanout = asked.fanouts[_U(kind)]
            total += end - start if is_whole(end - start, fanout, asked.replace) else fanout
            first = stop
        counts[_U(i)] = total
    return True


@compiled
def _draw(
    indptr: Array, indices: Array, edge_type: Array, asked: Asked, rule: Rule, starts: Array, positions: Array
) -> None:
    """Write the positions of the edges that rows give, each row's from its place in ``starts`` on."""
    aside: Any = aside_for(rule.weights, ZERO)  # edges of types have no weights
    for i in range(len(asked.rows)):
        row, node, out = _U(asked.rows[_U(i)]), asked.nodes[_U(i)], starts[_U(i)]
        first, last, begin = indptr[row], indptr[row + _U(1)], out
        while first < last:
            kind, stop = ZERO, last
            if len(edge_type):
                kind, stop = np.int64(edge_type[_U(first)]), end_of_piece(edge_type, first, last)
            start, end = _seen(asked, i, kind, first, stop)
            fanout, degree = asked.fanouts[_U(kind)], end - start
            if is_whole(degree, fanout, rule.replace):
                take_row(indices, start, degree, positions, out)
                out += degree
            elif asked.latest:
                take_row(indices, end - fanout, fanout, positions, out)
                out += fanout
            else:
                key = asked.keys[_U(asked.batches[_U(i)]), _U(kind)]
                draw_row(indices, start, degree, fanout, key, node, rule, aside, positions, out)
                out += fanout
            first = stop
        if len(asked.order.places):
            for edge in range(begin, out):
                positions[_U(edge)] = indptr[row] + asked.order.places[_U(positions[_U(edge)])]


@inlined
def _seen(asked: Asked, i: int, kind: int, first: int, stop: int) -> Any:
    """Where the edges of a type into row ``i`` that are seen start and end, in the order of time."""
    start, end = first, stop
    if len(asked.after) and asked.order.has_time[_U(kind)]:
        batch = _U(asked.batches[_U(i)])
        if asked.after[batch] != BEFORE_ALL:
            start = first_later(asked.order.times, first, stop, asked.after[batch])
        end = first_later(asked.order.times, start, stop, asked.upto[batch])
    return start, end
