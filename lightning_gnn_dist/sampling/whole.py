"""The whole part as one batch: no sampling, a step costs the whole part and sees all of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph, edge_positions
from lightning_gnn_dist.sampling.base import BatchKey, Sample, check_seeds, refuse_repeated

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
        if isinstance(self.num_hops, bool) or not isinstance(self.num_hops, int) or self.num_hops < 1:
            raise ValueError(f"num_hops must be the model's number of layers, 1 or more, got {self.num_hops!r}.")

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        if len(seeds) != len(keys):
            raise ValueError(f"Each batch needs a key, got {len(seeds)} lists of seeds and {len(keys)} keys.")
        return [self._sample(graph, check_seeds(ids, graph.num_nodes).sort().values) for ids in seeds]

    def _sample(self, graph: Graph, seeds: Tensor) -> Sample:
        with _LOCK:
            last = _LAST.get(graph)
            if last is None or last[1] != self.num_hops or not torch.equal(last[0], seeds):
                last = _LAST[graph] = seeds, self.num_hops, permute(graph, seeds, self.num_hops)
        return last[2]


def permute(graph: Graph, seeds: Tensor, num_hops: int) -> Sample:
    """The graph with its nodes renumbered, the seeds first; with one hop only the seeds' rows."""
    refuse_repeated(seeds)
    others = torch.ones(graph.num_nodes, dtype=torch.bool).index_fill_(0, seeds, False).nonzero().view(-1)
    nodes = torch.cat([seeds, others])
    place = torch.empty_like(nodes)
    place[nodes] = torch.arange(nodes.numel())

    rows = nodes if num_hops > 1 else seeds
    edges = edge_positions(graph.indptr, rows)
    degrees = graph.indptr[rows + 1] - graph.indptr[rows]
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    small = torch.int32 if edges.numel() < 2**31 else torch.int64

    of_seeds = int(indptr[seeds.numel()])
    unused = [0] * (num_hops - 1)  # all nodes are found at the first hop, all edges by the second
    return Sample(
        nodes=nodes,
        indptr=indptr.to(small),
        indices=place[graph.indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=[seeds.numel(), others.numel(), *unused],
        num_sampled_edges=[of_seeds, edges.numel() - of_seeds, *unused][:num_hops],
        edge_ids=edges if graph.edge_arrays else None,
        is_constant=True,
    )
