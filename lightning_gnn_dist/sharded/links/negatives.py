"""Draws negatives across shards: the owner of a candidate knows whether a sender has an edge to it.

first tries of all draws -> their owners -> the other random tries of those that are edges -> ... -> nodes in order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.links import FALSE_ENDS
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES, tried_places
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph

_FIRST_TRIES = 2  # asked at once for all draws: both are edges so seldom that mostly no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time


class FalseEnds(NamedTuple):
    """Which nodes may be false receivers of some edges.

    Attributes:
        ends: The sender of each edge, and what other nodes it may not be, by ids in the whole graph, shape (k, n).
        bounds: From how many candidates each edge's are drawn, at least one.
        nodes_at: Returns the candidates at some places.
        exist: Tells of pairs of nodes, shape (2, m), that were tried for edges of given numbers, which ones are edges.
    """

    ends: Tensor
    bounds: Tensor
    nodes_at: Callable[[Tensor], Tensor]
    exist: Callable[[Tensor, Tensor], Steps[Tensor]]


def without_edge(graph: ShardedGraph, senders: Tensor, candidates: range, edge_type: int | None = None) -> FalseEnds:
    """Return as false receivers the nodes that are neither the sender nor one that it has an edge to.

    Args:
        graph: The graph whose edges to avoid.
        senders: The sender of each edge.
        candidates: The nodes to draw from.
        edge_type: Of a typed graph, the number of the edge type whose edges to avoid.
    """
    bounds = torch.full_like(senders, len(candidates))
    return FalseEnds(
        senders[None], bounds, lambda at: at + candidates.start, lambda _, pairs: graph.are_edges(pairs, edge_type)
    )


def draw_false_ends(
    wanted: FalseEnds, count: int, ids: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Tensor]]:
    """Draw false receivers for the edges of some batches, and return those of each batch, shape (n, count).

    They are those that are drawn where one host has the graph, also for a sender with an edge to every candidate.

    Args:
        wanted: What may be drawn for each edge, of one batch after the other.
        count: Draws for each edge.
        ids: A number for each edge of each batch, so that their draws differ.
        keys: The key of each batch.
    """
    sizes = list(map(len, ids))
    words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in keys], np.uint64).view(np.int64))
    words, numbers = words.repeat_interleave(torch.tensor(sizes)), torch.cat(list(ids))
    found, left = torch.empty(len(numbers) * count, dtype=torch.int64), torch.arange(len(numbers) * count)
    for tries in _turns(int(wanted.bounds.max()) if len(numbers) else 0):
        if not len(left):
            break
        edges, most = left // count, RANDOM_TRIES + wanted.bounds[left // count]
        asked = words[edges], numbers[edges], left % count
        tried = wanted.nodes_at(tried_places(*asked, tries, wanted.bounds[edges]))
        is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
        is_free = yield from _are_free(wanted, edges, tried, is_tried)
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


def _are_free(wanted: FalseEnds, edges: Tensor, tried: Tensor, is_tried: Tensor) -> Steps[Tensor]:
    """Return which of the nodes that were tried for some edges may be taken."""
    ends = wanted.ends[:, edges]
    is_free = is_tried & (tried != ends[:, :, None]).all(0)
    rows, columns = is_free.nonzero(as_tuple=True)
    if len(rows):
        is_edge = yield from wanted.exist(edges[rows], torch.stack([ends[0, rows], tried[rows, columns]]))
        is_free[rows, columns] = ~is_edge
    return is_free
