"""The edges of each row in the order of their times, made once for a graph and kept beside it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.temporal.times import BEFORE_ALL, arrays_of, as_integers, sources_of
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.memo import remembered_of
from lightning_gnn_dist.graph.rows import row_slices


class TimeOrder(NamedTuple):
    """What a kernel needs to find the edges of a time: 12 bytes an edge, or 8 where rows are in that order already.

    Attributes:
        times: The times of each row's edges in increasing order, those of each edge type by themselves, int64.
        places: Which edge of its row each of them is of; empty if they are in order as they are.
        has_time: Whether the edges of each type have times; all others are always seen.
    """

    times: Array
    places: Array
    has_time: Array


def time_order(graph: Graph, name: str) -> TimeOrder:
    """The order of a graph's edges by the times called ``name``, made anew once these have changed."""
    return remembered_of(graph, ("time order", name), arrays_of(graph, name), lambda: _ordered(graph, name))


def _ordered(graph: Graph, name: str) -> TimeOrder:
    graph.check_edges()  # these loops follow them
    return ordered(graph, name, _times_of_edges(graph, name))


def ordered(graph: Graph, name: str, times: Tensor) -> TimeOrder:
    """The order of a graph's edges, whose times called ``name`` are these integers, which it writes into."""
    has_time = np.array([source is not None for source in sources_of(graph, name)])
    kinds = None if len(has_time) == 1 else graph.types.edge_type
    if all(bool(_follows(graph.indptr, kinds, times, rows)[1].all()) for rows in row_slices(graph.indptr)):
        return TimeOrder(times.numpy(), np.empty(0, np.int32), has_time)
    places = torch.empty(times.numel(), dtype=index_dtype(int(graph.degrees().max())))
    for rows in row_slices(graph.indptr):
        at = slice(int(graph.indptr[rows.start]), int(graph.indptr[rows.stop]))
        begins, _ = _follows(graph.indptr, kinds, times, rows)
        order = times[at].argsort(stable=True)
        order = order[begins.cumsum(0)[order].argsort(stable=True)]
        starts = graph.indptr[rows.start : rows.stop + 1]
        times[at] = times[at][order]
        places[at] = (order + at.start - starts[:-1].repeat_interleave(starts.diff())).to(places.dtype)
    return TimeOrder(times.numpy(), places.numpy(), has_time)


def _times_of_edges(graph: Graph, name: str) -> Tensor:
    """The time of each edge as an integer, in the order of the graph's edges; ``BEFORE_ALL`` where there is none."""
    times = torch.full((graph.num_edges,), BEFORE_ALL)
    for number, source in enumerate(sources_of(graph, name)):
        for first, piece in zip(count(0, EDGES_AT_ONCE), _pieces(graph, number), strict=False):
            if source is not None:
                times[piece] = as_integers(source.of(first, graph.indices[piece]))
    return times


def _pieces(graph: Graph, number: int) -> Iterator[slice | Tensor]:
    """Yield the positions of the edges of a type, ``EDGES_AT_ONCE`` at a time."""
    if len(graph.types.edge_types) > 1:
        yield from graph.types.edges_of(graph.types.edge_types[number]).split(EDGES_AT_ONCE)
        return
    for first in range(0, graph.num_edges, EDGES_AT_ONCE):
        yield slice(first, first + EDGES_AT_ONCE)


def _follows(indptr: Tensor, kinds: Tensor | None, times: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Of the edges of some rows: which begin the edges of a type in their row, and which are as late as the one before.

    Those that begin count as late.
    """
    starts = indptr[rows.start : rows.stop + 1]
    at = slice(int(starts[0]), int(starts[-1]))
    begins = torch.zeros(at.stop - at.start, dtype=torch.bool)
    begins[(starts[:-1] - at.start)[starts.diff() > 0]] = True
    if kinds is not None:
        begins[1:] |= kinds[at][1:] != kinds[at][:-1]
    late = begins.clone()
    late[1:] |= times[at][1:] >= times[at][:-1]
    return begins, late
