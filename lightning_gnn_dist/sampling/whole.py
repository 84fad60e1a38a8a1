"""The whole part as one batch, without sampling: every step computes on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import Layers, check_fields
from lightning_gnn_dist.engine.sample import BatchKey, Sample, has_ids, refuse_repeated
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import memory_of
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.subgraph import by_distance, seeds_first


@dataclass(frozen=True)
class WholePartSampler:
    """Every node and every edge of the graph it is given, the seeds first, the others by their distance from these.

    Each block of ``batch.blocks``, and each layer of ``through_layers``, has the rows that the next one reads: those of
    a halo's outer nodes are computed in the first layers alone, or in none. Made for one batch per pass. The permuted
    graph is built once and kept while the seeds stay the same; it takes as much memory as the graph's edges. A batch
    has its seeds sorted, whatever their order was. Batches with the same seeds share their tensors: to write into one,
    use a copy, ``batch.clone()``.

    Args:
        num_hops: Layers of the model. The last one is computed for the seeds alone, the one before for their
            neighbours as well, and so on.
    """

    num_hops: Layers

    def __post_init__(self) -> None:
        check_fields(self)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids.sort().values) for ids, _ in check_bulk(graph, seeds, keys)]

    def _sample(self, graph: Graph, seeds: Tensor) -> Sample:
        with memory_of(graph) as known:  # only the last batch is kept: the next one is nearly always the same
            last: _Last | None = known.get(_Last)
            if last is None or last.sampler != self or not torch.equal(last.seeds, seeds):
                last = known[_Last] = _Last(seeds, self, _permute(graph, seeds, self.num_hops))
        return last.sample


class _Last(NamedTuple):
    seeds: Tensor
    sampler: WholePartSampler
    sample: Sample


def _permute(graph: Graph, seeds: Tensor, num_hops: int) -> Sample:
    refuse_repeated(seeds)
    graph.check_edges()
    hops = by_distance(graph.indptr, graph.indices, seeds, num_hops)
    sample = seeds_first(graph.indptr, graph.indices, hops, num_hops)
    return sample._replace(edge_ids=sample.edge_ids if has_ids(graph) else None, is_constant=True)
