"""Samples around events of a graph in shards: the same, bit for bit, as where every host has the graph.

own events -> false receivers that were there, of which owners say what happened -> the ends of all, at their times ->
the tree of each -> without what happened between the ends of a target at its time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.sampling.links import rows_at
from lightning_gnn_dist.sampling.temporal.links import EventSampler, EventShape, HeldEventSampler, Roots
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.links.negatives import FalseEnds, draw_false_ends
from lightning_gnn_dist.sharded.links.sampling import own_edges
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
        ends = [own_edges(graph, *of, self.first, self.events.undirected) for of in zip(seeds, keys, strict=True)]
        events = [(edges, self.events.times[some]) for edges, some in zip(ends, at, strict=True)]
        false = yield from draw_false_ends(self._false_ends(graph, events), self.events.num_negatives, seeds, keys)
        carried = [None if self.events.carried is None else rows_at(self.events.carried, some) for some in at]
        return (yield from _around(graph, self.events.shape, events, false, carried, keys))

    def _false_ends(self, graph: ShardedGraph, events: list[Events]) -> FalseEnds:
        """Return as false receivers the nodes that were there and to which the sender sent nothing at that time."""
        shape, candidates = self.events.shape, self.events.candidates
        kind = None if shape.target_type is None else shape.target_type.number
        times = as_integers(torch.cat([when for _, when in events]))

        def exist(edges: Tensor, pairs: Tensor) -> Steps[Tensor]:
            return have_happened_across(graph, shape.sampler.time, pairs, times[edges], kind)

        bounds = candidates.there_by(times).clamp_(min=1)
        return FalseEnds(torch.cat([ends for ends, _ in events], 1), bounds, candidates.ids, exist)


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
