"""ShaDow (Zeng, Zhang, Xia, Srivastava, et al., NeurIPS 2021, arXiv:2201.07858): each seed has a graph of its own.

G(s) = the graph among s and the nodes that neighbour sampling finds from s;   a batch holds these side by side
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import Layers, check_fields
from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import DAMAGED, ZERO, Array, Csr, Draws, Table, Work, expand, place_seeds
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, sample_hops
from lightning_gnn_dist.engine.subgraph_kernels import induce
from lightning_gnn_dist.engine.weighted import Rule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import check_bulk, check_numbers
from lightning_gnn_dist.sampling.subgraph import by_distance, seeds_first

_U = np.uint64


@dataclass(frozen=True)
class ShadowSampler:
    """Draw a small graph around each seed. The model may have more layers than this graph has hops.

    A node of several seeds' graphs is in the batch several times, so ``batch.n_id`` repeats. The graphs share no edges.

    Args:
        num_neighbors: Neighbours to draw per hop; -1 takes all. The graph has all edges among its nodes, also others.
        num_hops: Layers of the model.
    """

    num_neighbors: Sequence[int]
    num_hops: Layers
    is_for_nodes: ClassVar[bool] = True  # not for pairs of them

    def __post_init__(self) -> None:
        example = "ShadowSampler([10, 5], num_hops=3)"
        numbers = check_numbers("num_neighbors", self.num_neighbors, example, or_all=True)
        object.__setattr__(self, "num_neighbors", numbers)
        check_fields(self)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, batch_key) for ids, batch_key in check_bulk(graph, seeds, keys)]

    def _sample(self, graph: Graph, seeds: Tensor, batch_key: BatchKey) -> Sample:
        fanouts, roots = np.array(self.num_neighbors, np.int64).reshape(-1, 1), np.zeros(seeds.numel() + 1, np.int64)
        draws = Draws(None, fanouts, typed_keys(*batch_key, len(fanouts), 1), Rule(None, False))

        def kernel(csr: Csr, ids: Array, work: Work, table: Table, *of: Array) -> int:
            num_nodes, num_edges = of
            num_edges[0] = sample_egos(csr, ids, draws, work, table, roots)
            if num_edges[0] < 0:
                return int(num_edges[0])
            num_nodes[0] = roots[-1]
            return int(max(num_edges[0], num_nodes[0]))

        side = sample_hops(graph, seeds, len(fanouts), kernel)  # all nodes count as hop 0
        at = torch.from_numpy(roots)
        own = at[:-1].repeat_interleave(at.diff()).repeat_interleave(side.indptr.diff())  # start of each edge's graph
        csr = side.indptr.long(), side.indices + own
        sample = seeds_first(*csr, by_distance(*csr, at[:-1], 1), self.num_hops)
        return sample._replace(
            nodes=side.nodes[sample.nodes], edge_ids=None if side.edge_ids is None else side.edge_ids[sample.edge_ids]
        )


@compiled
def sample_egos(csr: Csr, seeds: Array, draws: Draws, work: Work, table: Table, roots: Array) -> Any:
    """Sample a graph for each seed into ``work``, one behind the other; ``roots`` receives where they start.

    The nodes of a graph are those that neighbour sampling finds. It is sampled into views of ``work`` that begin where
    the graph before ended, with an epoch that hides the table's entries of that graph.
    """
    room, nodes, edges = len(work.positions), ZERO, ZERO
    work.starts[0] = 0
    for i in range(len(seeds)):
        mine = _behind(work, nodes, edges)
        own = Table(table.entries, table.shift, table.epoch + nodes)
        count = place_seeds(seeds[i : i + 1], mine, own)
        begin = ZERO
        for hop in range(len(draws.fanouts)):
            others = nodes + count + 1
            met = expand(csr, begin, count, others, hop, draws, draws.edge_type, draws.rule.weights, mine, own)
            if met < 0:
                return DAMAGED
            total = mine.starts[_U(count)]
            if nodes + edges + count + total >= room:
                return 2 * room + total
            begin, count = count, met
        total = induce(csr, count, mine, own)
        if total < 0:
            return DAMAGED
        if nodes + edges + count + total >= room:
            return 2 * room + total
        roots[_U(i)] = nodes
        for row in range(count + 1):
            mine.starts[_U(row)] += edges
        nodes, edges = nodes + count, edges + total
    roots[_U(len(seeds))] = nodes
    return edges


@part
def _behind(work: Work, nodes: int, edges: int) -> Any:
    """Views of ``work`` that begin after ``nodes`` nodes and ``edges`` edges."""
    return Work(
        work.nodes[nodes:],
        work.starts[nodes:],
        work.positions[edges:],
        work.columns[edges:],
        work.first,
        work.degree,
        work.weights,
        work.kinds[edges:],
    )
