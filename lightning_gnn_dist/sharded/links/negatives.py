"""Draws negatives across shards: the owner of a candidate knows whether a sender has an edge to it.

first tries of all draws -> their owners -> the other random tries of those that are edges -> ... -> nodes in order
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.sampling.links import FALSE_ENDS
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES, tried_places
from lightning_gnn_dist.sampling.targets.home import FalseEnds
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph

_FIRST_TRIES = 2  # asked at once for all draws: both are edges so seldom that mostly no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time


def draw_false_ends(graph: ShardedGraph, wanted: FalseEnds) -> Steps[list[Tensor]]:
    """Draw false receivers for the edges of some batches, and return those of each batch, shape (n, draws).

    They are those that are drawn where one host has the graph, also for a sender with an edge to every candidate.
    """
    sizes, count = list(map(len, wanted.ids)), wanted.draws
    words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in wanted.keys], np.uint64).view(np.int64))
    words, numbers = words.repeat_interleave(torch.tensor(sizes)), torch.cat(list(wanted.ids))
    ends, times = torch.cat(list(wanted.ends), 1), None
    if wanted.times is not None:
        times = wanted.times[0], torch.cat(list(wanted.times[1]))
    bounds = wanted.candidates.there_by(ends[0] if times is None else times[1]).clamp_(min=1)
    found, left = torch.empty(len(numbers) * count, dtype=torch.int64), torch.arange(len(numbers) * count)
    for tries in _turns(int(bounds.max()) if len(numbers) else 0):
        if not len(left):
            break
        edges, most = left // count, RANDOM_TRIES + bounds[left // count]
        places = tried_places(words[edges], numbers[edges], left % count, tries, bounds[edges])
        tried = wanted.candidates.ids(places)
        is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
        asked = graph, ends[:, edges], tried, is_tried, wanted.edge_type
        is_free = yield from _are_free(*asked, None if times is None else (times[0], times[1][edges]))
        is_found = is_free.any(1)
        at = torch.where(is_found, is_free.to(torch.uint8).argmax(1), is_tried.sum(1) - 1)  # or the one tried last
        found[left] = tried[torch.arange(len(left)), at]
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
    graph: ShardedGraph,
    ends: Tensor,
    tried: Tensor,
    is_tried: Tensor,
    edge_type: int | None,
    times: tuple[str, Tensor] | None,
) -> Steps[Tensor]:
    """Return which of the nodes that were tried for some edges, a row for each, may be taken."""
    is_free = is_tried & (tried != ends[:, :, None]).all(0)
    rows, columns = is_free.nonzero(as_tuple=True)
    if len(rows):
        at = None if times is None else (times[0], times[1][rows])
        is_edge = yield from graph.are_edges(torch.stack([ends[0, rows], tried[rows, columns]]), edge_type, at)
        is_free[rows, columns] = ~is_edge
    return is_free
