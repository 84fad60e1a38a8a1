"""Batches of events: some edges at their times, negatives or labels for each, and what each end had seen before.

Each end of a target is the root of a tree of its own, at the time of the target: the same node at the same time is one
root, however many targets it is an end of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME
from lightning_gnn_dist.engine.temporal.order import time_order
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.links import (
    FALSE_ENDS,
    TargetType,
    directed,
    edges_at,
    kinds_of,
    labels,
    rows_at,
    targets,
    without,
)
from lightning_gnn_dist.sampling.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler, sample_at


@dataclass(frozen=True, eq=False)
class EventShape:
    """What training batches of events and those of held ones have in common.

    Args:
        sampler: Draws the trees.
        time_of_target: What batches call the time of each target.
        target_type: The edge type of the targets, if the graph has types.
    """

    sampler: TemporalSampler
    time_of_target: str
    target_type: TargetType | None

    def around(
        self,
        graph: Graph,
        events: tuple[Tensor, Tensor],
        negatives: Tensor,
        carried: Mapping[str, Tensor] | None,
        batch_key: BatchKey,
    ) -> Sample:
        """The trees of both ends of events and their negatives, each at the time of the event.

        Args:
            graph: The graph that is sampled.
            events: The ends of each event, shape (2, n), and its time.
            negatives: False receivers of each, shape (n, K).
            carried: What batches say of the events, if these have labels.
            batch_key: The batch's key.
        """
        roots = Roots.of(events, negatives)
        sample = sample_at(self.sampler, graph, roots.nodes, roots.times, batch_key)
        if self.sampler.equal:
            kinds = None if self.target_type is None else kinds_of(graph, sample)
            at, times = self.between_ends(sample, roots, kinds, graph.num_nodes)
            assert sample.edge_ids is not None
            sample = self.without_now(sample, at, self._times_of(graph, sample.edge_ids[at]), times)
        return self.finished(sample, roots, carried)

    def finished(self, sample: Sample, roots: Roots, carried: Mapping[str, Tensor] | None) -> Sample:
        """The sample with what batches say of their targets."""
        more = {self.time_of_target: roots.of_targets} | labels(roots.ends, roots.num_events, carried)
        number = None if self.target_type is None else self.target_type.number
        return sample._replace(extra={**sample.extra, **more}, target_type=number)

    def between_ends(self, sample: Sample, roots: Roots, kinds: Tensor | None, num_nodes: int) -> tuple[Tensor, Tensor]:
        """The edges of a sample between the ends of a target, in a tree of that target; and the times of these trees.

        Args:
            sample: The sample.
            roots: What was asked for.
            kinds: Of a typed graph the type of each edge of the sample.
            num_nodes: The number of nodes of the graph.
        """
        row = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff().to(torch.int64))
        tree, sent = sample.extra["batch"][row], torch.stack([sample.nodes[sample.indices], sample.nodes[row]])
        number = sent.amin(0) * num_nodes + sent.amax(0)
        asked = (roots.pairs.amin(0) * num_nodes + roots.pairs.amax(0)).repeat(2)
        known, place = torch.cat([number, asked]).unique(return_inverse=True)
        of_edges, of_targets = place.split([number.numel(), asked.numel()])
        is_between = torch.isin(tree * known.numel() + of_edges, roots.ends.view(-1) * known.numel() + of_targets)
        if self.target_type is not None and kinds is not None:
            is_between &= self.target_type.is_shown(kinds)
        at = is_between.nonzero().view(-1)
        return at, sample.extra[SEED_TIME][tree[at]]

    def without_now(self, sample: Sample, at: Tensor, times: Tensor, now: Tensor) -> Sample:
        """The sample without those of some edges whose times are those of their trees."""
        dropped = torch.zeros(sample.indices.numel(), dtype=torch.bool)
        dropped[at] = as_integers(times) == as_integers(now)
        return without(sample, dropped)

    def _times_of(self, graph: Graph, positions: Tensor) -> Tensor:
        """The time of each of some edges of the target type or of the reverse one, as an integer."""
        if graph.types is None or self.target_type is None:
            return graph.edge_arrays[self.sampler.time][positions]
        kinds, found = graph.types.edge_type[positions], torch.empty_like(positions)
        for number in self.target_type.numbers:
            is_of = kinds == number
            array = graph.types.edge_arrays[graph.types.edge_types[number]][self.sampler.time]
            found[is_of] = as_integers(array[places_of(graph, number, positions[is_of])])
        return found


@dataclass(frozen=True, eq=False)
class EventSampler:
    """Samples around edges of the graph at their times. Its seeds are positions in ``graph.indices``.

    Args:
        shape: The sampler and what its targets are.
        num_negatives: Negatives for each event: receivers at the same time.
        candidates: The nodes that negatives are drawn from.
        undirected: Draw at random which direction of each event is the target.
        times: The time of each edge of the target type.
        carried: What batches say of events with labels. None: labels are ones and zeros.
    """

    shape: EventShape
    num_negatives: int
    candidates: Candidates
    undirected: bool
    times: Tensor
    carried: Mapping[str, Tensor] | None = None

    @property
    def num_hops(self) -> int:
        return self.shape.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, batch_key) for ids, batch_key in zip(seeds, keys, strict=True)]

    def _sample(self, graph: Graph, ids: Tensor, batch_key: BatchKey) -> Sample:
        kind = self.shape.target_type
        rows = ids if kind is None else places_of(graph, kind.number, ids)
        events = directed(edges_at(graph, ids), ids, batch_key, self.undirected), self.times[rows]
        number, of_batch = None if kind is None else kind.number, key(*batch_key, FALSE_ENDS)
        at = Moments(time_order(graph, self.shape.sampler.time), as_integers(events[1]))
        drawn = events[0], ids, self.num_negatives, of_batch, self.candidates, number, at
        carried = None if self.carried is None else rows_at(self.carried, rows)
        return self.shape.around(graph, events, draw_receivers(graph, *drawn)[0], carried, batch_key)


@dataclass(frozen=True, eq=False)
class HeldEventSampler:
    """Samples around held events at their times, and their fixed negatives. Its seeds are columns of ``edges``.

    Args:
        shape: The sampler and what its targets are.
        edges: The events, shape ``(2, n)``, by ids in the graph.
        times: The time of each.
        negatives: The receivers of each event's negatives, shape ``(n, K)``, by ids in the graph.
        carried: What batches say of events with labels. None: labels are ones and zeros.
    """

    shape: EventShape
    edges: Tensor
    times: Tensor
    negatives: Tensor
    carried: Mapping[str, Tensor] | None = None

    @property
    def num_hops(self) -> int:
        return self.shape.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [
            self.shape.around(
                graph,
                (self.edges[:, ids], self.times[ids]),
                self.negatives[ids],
                None if self.carried is None else rows_at(self.carried, ids),
                batch_key,
            )
            for ids, batch_key in zip(seeds, keys, strict=True)
        ]


class Roots(NamedTuple):
    """The ends of targets at their times: each is the root of a tree.

    Attributes:
        pairs: The ends of all targets, events first, shape (2, m).
        of_targets: The time of each target.
        num_events: How many of them are events.
        nodes: The nodes of all roots, in order.
        times: Their times.
        ends: For each target the roots that its ends are, shape (2, m).
    """

    pairs: Tensor
    of_targets: Tensor
    num_events: int
    nodes: Tensor
    times: Tensor
    ends: Tensor

    @classmethod
    def of(cls, events: tuple[Tensor, Tensor], negatives: Tensor) -> Roots:
        """The roots of events, given by their ends and times, and of their false receivers, shape (n, K)."""
        pairs = targets(events[0], negatives)
        times = torch.cat([events[1], events[1].repeat_interleave(negatives.shape[1])])
        nodes, of_node = pairs.unique(return_inverse=True)
        at, of_time = times.unique(return_inverse=True)
        count = max(1, at.numel())
        numbers, ends = (of_node * count + of_time).unique(return_inverse=True)
        return cls(pairs, times, events[1].numel(), nodes[numbers // count], at[numbers % count], ends)
