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


class Elsewhere(NamedTuple):
    """Rows of a node type that lie elsewhere.

    Attributes:
        width: Bytes of a row in a cache. 0: the type has no rows there.
        uses: Returns how likely each of some ids in the type is to be needed at all, for the cache.
        cost: Returns how many bytes are fetched for some increasing ids in the type.
    """

    width: int
    uses: Callable[[Tensor], Tensor]
    cost: Callable[[Tensor], int]


class Forecast(NamedTuple):
    """What a pass over some seeds would fetch.

    Attributes:
        drawn: Batches that were drawn for it.
        batches: Batches of a pass.
        rows: Rows that lie elsewhere and that bulks need, each once a bulk, in a pass.
        held: Of these, the share that a cache of each size would hold.
        num_bytes: What would be fetched in a pass with each of these caches.
    """

    drawn: int
    batches: int
    rows: float
    held: list[float]
    num_bytes: list[float]


def forecast(
    graph: Graph,
    sampler: Sampler,
    seeds: Tensor,
    is_near: Tensor | None,
    rooms: Sequence[int],
    types: Sequence[Elsewhere],
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
        rooms: How many bytes each cache may hold.
        types: What is fetched of each node type.
        batch_size: Seeds of a batch, at most.
        bulk_size: Batches that are made together.
        most_batches: Batches to draw, at most; of several passes, if one has fewer.
    """
    bulks, drawn, offsets = list[list[Tensor]](), 0, torch.tensor(graph.types.offsets)
    for samples in drawn_bulks(graph, sampler, seeds, batch_size, bulk_size, most_batches):
        nodes = torch.cat([sample.nodes for sample in samples]).unique()
        nodes = nodes if is_near is None else nodes[~is_near[nodes]]
        of_types = nodes.tensor_split(torch.searchsorted(nodes, offsets[1:-1]))
        bulks.append([ids - first for ids, first in zip(of_types, offsets, strict=False)])
        drawn += len(samples)
    num_batches = -(-len(seeds) // batch_size)
    share = num_batches / drawn
    rows = sum(len(ids) for bulk in bulks for ids, of in zip(bulk, types, strict=True) if of.width)
    found = [held_and_fetched(bulks, room, types) for room in rooms]
    return Forecast(drawn, num_batches, rows * share, [held for held, _ in found], [share * read for _, read in found])


def held_and_fetched(
    bulks: Sequence[Sequence[Tensor]], num_bytes: int, types: Sequence[Elsewhere]
) -> tuple[float, int]:
    """Return which share of the rows of bulks a cache holds when they are needed, and what is fetched of the others.

    Args:
        bulks: For each bulk, the ids of each type that it needs, increasing.
        num_bytes: What the rows of all types may take in the cache.
        types: What is fetched of each type.
    """
    caches = [RowCache({}, num_bytes // of.width if of.width else 0, of.uses) for of in types]
    for cache, of in zip(caches, types, strict=True):
        cache.bytes_per_row = of.width
    joint, fetched = Caches(caches, num_bytes), 0
    for number, bulk in enumerate(bulks):
        joint.settle(list(zip(*bulks[number : number + MOST_KNOWN], strict=True)))
        for cache, of, ids in zip(caches, types, bulk, strict=True):
            if of.width:
                _, missing = cache.look_up(ids)
                cache.offer(missing, {})
                fetched += of.cost(missing)
    return joint.hit_rate, fetched


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
