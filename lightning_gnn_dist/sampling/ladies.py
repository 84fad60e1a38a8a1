"""LADIES (Zou, Hu, Wang, Jiang, Sun, Gu, NeurIPS 2019, arXiv:1911.07323): layers drawn for the frontier they serve.

    importance(v) = sum over u in the frontier of A(u, v)^2      the column norms of Q A

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
    """Draw for each hop the nodes that matter most to those found at the hop before.

    ``batch.edge_weight`` holds A, corrected for the draw: see :class:`LayerSampler`. The paper's matrix is that of
    PyG's ``GCNNorm``, and the paper normalises. What is drawn depends on all seeds of the batch, so the slices of a
    correction batch that several ranks share see other nodes than the whole batch would.

    Args:
        num_nodes: Nodes to draw per hop, on average.
        weight: Name of the graph's edge array that holds A, all at least 0. None: 1 / in-degree.
        normalize: Scale each node's edge weights to the sum they have in A. Smaller variance, but biased.
    """

    def importance(self, graph: Graph) -> tuple[Array, Array]:
        return np.empty(0), np.empty(0)
