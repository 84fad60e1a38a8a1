"""Samples around events of a graph in shards: the same, bit for bit, as where every host has the graph.

own events -> false receivers that were there, of which owners say what happened -> the ends of all, at their times ->
the tree of each -> without what happened between the ends of a target at its time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.sampling.links import FALSE_ENDS, directed, edges_at, rows_at
from lightning_gnn_dist.sampling.negatives import RANDOM_TRIES
from lightning_gnn_dist.sampling.temporal.links import EventSampler, EventShape, HeldEventSampler, Roots
from lightning_gnn_dist.sampling.temporal.negatives import Candidates, tried_receivers_at
from lightning_gnn_dist.sharded.links.negatives import turns_of_tries
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.temporal.sampling import sample_at_times
from lightning_gnn_dist.sharded.temporal.times import have_happened_across, times_of_edges

Events = tuple[Tensor, Tensor]  # the ends of some events by their ids in the whole graph, shape (2, n), and their times


@dataclass(frozen=True, eq=False)
class OwnEvents:
    """Samples around edges of the own shard at their times. Its seeds are the positions that they have in the whole.

    Args:
        events: Says what is asked, and draws as if this rank had the whole graph.
        first: The position in the whole graph of the edge at position 0 of the shard, for edges of their type.
    """

    events: EventSampler
    first: int

    @property
    def num_hops(self) -> int:
        return self.events.num_hops

    def sample_across(
        self, graph: ShardedGraph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """Draw a sample for each batch: one turn for negatives, seldom two, one for each hop, one for equal times."""
        rows, kind = graph.shard.rows, self.events.shape.target_type
        at = [ids - self.first for ids in seeds]
        if kind is not None:
            at = [places_of(rows, kind.number, positions) for positions in at]
        events = [self._events(graph, *of) for of in zip(seeds, at, keys, strict=True)]
        false = yield from self._false_ends(graph, events, seeds, keys)
        carried = [None if self.events.carried is None else rows_at(self.events.carried, some) for some in at]
        return (yield from _around(graph, self.events.shape, events, false, carried, keys))

    def _events(self, graph: ShardedGraph, ids: Tensor, rows: Tensor, batch_key: BatchKey) -> Events:
        senders, receivers = edges_at(graph.shard.rows, ids - self.first)
        ends = torch.stack([senders, graph.ids_of_own(receivers)])
        return directed(ends, ids, batch_key, self.events.undirected), self.events.times[rows]

    def _false_ends(
        self, graph: ShardedGraph, events: list[Events], seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Tensor]]:
        """Return the receivers of the negatives of each event of each batch, shape (n, negatives)."""
        count, shape = self.events.num_negatives, self.events.shape
        sizes = torch.tensor(list(map(len, seeds)))
        words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in keys], np.uint64).view(np.int64))
        ends = torch.cat([edges for edges, _ in events], 1).repeat_interleave(count, 1)
        times = as_integers(torch.cat([when for _, when in events])).repeat_interleave(count)
        ids, total = torch.cat(list(seeds)).repeat_interleave(count), int(sizes.sum())
        draws = _Draws(words.repeat_interleave(sizes * count), ids, torch.arange(count).repeat(total), ends, times)
        kind = None if shape.target_type is None else shape.target_type.number
        drawn = yield from _draw_receivers(graph, shape.sampler.time, draws, self.events.candidates, kind)
        return list(drawn.view(total, count).split(sizes.tolist()))


@dataclass(frozen=True, eq=False)
class HeldEvents:
    """Samples around this rank's share of the held events. Its seeds are their numbers among all held ones.

    Args:
        held: Knows the share.
        first: The number of its first event.
    """

    held: HeldEventSampler
    first: int

    @property
    def num_hops(self) -> int:
        return self.held.num_hops

    def sample_across(
        self, graph: ShardedGraph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """Draw a sample for each batch: one turn for each hop, and one for equal times."""
        held, places = self.held, [ids - self.first for ids in seeds]
        events = [(held.edges[:, at], held.times[at]) for at in places]
        carried = [None if held.carried is None else rows_at(held.carried, at) for at in places]
        return (yield from _around(graph, held.shape, events, [held.negatives[at] for at in places], carried, keys))


def _around(
    graph: ShardedGraph,
    shape: EventShape,
    events: Sequence[Events],
    negatives: Sequence[Tensor],
    carried: Sequence[Mapping[str, Tensor] | None],
    keys: Sequence[BatchKey],
) -> Steps[list[Sample]]:
    """Draw the trees of both ends of events and of their negatives, for each batch."""
    roots = [Roots.of(*of_batch) for of_batch in zip(events, negatives, strict=True)]
    seeds = [of.nodes for of in roots], [of.times for of in roots]
    samples = yield from sample_at_times(graph, shape.sampler, *seeds, keys)
    if shape.sampler.equal:
        samples = yield from _without_targets(graph, shape, samples, roots)
    return [shape.finished(*of_batch) for of_batch in zip(samples, roots, carried, strict=True)]


def _without_targets(
    graph: ShardedGraph, shape: EventShape, samples: Sequence[Sample], roots: Sequence[Roots]
) -> Steps[list[Sample]]:
    """Leave out what happened between the ends of a target at its time, in the trees of that target."""
    found = [
        shape.between_ends(sample, of, sample.edge_kinds, graph.num_nodes)
        for sample, of in zip(samples, roots, strict=True)
    ]
    places = [at for at, _ in found]
    ids = _joined([sample.edge_ids for sample in samples], places)
    kinds = torch.zeros_like(ids)
    if graph.shard.bounds.types is not None:
        kinds = _joined([sample.edge_kinds for sample in samples], places)
    times = torch.empty_like(ids)
    for number in [0] if shape.target_type is None else shape.target_type.numbers:
        is_of = kinds == number
        of_kind = yield from times_of_edges(graph, number, shape.sampler.time, ids[is_of])
        times[is_of] = as_integers(of_kind)
    of_batches = times.split(list(map(len, places)))
    return [
        shape.without_now(sample, at, of, now) for sample, (at, now), of in zip(samples, found, of_batches, strict=True)
    ]


def _joined(columns: Sequence[Tensor | None], places: Sequence[Tensor]) -> Tensor:
    """The entries of all columns at some places of each, int64."""
    given = zip(columns, places, strict=True)
    return torch.cat([column[at].to(torch.int64) for column, at in given if column is not None])


@dataclass(frozen=True, eq=False)
class _Draws:
    """False receivers to draw.

    Attributes:
        keys: The random key of each, as int64.
        ids: The number of its event.
        places: Which of the draws for its event it is.
        ends: The ends of its event, shape (2, n).
        times: The time of its event, as an integer.
    """

    keys: Tensor
    ids: Tensor
    places: Tensor
    ends: Tensor
    times: Tensor

    def some(self, at: Tensor) -> _Draws:
        return _Draws(self.keys[at], self.ids[at], self.places[at], self.ends[:, at], self.times[at])


def _draw_receivers(
    graph: ShardedGraph, time: str, draws: _Draws, candidates: Candidates, edge_type: int | None
) -> Steps[Tensor]:
    """Draw a node for each event that was there by then, is none of its ends, and got nothing from its sender then.

    They are those that :func:`~lightning_gnn_dist.sampling.temporal.negatives.draw_receivers_at` draws where one host
    has the graph, also for a sender that sent to all.
    """
    bounds = candidates.there_by(draws.times).clamp_(min=1)
    found, left = torch.empty_like(draws.ids), torch.arange(len(draws.ids))
    for tries in turns_of_tries(len(candidates.nodes)):
        if not len(left):
            break
        asked, most = draws.some(left), RANDOM_TRIES + bounds[left]
        tried = tried_receivers_at(asked.keys, asked.ids, asked.places, tries, bounds[left], candidates)
        is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
        is_free = yield from _are_free(graph, time, asked, tried, is_tried, edge_type)
        is_found = is_free.any(1)
        at = torch.where(is_found, is_free.to(torch.uint8).argmax(1), is_tried.sum(1) - 1)  # or the one tried last
        found[left] = tried[torch.arange(len(left)), at]
        left = left[~is_found & (most > tries.stop)]
    return found


def _are_free(
    graph: ShardedGraph, time: str, draws: _Draws, tried: Tensor, is_tried: Tensor, edge_type: int | None
) -> Steps[Tensor]:
    """Return which of the nodes that were tried for each draw may be taken."""
    is_free = is_tried & (tried != draws.ends[0][:, None]) & (tried != draws.ends[1][:, None])
    rows, columns = is_free.nonzero(as_tuple=True)
    if len(rows):
        edges = torch.stack([draws.ends[0][rows], tried[rows, columns]])
        happened = yield from have_happened_across(graph, time, edges, draws.times[rows], edge_type)
        is_free[rows, columns] = ~happened
    return is_free
