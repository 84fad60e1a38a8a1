"""Batches of events: some edges at their times, negatives or labels for each, and what each end had seen before.

Each end of a target is the root of a tree of its own, at the time of the target: the same node at the same time is one
root, however many targets it is an end of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.links import (
    FALSE_ENDS,
    TargetType,
    directed,
    edges_at,
    labels,
    rows_at,
    targets,
    without,
)
from lightning_gnn_dist.sampling.temporal.negatives import Candidates, draw_receivers_at
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
        pairs = targets(events[0], negatives)
        times = torch.cat([events[1], events[1].repeat_interleave(negatives.shape[1])])
        nodes, roots, ends = _roots(pairs, times)
        sample = sample_at(self.sampler, graph, nodes, roots, batch_key)
        if self.sampler.equal:
            sample = self._without_targets(graph, sample, pairs, ends)
        more = {self.time_of_target: times} | labels(ends, events[1].numel(), carried)
        number = None if self.target_type is None else self.target_type.number
        return sample._replace(extra={**sample.extra, **more}, target_type=number)

    def _without_targets(self, graph: Graph, sample: Sample, pairs: Tensor, ends: Tensor) -> Sample:
        """The sample without what happened between the ends of a target at its time, in the trees of that target."""
        assert sample.edge_ids is not None
        trees, sent = sample.extra["batch"], edges_at(graph, sample.edge_ids)
        rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff().to(torch.int64))
        tree, size = trees[rows], graph.num_nodes
        is_now = self._times_of(graph, sample.edge_ids) == sample.extra[SEED_TIME][tree]
        number = sent.amin(0) * size + sent.amax(0)
        asked = (pairs.amin(0) * size + pairs.amax(0)).repeat(2)
        known, place = torch.cat([number, asked]).unique(return_inverse=True)
        of_edges, of_targets = place.split([number.numel(), asked.numel()])
        dropped = is_now & torch.isin(tree * known.numel() + of_edges, ends.view(-1) * known.numel() + of_targets)
        return without(sample, dropped if self.target_type is None else dropped & self.target_type.shows(graph, sample))

    def _times_of(self, graph: Graph, positions: Tensor) -> Tensor:
        """The time of each edge of the target type or of the reverse one; of others any."""
        if graph.types is None or self.target_type is None:
            return graph.edge_arrays[self.sampler.time][positions]
        kinds, found = graph.types.edge_type[positions], None
        for number in (self.target_type.number, self.target_type.reverse):
            if number is not None:
                is_of = kinds == number
                array = graph.types.edge_arrays[graph.types.edge_types[number]][self.sampler.time]
                found = array.new_zeros(positions.numel()) if found is None else found
                found[is_of] = array[places_of(graph, number, positions[is_of])].to(found.dtype)
        assert found is not None
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
        drawn = self.shape.sampler.time, events, ids, self.num_negatives, of_batch, self.candidates, number
        carried = None if self.carried is None else rows_at(self.carried, rows)
        return self.shape.around(graph, events, draw_receivers_at(graph, *drawn)[0], carried, batch_key)


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


def _roots(pairs: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes and times of all trees, in order of nodes, and for each pair the trees of its ends, shape (2, m)."""
    nodes, of_node = pairs.unique(return_inverse=True)
    at, of_time = times.unique(return_inverse=True)
    numbers, ends = (of_node * max(1, at.numel()) + of_time).unique(return_inverse=True)
    count = max(1, at.numel())
    return nodes[numbers // count], at[numbers % count], ends
