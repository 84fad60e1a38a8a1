"""Neighbour sampling (Hamilton, Ying, Leskovec, NeurIPS 2017, arXiv:1706.02216), many batches at once.

    N_0 = seeds,   N_h = nodes first seen among sample(in-neighbours of v, s_h) for v in N_(h-1)

The bulk formulation is that of Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909); a row of their product
``Q A`` with a one-hot ``Q`` is a row of the graph's CSR, so the product is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_gnn_dist.checks import check_true_or_false
from lightning_gnn_dist.engine.hops import hop_keys, sample_hops
from lightning_gnn_dist.engine.kernels import Rule, sample
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.weights import NONE, check_weight, edge_weights
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import check_bulk, check_numbers


@dataclass(frozen=True)
class NeighborSampler:
    """Draw up to ``num_neighbors[h]`` in-neighbours of every node found at hop ``h``.

    A node is expanded once, with the number that belongs to the hop at which it was first seen, as in PyG's
    ``NeighborLoader``. Which neighbours it gets depends on the batch's key, the hop and the node alone.

    With ``weight``, edges are drawn one after the other in proportion to their weight: among those not drawn yet, or,
    with ``replace``, among all. ``batch.edge_weight`` is not corrected for it: it holds the graph's numbers, if the
    graph has any. Edges of weight 0 are drawn when a row has no others left.

    Args:
        num_neighbors: Neighbours to draw per node, one number per hop; -1 takes all of them, each once.
        replace: Draw with replacement: exactly so many edges for every node that has any.
        weight: Name of the graph's edge array that says how likely an edge is. Default: all are equally likely.
    """

    num_neighbors: Sequence[int]
    replace: bool = False
    weight: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_neighbors", self._checked())
        check_true_or_false(replace=self.replace)
        check_weight(self.weight)

    def _checked(self) -> tuple[int, ...]:
        return check_numbers("num_neighbors", self.num_neighbors, "NeighborSampler([15, 10])", or_all=True)

    @property
    def num_hops(self) -> int:
        return len(self.num_neighbors)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, batch_key) for ids, batch_key in check_bulk(graph, seeds, keys)]

    def _sample(self, graph: Graph, seeds: Tensor, batch_key: BatchKey) -> Sample:
        fanouts = np.array(self.num_neighbors, np.int64)
        rule = Rule(NONE if self.weight is None else edge_weights(graph, self.weight), self.replace)
        return sample_hops(
            graph,
            seeds,
            hop_keys(batch_key, self.num_hops),
            lambda indptr, indices, ids, keys, *batch: sample(indptr, indices, ids, fanouts, keys, rule, *batch),
        )
