"""Draws negatives across shards: the owner of a candidate knows whether a sender has an edge to it.

first tries of all draws -> their owners -> the other random tries of those that are edges -> ... -> nodes in order
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES, tried_receivers
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph

_FIRST_TRIES = 2  # asked at once for all draws: both are edges so seldom that mostly no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time


class Draws(NamedTuple):
    """What is drawn.

    Attributes:
        keys: The random key of each draw, as int64.
        senders: The sender of each, by its id in the whole graph.
        ids: The number of that sender in its batch.
        places: Which of the draws for its sender each is.
    """

    keys: Tensor
    senders: Tensor
    ids: Tensor
    places: Tensor

    def some(self, at: Tensor) -> Draws:
        return Draws(*(array[at] for array in self))


def draw_receivers_across(
    graph: ShardedGraph, draws: Draws, candidates: range, edge_type: int | None = None
) -> Steps[Tensor]:
    """Draw a node for each sender that is neither the sender nor one that it has an edge to.

    They are those that :func:`~lightning_gnn_dist.sampling.negatives.draw_receivers` draws where one host has the
    graph, also for a sender with an edge to every candidate.

    Args:
        graph: The graph whose edges to avoid.
        draws: For whom.
        candidates: The nodes to draw from.
        edge_type: Of a typed graph, the number of the edge type whose edges to avoid.
    """
    found = torch.empty_like(draws.senders)
    left = torch.arange(len(found))
    for tries in turns_of_tries(len(candidates)):
        if not len(left):
            break
        asked = draws.some(left)
        tried = tried_receivers(asked.keys, asked.ids, asked.places, tries, candidates)
        is_free = yield from _are_free(graph, asked.senders, tried, edge_type)
        first = is_free.to(torch.uint8).argmax(1)
        is_done = is_free.any(1)
        found[left] = tried[torch.arange(len(left)), torch.where(is_done, first, tried.shape[1] - 1)]
        left = left[~is_done]
    return found


def turns_of_tries(num_candidates: int) -> Iterator[range]:
    """Which tries are asked about together."""
    begin, sizes = 0, [_FIRST_TRIES, RANDOM_TRIES - _FIRST_TRIES]
    while begin < RANDOM_TRIES + num_candidates:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        end = min(begin + size, RANDOM_TRIES + num_candidates)
        yield range(begin, end)
        begin = end
        if begin >= RANDOM_TRIES:
            sizes = [_BLOCK if begin == RANDOM_TRIES else min(2 * size, _LARGEST_BLOCK)]


def _are_free(graph: ShardedGraph, senders: Tensor, tried: Tensor, edge_type: int | None) -> Steps[Tensor]:
    """Return which of the nodes that were tried for each sender are neither itself nor led to by an edge."""
    is_free = tried != senders[:, None]
    rows, columns = is_free.nonzero(as_tuple=True)
    if len(rows):
        is_edge = yield from graph.are_edges(torch.stack([senders[rows], tried[rows, columns]]), edge_type)
        is_free[rows, columns] = ~is_edge
    return is_free
