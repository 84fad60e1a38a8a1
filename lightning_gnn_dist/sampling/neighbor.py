"""Neighbour sampling (Hamilton, Ying, Leskovec, NeurIPS 2017, arXiv:1706.02216), many batches at once.

    N_0 = seeds,   N_h = nodes first seen among sample(in-neighbours of v, s_h) for v in N_(h-1)

The bulk formulation is that of Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909); a row of their product
``Q A`` with a one-hot ``Q`` is a row of the graph's CSR, so the product is never formed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import BatchKey, Sample, check_seeds, refuse_repeated
from lightning_gnn_dist.sampling.kernels import REPEATED_SEED, Rule, Work, sample
from lightning_gnn_dist.sampling.rng import key
from lightning_gnn_dist.sampling.scratch import Scratch, scratch_of_thread
from lightning_gnn_dist.sampling.weights import NONE, edge_weights

MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True)
class NeighborSampler:
    """Draw up to ``num_neighbors[h]`` in-neighbours of every node found at hop ``h``.

    A node is expanded once, with the number that belongs to the hop at which it was first seen, as in PyG's
    ``NeighborLoader``. Which neighbours it gets depends on the batch's key, the hop and the node alone.

    With ``weight``, edges are drawn one after the other in proportion to their weight among those still there, or,
    with ``replace``, among all. Nothing is corrected for it: where the graph has an ``edge_weight``, the batch has
    the same numbers. Edges of weight 0 are drawn when a row has no others left.

    Args:
        num_neighbors: Neighbours per node and hop, the seeds' hop first; -1 takes all of them, once.
        replace: Draw exactly so many for every node that has in-neighbours, the same edge perhaps several times.
        weight: Name of the graph's edge array that says how likely an edge is. None: all are equally likely.
    """

    num_neighbors: Sequence[int]
    replace: bool = False
    weight: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_neighbors", _checked(self.num_neighbors))
        if not isinstance(self.replace, bool):
            raise ValueError(f"replace must be True or False, got {self.replace!r}.")

    @property
    def num_hops(self) -> int:
        return len(self.num_neighbors)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, place) for ids, place in zip(seeds, keys, strict=True)]

    def _sample(self, graph: Graph, seeds: Tensor, place: BatchKey) -> Sample:
        seeds = check_seeds(seeds, graph.num_nodes)
        scratch = scratch_of_thread(graph.indices.numpy().dtype)
        _reserve(scratch, seeds.numel())
        num_nodes, num_edges = np.zeros((2, self.num_hops + 1), np.int64)
        fanouts = np.array(self.num_neighbors, np.int64)
        keys = np.array([key(*place, hop) for hop in range(self.num_hops)], np.uint64)
        csr = graph.indptr.numpy(), graph.indices.numpy()
        rule = Rule(NONE if self.weight is None else edge_weights(graph, self.weight), self.replace)
        while True:
            table = scratch.open_table(graph.num_nodes)
            needed = sample(*csr, seeds.numpy(), fanouts, keys, rule, scratch.work, table, num_nodes, num_edges)
            if needed <= scratch.capacity:
                break
            _reserve(scratch, needed)
        if needed == REPEATED_SEED:
            refuse_repeated(seeds)
        return _copied(scratch.work, num_nodes.tolist(), num_edges[:-1].tolist(), bool(graph.edge_arrays))


def _copied(work: Work, num_nodes: list[int], num_edges: list[int], with_edges: bool) -> Sample:
    """The batch in arrays of its own: the scratch belongs to the next one."""
    rows, edges = sum(num_nodes[:-1]), sum(num_edges)
    return Sample(
        nodes=torch.from_numpy(work.nodes[: sum(num_nodes)].astype(np.int64)),
        indptr=torch.from_numpy(work.starts[: rows + 1].astype(np.int32)),
        indices=torch.from_numpy(work.columns[:edges].astype(np.int32)),
        num_sampled_nodes=num_nodes,
        num_sampled_edges=num_edges,
        edge_ids=torch.from_numpy(work.positions[:edges].copy()) if with_edges else None,
    )


def _checked(num_neighbors: Sequence[int]) -> tuple[int, ...]:
    if isinstance(num_neighbors, str) or not isinstance(num_neighbors, Sequence):
        raise ValueError(
            f"num_neighbors must list one number per hop, got {num_neighbors!r}. "
            "For two hops write NeighborSampler([15, 10])."
        )
    if not num_neighbors:
        raise ValueError("num_neighbors is empty: give one number per layer of the model, like [15, 10].")
    for number in num_neighbors:
        if isinstance(number, bool) or not hasattr(number, "__index__") or number == 0 or number < -1:
            raise ValueError(
                f"num_neighbors must hold positive integers, or -1 for all neighbours, got {number!r} "
                f"in {list(num_neighbors)}."
            )
    return tuple(operator.index(number) for number in num_neighbors)


def _reserve(scratch: Scratch, entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"A batch may have {MAX_ENTRIES} edges, but this one needs at least {entries}. "
            "Use fewer seeds a batch, or a limit instead of -1 in num_neighbors."
        )
    if entries > scratch.capacity:
        scratch.reserve(entries)
