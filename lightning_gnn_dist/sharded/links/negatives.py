"""Draws negatives across shards: the owner of a candidate knows whether a sender has an edge to it.

first tries of all draws -> their owners -> the other random tries of those that are edges -> ... -> nodes in order
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.sampling.links import FALSE_ENDS
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES, tried_places
from lightning_gnn_dist.sampling.targets.home import FalseEnds
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.temporal.times import have_happened_across

_FIRST_TRIES = 2  # asked at once for all draws: both are edges so seldom that mostly no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time


class _Edges(NamedTuple):
    """The edges of all batches.

    Attributes:
        ends: The sender of each, and what other nodes not to draw, shape (k, n).
        times: The time of each, if they have times.
        bounds: From how many candidates each draws, at least one.
    """

    ends: Tensor
    times: Tensor | None
    bounds: Tensor

    @classmethod
    def of(cls, wanted: FalseEnds) -> _Edges:
        ends = torch.cat(list(wanted.ends), 1)
        times = None if wanted.times is None else torch.cat(list(wanted.times[1]))
        return cls(ends, times, wanted.candidates.there_by(ends[0] if times is None else times).clamp_(min=1))


def draw_false_ends(graph: ShardedGraph, wanted: FalseEnds) -> Steps[list[Tensor]]:
    """Draw false receivers for the edges of some batches, and return those of each batch, shape (n, draws).

    They are those that are drawn where one host has the graph, also for a sender with an edge to every candidate.
    """
    sizes, count = list(map(len, wanted.ids)), wanted.draws
    words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in wanted.keys], np.uint64).view(np.int64))
    words, numbers = words.repeat_interleave(torch.tensor(sizes)), torch.cat(list(wanted.ids))
    edges = _Edges.of(wanted)
    found, left = torch.empty(len(numbers) * count, dtype=torch.int64), torch.arange(len(numbers) * count)
    for tries in _turns(int(edges.bounds.max()) if len(numbers) else 0):
        if not len(left):
            break
        at, most = left // count, RANDOM_TRIES + edges.bounds[left // count]
        places = tried_places(words[at], numbers[at], left % count, tries, edges.bounds[at])
        tried = wanted.candidates.ids(places)
        is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
        is_free = yield from _are_free(graph, wanted, edges, at, tried, is_tried)
        is_found = is_free.any(1)
        chosen = torch.where(is_found, is_free.to(torch.uint8).argmax(1), is_tried.sum(1) - 1)  # or the one tried last
        found[left] = tried[torch.arange(len(left)), chosen]
        left = left[~is_found & (most > tries.stop)]
    return list(found.view(len(numbers), count).split(sizes))


def _turns(num_candidates: int) -> Iterator[range]:
    """Which tries are asked about together."""
    begin, sizes = 0, [_FIRST_TRIES, RANDOM_TRIES - _FIRST_TRIES]
    while begin < RANDOM_TRIES + num_candidates:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        end = min(begin + size, RANDOM_TRIES + num_candidates)
        yield range(begin, end)
        begin = end
        if begin >= RANDOM_TRIES:
            sizes = [_BLOCK if begin == RANDOM_TRIES else min(2 * size, _LARGEST_BLOCK)]


def _are_free(
    graph: ShardedGraph, wanted: FalseEnds, edges: _Edges, at: Tensor, tried: Tensor, is_tried: Tensor
) -> Steps[Tensor]:
    """Return which of the nodes that were tried for some edges may be taken."""
    ends = edges.ends[:, at]
    is_free = is_tried & (tried != ends[:, :, None]).all(0)
    rows, columns = is_free.nonzero(as_tuple=True)
    if not len(rows):
        return is_free
    pairs = torch.stack([ends[0, rows], tried[rows, columns]])
    if wanted.times is None or edges.times is None:
        is_edge = yield from graph.are_edges(pairs, wanted.edge_type)
    else:
        name, times = wanted.times[0], edges.times[at[rows]]
        is_edge = yield from have_happened_across(graph, name, pairs, times, wanted.edge_type)
    is_free[rows, columns] = ~is_edge
    return is_free
