"""The whole part as one batch: no sampling, a step costs the whole part and sees all of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import BatchKey, Sample, check_seeds, refuse_repeated
from lightning_gnn_dist.sampling.subgraph import check_num_hops, seeds_first

# Per graph the seeds and the sample of its last batch: the next one is nearly always the same.
_LAST: weakref.WeakKeyDictionary[Graph, tuple[Tensor, int, Sample]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class WholePartSampler:
    """Every node and every edge of the graph it is given, the seeds first.

    Made for one batch a pass. The permuted graph is built once for a set of seeds and used again; it costs
    as much memory as the graph itself. The order of the seeds does not matter: they come sorted.

    Args:
        num_hops: Layers of the model. Its last layer is computed for the seeds alone.
    """

    num_hops: int

    def __post_init__(self) -> None:
        check_num_hops(self.num_hops)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        if len(seeds) != len(keys):
            raise ValueError(f"Each batch needs a key, got {len(seeds)} lists of seeds and {len(keys)} keys.")
        return [self._sample(graph, check_seeds(ids, graph.num_nodes).sort().values) for ids in seeds]

    def _sample(self, graph: Graph, seeds: Tensor) -> Sample:
        with _LOCK:
            last = _LAST.get(graph)
            if last is None or last[1] != self.num_hops or not torch.equal(last[0], seeds):
                last = _LAST[graph] = seeds, self.num_hops, _permute(graph, seeds, self.num_hops)
        return last[2]


def _permute(graph: Graph, seeds: Tensor, num_hops: int) -> Sample:
    refuse_repeated(seeds)
    sample = seeds_first(graph.indptr, graph.indices, seeds, num_hops)
    return sample._replace(edge_ids=sample.edge_ids if graph.edge_arrays else None, is_constant=True)
