"""Layer-wise samplers: a layer draws nodes for the whole frontier, and corrects their edges' weights.

    P(v) = min(1, c * importance(v)),   c such that the sum over all v is num_nodes[h]
    edge_weight(u, v) = A(u, v) / P(v)   for the v drawn, each independently of the others
    importance(v) = sum over u of A(u, v)^2      LADIES: over the frontier; FastGCN: over all nodes, once for a graph

With independent draws, P is exact, so the sum ``sum_v edge_weight(u, v) x(v)`` has the expectation ``(A x)(u)``
(Poisson sampling: Horvitz and Thompson, JASA 1952); with a fixed number of draws, nobody could compute P. So the
number of nodes of a layer varies around ``num_nodes[h]``. If there are no more candidates than that, all are taken,
and the layer is exact.

LADIES: Zou, Hu, Wang, Jiang, Sun, Gu, NeurIPS 2019, arXiv:1911.07323; its bulk formulation: Tripathy, Yelick, Buluc,
MLSys 2024, arXiv:2311.02909. FastGCN: Chen, Ma, Xiao, ICLR 2018, arXiv:1801.10247.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from lightning_gnn_dist.checks import check_fields
from lightning_gnn_dist.engine.kernels import Array, Draws
from lightning_gnn_dist.engine.layer_kernels import LayerDraws, add_column_norms, sample_layers, scale_to
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, csr_of, graph_is_damaged, sample_hops
from lightning_gnn_dist.engine.weighted import NONE, Rule, Weight, edge_weights
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.base import check_bulk, check_numbers


@dataclass(frozen=True)
class LayerSampler(ABC):
    """Draw about ``num_nodes[h]`` nodes for all nodes found at hop ``h`` together.

    A subclass overrides :meth:`importance`. A node is expanded once, at the hop at which it was first seen, and has
    that hop's edges in every layer, as in ``NeighborSampler``: so one adjacency serves all layers, and a model computes
    the same on ``batch.edge_index`` as on ``batch.blocks``.

    ``batch.edge_weight``, also the values of ``block.weighted_adj``, replaces the graph's. It holds entries of A,
    divided by probabilities, so use a layer that adds up: ``GCNConv(normalize=False)``, ``GraphConv`` or
    ``SAGEConv(aggr="sum")``. A layer that takes a mean would divide twice. ``block.adj``, without these weights, is
    refused.

    Over all draws, the sums of one layer are right on average. Those of several layers are only where no path takes an
    edge twice, because all layers share one draw of each edge. So leave out self-loops, also those of ``GCNNorm``, and
    let the layer add the node itself, as ``GraphConv`` and ``SAGEConv`` do.

    Args:
        num_nodes: Nodes to draw per hop, on average.
        weight: Name of the graph's edge array that holds A, all at least 0, for instance that of PyG's ``GCNNorm``.
            Default: 1 / in-degree, with which a sum over neighbours is their mean.
        normalize: Scale each node's edge weights to the sum that they have in A: less variance, but sums are no
            longer right on average.
    """

    num_nodes: Sequence[int]
    weight: Weight = None
    normalize: bool = False
    is_for_nodes: ClassVar[bool] = True  # not for pairs of them

    def __post_init__(self) -> None:
        example = f"{type(self).__name__}([512, 512])"
        object.__setattr__(self, "num_nodes", check_numbers("num_nodes", self.num_nodes, example))
        check_fields(self)

    @property
    def num_hops(self) -> int:
        return len(self.num_nodes)

    @abstractmethod
    def importance(self, graph: Graph) -> tuple[Array, Array]:
        """The importance of each node and c of each hop; two empty arrays if importance depends on the frontier."""

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk = check_bulk(graph, seeds, keys, untyped=type(self).__name__)
        values = NONE if self.weight is None else edge_weights(graph, self.weight)
        layers = LayerDraws(np.array(self.num_nodes, np.int64), values, *self.importance(graph), self.normalize)
        return [self._sample(graph, ids, batch_key, layers) for ids, batch_key in bulk]

    def _sample(self, graph: Graph, seeds: Tensor, batch_key: BatchKey, layers: LayerDraws) -> Sample:
        every = np.full((self.num_hops, 1), -1, np.int64)
        draws = Draws(None, every, typed_keys(*batch_key, self.num_hops, 1), Rule(None, False))
        tables = self.num_hops + 1
        return sample_hops(graph, seeds, self.num_hops, sample_layers, draws, layers, tables=tables, weighs=True)


@dataclass(frozen=True)
class FastGCNSampler(LayerSampler):
    """Draw nodes of the whole graph for each hop; those that send to no node of the hop before are left out.

    On a large sparse graph that is most of them: :class:`LadiesSampler` needs fewer. ``batch.edge_weight`` holds A,
    corrected for the draw: see :class:`LayerSampler`.

    Args:
        num_nodes: Nodes to draw per hop, on average.
        weight: Name of the graph's edge array that holds A, all at least 0. Default: 1 / in-degree.
        normalize: Scale each node's edge weights to the sum that they have in A: less variance, but biased.
    """

    def importance(self, graph: Graph) -> tuple[Array, Array]:
        return remembered(graph, ("importance", self.weight, self.num_nodes), lambda: self._importance(graph))

    def _importance(self, graph: Graph) -> tuple[Array, Array]:
        values = NONE if self.weight is None else edge_weights(graph, self.weight)
        norms = np.zeros(graph.num_nodes)
        if not add_column_norms(csr_of(graph), values, norms):
            raise graph_is_damaged(graph)
        return norms, self.scales(norms)

    def scales(self, norms: Array) -> Array:
        """The factor c of each hop, see above."""
        return np.array([scale_to(norms, size) for size in self.num_nodes])


@dataclass(frozen=True)
class LadiesSampler(LayerSampler):
    """Draw nodes for each hop, in proportion to how much they contribute to the nodes of the hop before.

    ``batch.edge_weight`` holds A, corrected for the draw: see :class:`LayerSampler`. The paper takes A from PyG's
    ``GCNNorm``, and normalises. What is drawn depends on all seeds of a batch, so ranks that each take a slice of a
    correction batch draw other nodes than one rank would for the whole batch.

    Args:
        num_nodes: Nodes to draw per hop, on average.
        weight: Name of the graph's edge array that holds A, all at least 0. Default: 1 / in-degree.
        normalize: Scale each node's edge weights to the sum that they have in A: less variance, but biased.
    """

    def importance(self, graph: Graph) -> tuple[Array, Array]:
        return np.empty(0), np.empty(0)
