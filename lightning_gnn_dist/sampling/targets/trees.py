"""Trees around events: each end of a target is the root of one, at the time of the target.

The same node at the same time is one root, however many targets it is an end of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.sampling.links import TargetType, kinds_of, without
from lightning_gnn_dist.sampling.targets.home import Home
from lightning_gnn_dist.sampling.targets.tables import Targets, name_of_targets
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.turns import Steps


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
    target_type: TargetType | None,
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
    home: Home, sample: Sample, ends: Tensor, pairs: Tensor, target_type: TargetType | None
) -> tuple[Tensor, Tensor]:
    """The edges of a sample between the ends of a target, in a tree of that target, and the times of these trees."""
    row = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff().to(torch.int64))
    tree, sent = sample.extra["batch"][row], torch.stack([sample.nodes[sample.indices], sample.nodes[row]])
    number = sent.amin(0) * home.num_nodes + sent.amax(0)
    asked = (pairs.amin(0) * home.num_nodes + pairs.amax(0)).repeat(2)
    known, place = torch.cat([number, asked]).unique(return_inverse=True)
    of_edges, of_targets = place.split([number.numel(), asked.numel()])
    is_between = torch.isin(tree * known.numel() + of_edges, ends.view(-1) * known.numel() + of_targets)
    if target_type is not None:
        is_between &= target_type.shows(home.rows, sample)
    at = is_between.nonzero().view(-1)
    return at, sample.extra[SEED_TIME][tree[at]]


def _without_now(
    home: Home,
    time: str,
    samples: Sequence[Sample],
    between: Sequence[tuple[Tensor, Tensor]],
    target_type: TargetType | None,
) -> Steps[list[Sample]]:
    """The samples without those of some edges of each whose times are those of their trees."""
    places = [at for at, _ in between]
    ids = torch.cat([_ids_of(sample)[at] for sample, at in zip(samples, places, strict=True)])
    kinds, numbers = torch.zeros_like(ids), [0]
    if target_type is not None:
        numbers = target_type.numbers
        kinds = torch.cat([kinds_of(home.rows, sample)[at] for sample, at in zip(samples, places, strict=True)])
    times = torch.empty_like(ids)
    for number in numbers:
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
