"""What all ranks compute in a pass with the nodes that a boundary brings along, in times of one process.

A sampler that draws few neighbours computes as much for a seed wherever it lies. Whole parts, and batches that reach
all of a part, are computed by every rank with all that came along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.reach import EDGES_OF_A_NODE, Reach
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler


class Pass(NamedTuple):
    """A pass over all training nodes. Work is counted in edges of a layer.

    Attributes:
        num_layers: Layers of the model.
        most_of_batch: The most work of a batch, however large the graph is.
        batches_of_rank: Batches of each rank.
        batches_of_one: Batches of one process.
    """

    num_layers: int
    most_of_batch: float
    batches_of_rank: int
    batches_of_one: int

    @classmethod
    def of(cls, sampler: Sampler, batch_size: int, most_seeds: int, all_seeds: int) -> Pass:
        """Return the pass of ranks of which one has ``most_seeds`` seeds."""
        of_rank, of_one = (max(1, -(-seeds // batch_size)) for seeds in (most_seeds, all_seeds))
        return cls(sampler.num_hops, _most_of_batch(sampler, batch_size), of_rank, of_one)

    def of_batch(self, num_nodes: int, num_edges: int) -> int:
        """Return the work of a batch in a graph of so many nodes and edges."""
        return int(min(self.num_layers * (num_edges + EDGES_OF_A_NODE * num_nodes), self.most_of_batch))

    def with_halos(self, found: Reach) -> list[int]:
        """Return the work of a batch of a part with halos of 1, 2 ... hops."""
        return [self.of_batch(nodes, edges) for nodes, edges in zip(found.nodes[1:], found.edges, strict=True)]

    def times(self, of_ranks: Sequence[int], graph: Graph) -> float:
        """Return what ranks compute in a pass, whose batches take so much work, in times of one process."""
        of_one = self.batches_of_one * self.of_batch(graph.num_nodes, graph.num_edges)
        return self.batches_of_rank * sum(of_ranks) / of_one if of_one else 1.0


def _most_of_batch(sampler: Sampler, batch_size: int) -> float:
    """Return the work of a batch none of whose nodes are drawn twice; 0 where a part does not change it."""
    if isinstance(sampler, WholePartSampler):
        return math.inf
    if not isinstance(sampler, NeighborSampler):
        return 0.0
    numbers = sampler.num_neighbors
    per_hop = list(numbers) if isinstance(numbers, Sequence) else [*map(_added, zip(*numbers.values(), strict=True))]
    work, found, layers = 0.0, float(batch_size), len(per_hop)
    for hop, limit in enumerate(per_hop):
        edges = found * (math.inf if limit < 0 else limit)
        work += (layers - hop) * (edges + EDGES_OF_A_NODE * found)  # the nodes of a hop are computed so often
        found = edges
    return work


def _added(limits: Sequence[int]) -> int:
    """Return how many neighbours a node draws of all edge types; -1 is all."""
    return -1 if -1 in limits else sum(limits)
