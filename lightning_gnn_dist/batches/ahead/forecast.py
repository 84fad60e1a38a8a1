"""What training batches would fetch of rows that lie elsewhere, with a cache and without, found by drawing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import Caches, RowCache
from lightning_gnn_dist.batches.ahead.source import MOST_KNOWN
from lightning_gnn_dist.batches.deal import slice_of
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler


class Forecast(NamedTuple):
    """What a pass over some seeds would fetch.

    Attributes:
        drawn: Batches that were drawn for it.
        batches: Batches of a pass.
        rows: Rows that lie elsewhere and that bulks need, each once a bulk, in a pass.
        held: Of these, the share that a cache of each size would hold.
    """

    drawn: int
    batches: int
    rows: float
    held: list[float]


def forecast(
    graph: Graph,
    sampler: Sampler,
    seeds: Tensor,
    is_near: Tensor | None,
    rooms: Sequence[int],
    count: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    bulk_size: int,
    most_batches: int,
) -> Forecast:
    """Draw the first batches of passes over some seeds, and count what they would fetch.

    Args:
        graph: The whole graph.
        sampler: Draws the batches.
        seeds: The seeds.
        is_near: Which nodes' rows need not be fetched. None: all are.
        rooms: How many rows each cache may hold.
        count: Returns how likely nodes are to be needed at all, for the cache.
        batch_size: Seeds of a batch, at most.
        bulk_size: Batches that are made together.
        most_batches: Batches to draw, at most; of several passes, if one has fewer.
    """
    bulks, drawn = [], 0
    for samples in drawn_bulks(graph, sampler, seeds, batch_size, bulk_size, most_batches):
        nodes = torch.cat([sample.nodes for sample in samples]).unique()
        bulks.append(nodes if is_near is None else nodes[~is_near[nodes]])
        drawn += len(samples)
    rows, num_batches = sum(map(len, bulks)), -(-len(seeds) // batch_size)
    held = [share_held(bulks, room, count) for room in rooms]
    return Forecast(drawn, num_batches, rows * num_batches / drawn, held)


def share_held(bulks: Sequence[Tensor], num_rows: int, count: Callable[[Tensor], Tensor]) -> float:
    """Return which share of the rows of bulks a cache of so many rows holds when they are needed."""
    cache = RowCache({}, num_rows, count)
    alone = Caches([cache], num_rows)
    for number, bulk in enumerate(bulks):
        alone.settle([bulks[number : number + MOST_KNOWN]])
        cache.offer(cache.look_up(bulk)[1], {})
    return alone.hit_rate


def drawn_bulks(
    graph: Graph, sampler: Sampler, seeds: Tensor, batch_size: int, bulk_size: int, most_batches: int
) -> Iterator[list[Sample]]:
    """Draw the first batches of passes over some seeds, bulk after bulk."""
    num_batches = -(-len(seeds) // batch_size)
    for first in range(0, most_batches, bulk_size):
        keys = [BatchKey(0, *divmod(number, num_batches)) for number in range(first, first + bulk_size)]
        orders = {key.epoch: permutation(len(seeds), 0, key.epoch) for key in keys}
        asked = [seeds[orders[key.epoch][slice_of(len(seeds), num_batches, key.batch)]] for key in keys]
        yield sampler.sample_bulk(graph, asked, keys)
