"""How many seeds an evaluation by time takes at once: their trees share nothing, so each takes memory of its own."""

from __future__ import annotations

import torch

from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.evaluation.choice import Counter, Evaluated
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler

_LOOKS = 64  # trees that are measured, spread over all seeds
_MARGIN = 2.0  # those of a batch may be larger than these


def seeds_at_once(
    graph: Graph, sampler: Sampler, seeds: Evaluated, counter: Counter, most: int, budget_bytes: int
) -> int:
    """Return how many seeds a batch should have: up to ``most``, if their trees keep to the budget.

    It depends on the graph and the seeds alone, so that it is the same on all ranks that have one budget.
    """
    count = len(seeds.ids)
    looks = torch.linspace(0, count - 1, min(_LOOKS, count)).round().to(torch.int64)
    some = list(seeds.at(looks).split(1))
    samples = sampler.sample_bulk(graph, some, [BatchKey(0, 0, 0)] * len(some))
    num_bytes = sum(counter.bytes_of(sample.nodes.numel(), sample.indices.numel()) for sample in samples)
    return min(most, max(1, int(budget_bytes * len(some) / (_MARGIN * max(1, num_bytes)))))
