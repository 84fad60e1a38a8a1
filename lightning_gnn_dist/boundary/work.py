"""What all ranks compute in a pass with the nodes that a boundary brings along, in times of one process.

A sampler that draws few neighbours computes as much for a seed wherever it lies. Batches that reach all of a part are
computed by every rank with all that came along, and so are whole parts, but for what a module with ``layers()`` leaves
out: each of its layers computes the rows that the next one reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of
from lightning_gnn_dist.layers.reach import EDGES_OF_A_NODE, Neighbourhoods
from lightning_gnn_dist.partition.partition_report import learned_from
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
        is_layered: Whether each layer computes only the rows that the next one reads.
    """

    num_layers: int
    most_of_batch: float
    batches_of_rank: int
    batches_of_one: int
    is_layered: bool = False

    @classmethod
    def of(cls, sampler: Sampler, batch_size: int, most_seeds: int, all_seeds: int, *, has_layers: bool) -> Pass:
        """Return the pass of ranks of which one has ``most_seeds`` seeds, and whose module may have ``layers()``."""
        of_rank, of_one = (max(1, -(-seeds // batch_size)) for seeds in (most_seeds, all_seeds))
        is_layered = has_layers and isinstance(sampler, WholePartSampler)
        return cls(sampler.num_hops, _most_of_batch(sampler, batch_size), of_rank, of_one, is_layered)

    def with_halos(self, graph: Graph, neighbourhoods: Neighbourhoods, hops: list[Tensor], seeds: Tensor) -> list[int]:
        """Return the work of a batch of a part with halos of 1, 2 ... hops.

        Args:
            graph: The whole graph.
            neighbourhoods: Those of the graph.
            hops: The nodes 0, 1, 2 ... hops away from what the rank holds.
            seeds: What it learns from.
        """
        distance = torch.full((graph.num_nodes,), self.num_layers + 1, dtype=torch.int16)
        for hop, nodes in enumerate(hops):
            distance[nodes] = hop
        computed = neighbourhoods.hops(seeds)[:-1] if self.is_layered else [torch.cat(hops)]
        rows, edges = torch.zeros(2, self.num_layers + 2, dtype=torch.float64)
        for layers, nodes in zip(range(self.num_layers, 0, -1), computed, strict=False):  # so many compute them
            away, degrees = distance[nodes].int(), degrees_of(graph.indptr, nodes)
            rows += layers * away.bincount(minlength=rows.numel())
            edges += layers * away.bincount(degrees.double(), rows.numel())
        work = edges.cumsum(0)[:-2] + EDGES_OF_A_NODE * rows.cumsum(0)[1:-1]  # the last hop receives nothing
        return [int(min(each, self.most_of_batch)) for each in work.tolist()]

    def of_one(self, graph: Graph) -> int:
        """Return the work of a batch of one process, which holds the whole graph."""
        seeds = learned_from(graph, graph.types.seeds).nonzero().view(-1)
        everything = [torch.arange(graph.num_nodes)]
        return self.with_halos(graph, Neighbourhoods(graph, self.num_layers), everything, seeds)[-1]

    def times(self, of_ranks: Sequence[int], of_one: int) -> float:
        """Return what ranks compute in a pass, whose batches take so much work, in times of one process."""
        return self.batches_of_rank * sum(of_ranks) / (self.batches_of_one * of_one) if of_one else 1.0


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
