"""Batches of edges: some edges, negatives or labels for each, and the neighbourhoods of all ends.

seeds -> targets -> their ends -> neighbourhoods without the targets, or what each end had seen before

By time, each end of a target is the root of a tree, at the time of the target. The same node at the same time is one
root, however many targets it is an end of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample
from lightning_gnn_dist.extensions.links.targets import (
    ONE_TYPE,
    HeldLinks,
    Home,
    OwnLinks,
    Targets,
    TargetType,
    WholeGraph,
    kinds_of,
    name_of_targets,
    without,
    without_targets,
)
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, sample_at
from lightning_gnn_dist.extensions.temporal.times import as_integers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.turns import Steps, answered


class Roots(NamedTuple):
    """The ends of targets at their times.

    Attributes:
        nodes: The nodes of all roots, in order.
        times: Their times.
        ends: For each target the roots that its ends are, shape (2, m).
    """

    nodes: Tensor
    times: Tensor
    ends: Tensor

    @classmethod
    def of(cls, pairs: Tensor, times: Tensor) -> Roots:
        """The roots of targets, given by their ends, shape (2, m), and their times."""
        nodes, of_node = pairs.unique(return_inverse=True)
        at, of_time = times.unique(return_inverse=True)
        count = max(1, at.numel())
        numbers, ends = (of_node * count + of_time).unique(return_inverse=True)
        return cls(nodes[numbers // count], at[numbers % count], ends)


def trees_around(
    home: Home,
    sampler: TemporalSampler,
    targets: Sequence[Targets],
    keys: Sequence[BatchKey],
    target_type: TargetType,
) -> Steps[list[tuple[Sample, Tensor]]]:
    """The trees of the ends of each batch's targets, and the places of these roots.

    Where trees see events of their own time, they do not see those between the ends of a target of theirs.
    """
    roots = [Roots.of(of.pairs, of.said[name_of_targets(sampler.time)]) for of in targets]
    samples = yield from home.draw_at(sampler, [of.nodes for of in roots], [of.times for of in roots], keys)
    if sampler.equal and samples:
        between = [
            _between_ends(home, sample, of.ends, asked.pairs, target_type)
            for sample, of, asked in zip(samples, roots, targets, strict=True)
        ]
        samples = yield from _without_now(home, sampler.time, samples, between, target_type)
    return [(sample, of.ends) for sample, of in zip(samples, roots, strict=True)]


def _between_ends(
    home: Home, sample: Sample, ends: Tensor, pairs: Tensor, target_type: TargetType
) -> tuple[Tensor, Tensor]:
    """The edges of a sample between the ends of a target, in a tree of that target, and the times of these trees."""
    row = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff().to(torch.int64))
    tree, sent = sample.extra["batch"][row], torch.stack([sample.nodes[sample.indices], sample.nodes[row]])
    number = sent.amin(0) * home.num_nodes + sent.amax(0)
    asked = (pairs.amin(0) * home.num_nodes + pairs.amax(0)).repeat(2)
    known, place = torch.cat([number, asked]).unique(return_inverse=True)
    of_edges, of_targets = place.split([number.numel(), asked.numel()])
    is_between = torch.isin(tree * known.numel() + of_edges, ends.view(-1) * known.numel() + of_targets)
    at = (is_between & target_type.shows(home.rows, sample)).nonzero().view(-1)
    return at, sample.extra[SEED_TIME][tree[at]]


def _without_now(
    home: Home,
    time: str,
    samples: Sequence[Sample],
    between: Sequence[tuple[Tensor, Tensor]],
    target_type: TargetType,
) -> Steps[list[Sample]]:
    """The samples without those of some edges of each whose times are those of their trees."""
    places = [at for at, _ in between]
    ids = torch.cat([_ids_of(sample)[at] for sample, at in zip(samples, places, strict=True)])
    kinds = torch.cat([kinds_of(home.rows, sample)[at] for sample, at in zip(samples, places, strict=True)])
    times = torch.empty_like(ids)
    for number in target_type.numbers:
        is_of = kinds == number
        of_kind = yield from home.times_of_edges(number, time, ids[is_of])
        times[is_of] = as_integers(of_kind)
    left = []
    for sample, (at, now), of_edges in zip(samples, between, times.split(list(map(len, places))), strict=True):
        dropped = torch.zeros(sample.indices.numel(), dtype=torch.bool)
        dropped[at] = of_edges == as_integers(now)
        left.append(without(sample, dropped))
    return left


def _ids_of(sample: Sample) -> Tensor:
    assert sample.edge_ids is not None  # edges have times
    return sample.edge_ids.to(torch.int64)


Found = list[tuple[Sample, Tensor]]  # for each batch a sample, and the places of the ends of its targets, shape (2, m)


@dataclass(frozen=True, eq=False)
class LinkSampler:
    """Samples around edges. Its seeds are those of a table of edges.

    A batch's targets are its edges, then their negatives; ``edge_label_index`` holds the positions of both ends in the
    batch, ``edge_label`` ones and zeros, or the label of each edge. A :class:`TemporalSampler` draws a tree for each
    end at the time of the target; others draw one neighbourhood of all ends.

    Args:
        sampler: Draws the neighbourhoods of the ends.
        links: The edges: those of the graph, or held ones.
        target_type: The edge type of the targets.
        rows: The graph in RAM to look up edges and draw negatives in, if the sampled graph is a copy on a device.
    """

    sampler: Sampler
    links: OwnLinks | HeldLinks
    target_type: TargetType = ONE_TYPE
    rows: Graph | None = None

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        home = WholeGraph(graph, graph if self.rows is None else self.rows)
        return answered(self.sample_across(home, seeds, keys), list)

    def drawn_by(self, sampler: Sampler, rows: Graph) -> LinkSampler:
        """The same, around which another sampler draws, on a copy of ``rows``."""
        return replace(self, sampler=sampler, rows=rows)

    def sample_across(self, home: Home, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        """A sample for each batch, wherever the graph lives.

        Of shards that takes one turn for negatives, seldom two, one for each hop, and one for equal times.
        """
        drawn, kind = self.sampler, self.target_type
        targets = yield from self.links.targets(home, seeds, keys, kind)
        if isinstance(drawn, TemporalSampler):
            found = yield from trees_around(home, drawn, targets, keys, kind)
        else:
            found = yield from self._around(home, targets, keys)
        number = kind.number if have_names(home.rows.types) else None
        return [
            sample._replace(extra={**sample.extra, **of.in_batch(ends)}, is_constant=False, target_type=number)
            for (sample, ends), of in zip(found, targets, strict=True)
        ]

    def _around(self, home: Home, targets: Sequence[Targets], keys: Sequence[BatchKey]) -> Steps[Found]:
        """The neighbourhoods of the ends, without the targets that are edges of the graph."""
        seeds = [of.seeds() for of in targets]
        samples = yield from home.draw(self.sampler, [nodes for nodes, _ in seeds], keys)
        found = []
        for sample, (_, places), of in zip(samples, seeds, targets, strict=True):
            ends = places.to(sample.nodes.device)
            if isinstance(self.links, OwnLinks):
                sample = without_targets(home.rows, sample, ends[:, : of.num_edges], self.target_type)
            found.append((sample, ends))
        return found


ANSWERS, LEFT = "edge_label_answers", "edge_label_left"


@dataclass(frozen=True, eq=False)
class RootSampler:
    """Samples the trees of nodes at times of their own, of both ends of edges. A seed is the number of one of them.

    Args:
        sampler: Draws the trees.
        nodes: The roots.
        times: Their times.
        answers: The right pairs by the ids in their types, in the order of the first ones, shape (2, n).
        first: The id in the graph of the first of these in its type.
        target_type: The number of the edge type that these pairs are of.
        num_batches: How many batches a pass has. Each says how many are left after it.
    """

    sampler: TemporalSampler
    nodes: Tensor
    times: Tensor
    answers: Tensor
    first: int
    target_type: int
    num_batches: int = 0

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, *of) for of in zip(seeds, keys, strict=True)]

    def _sample(self, graph: Graph, ids: Tensor, batch_key: BatchKey) -> Sample:
        ids = ids[self.nodes[ids].argsort(stable=True)]  # as batches have nodes of several types
        sample = sample_at(self.sampler, graph, self.nodes[ids], self.times[ids], batch_key)
        answers = self.answers[:, torch.isin(self.answers[0], self.nodes[ids] - self.first)]
        left = torch.tensor([self.num_batches - 1 - batch_key.batch])
        extra = {**sample.extra, ANSWERS: answers, LEFT: left}
        return sample._replace(extra=extra, is_constant=False, target_type=self.target_type)
