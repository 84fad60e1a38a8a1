"""FastGCN (Chen, Ma, Xiao, ICLR 2018, arXiv:1801.10247): every layer is drawn from the whole graph.

importance(v) = sum over all u of A(u, v)^2      the squared column norms of A, computed once for each graph
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.layer_kernels import add_column_norms, scale_to
from lightning_gnn_dist.engine.weights import NONE, edge_weights
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.layer import LayerSampler


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
        if not add_column_norms(graph.indptr.numpy(), graph.indices.numpy(), values, norms):
            raise graph_is_damaged(graph)
        return norms, self.scales(norms)

    def scales(self, norms: Array) -> Array:
        """The factor c of each hop, see :mod:`layer`."""
        return np.array([scale_to(norms, size) for size in self.num_nodes])
