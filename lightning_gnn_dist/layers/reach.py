"""How far neighbourhoods reach, counted before any batch is made.

seeds -> nodes within 1, 2 ... hops, and the edges into them -> bytes of a batch, and work of a model on it
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.row_kernels import reach
from lightning_gnn_dist.engine.sample import graph_is_damaged
from lightning_gnn_dist.graph.graph import Graph

ALL = np.iinfo(np.int64).max
EDGES_OF_A_NODE = 8  # a row of a node costs a layer about as much as so many edges


class Reach(NamedTuple):
    """The neighbourhood of some seeds.

    Attributes:
        nodes: How many nodes lie within 0, 1, 2 ... hops.
        edges: How many edges lead to nodes within 0, 1 ... hops: those of the innermost layer, of the one before, ...
    """

    nodes: list[int]
    edges: list[int]

    @property
    def work(self) -> float:
        """What the layers of a model cost on it, in edges."""
        return float(sum(self.edges) + EDGES_OF_A_NODE * sum(self.nodes[:-1]))


class Neighbourhoods:
    """Counts the neighbourhoods of a graph. It holds 9 bytes for each node.

    Args:
        graph: The graph.
        num_hops: The hops of a neighbourhood.
    """

    def __init__(self, graph: Graph, num_hops: int) -> None:
        self._graph, self._num_hops = graph, num_hops
        self._found = np.zeros(graph.num_nodes, np.bool_)
        self._queue = np.empty(graph.num_nodes, np.int64)

    def of(self, seeds: Tensor, most_edges: int = ALL) -> Reach:
        """Count the neighbourhood of distinct seeds; stop soon after ``most_edges`` edges."""
        nodes, edges = np.zeros(self._num_hops + 1, np.int64), np.zeros(self._num_hops, np.int64)
        graph = self._graph
        csr = graph.indptr.numpy(), graph.indices.numpy()
        if not reach(*csr, seeds.numpy(), most_edges, self._found, self._queue, nodes, edges):
            raise graph_is_damaged(graph)
        return Reach(nodes.tolist(), edges.tolist())

    def hops(self, seeds: Tensor) -> list[Tensor]:
        """Return the nodes 0, 1, 2 ... hops away from distinct seeds."""
        ends = [0, *self.of(seeds).nodes]
        return [torch.from_numpy(self._queue[start:end].copy()) for start, end in pairwise(ends)]

    def senders(self, nodes: Tensor) -> Tensor:
        """Return these nodes and all that send to them, in increasing order."""
        return torch.cat(self.hops(nodes)[:2]).sort().values
