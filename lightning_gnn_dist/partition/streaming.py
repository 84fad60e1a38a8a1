r"""Streaming: it reads each node once per pass, and takes memory for an entry per node.

LDG, linear deterministic greedy (Stanton & Kliot, "Streaming graph partitioning for large distributed
graphs", KDD 2012), gives node v to the part

.. math::
    \arg\max_p \; |N(v) \cap S_p| \left( 1 - \frac{|S_p|}{C} \right)

:math:`S_p` are the nodes that part p was given so far, :math:`C` is how many it may hold. In further passes
(Nishimura & Ugander, "Restreaming graph partitioning", KDD 2013) the parts start empty again, but a
neighbour that has not come yet counts where the pass before put it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch

from lightning_gnn_dist.checks import check_fields, whole, within
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition import kernels
from lightning_gnn_dist.partition.base import MAX_SHARE, Partition, check_request, part_capacity
from lightning_gnn_dist.partition.kernels import Array
from lightning_gnn_dist.partition.random import generator

Order = Literal["natural", "random"]
MAX_PASSES = 10_000  # each reads all edges


@dataclass(frozen=True)
class StreamingPartitioner:
    r"""Fewer cut edges than random, for graphs too large for METIS.

    Nodes are read one by one, each with its row of the CSR: :math:`N(v)` are its in-neighbours, never its
    out-neighbours. For an undirected graph, stored in both directions, that makes no difference. On a directed
    graph a single pass misses every edge whose sender comes after its receiver; further passes see all of
    them, from the receiver's side. Self loops do not count, an edge stored twice counts twice. A node without a
    placed in-neighbour goes to the emptiest part.

    Args:
        slack: A part holds at most :math:`C = (1 + \text{slack}) N / P` nodes and at least
            :math:`(1 - \text{slack}) N / P`, in whole nodes.
        passes: How often the nodes are read; 1 is what the paper does. Every pass reads all edges. On real graphs
            five passes cut about half as many edges as one does, and more passes gain little.
        order: ``"natural"`` takes the nodes as they are stored: a memory map is read from front to back,
            neighbours that are stored together stay together, and the seed changes nothing. ``"random"``
            shuffles them, for a graph whose storage order misleads; every row is then a jump on the disk.
    """

    slack: Annotated[float, within(0, MAX_SHARE, "0.05 lets a part hold 5% more or less than the average")] = 0.05
    passes: Annotated[int, whole(1, MAX_PASSES)] = 5
    order: Order = "natural"

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        graph.check_edges()
        capacity = part_capacity(graph.num_nodes, num_parts, self.slack)
        least = max(1, int((1 - self.slack) * graph.num_nodes / num_parts))
        order, assignment = self._order(graph.num_nodes, seed), np.full(graph.num_nodes, -1, np.int32)
        for _ in range(self.passes):
            sizes = np.zeros(num_parts, np.int64)  # nodes are still where they were, for their neighbours
            kernels.stream(graph.indptr.numpy(), graph.indices.numpy(), order, assignment, sizes, capacity, least)
        return Partition(torch.from_numpy(assignment), num_parts)

    def _order(self, num_nodes: int, seed: int) -> Array:
        """The order in which nodes are read; empty for 0, 1, 2, ..."""
        return generator(seed).permutation(num_nodes if self.order == "random" else 0)
