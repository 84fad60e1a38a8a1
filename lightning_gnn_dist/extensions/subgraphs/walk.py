"""GraphSAINT by random walks (Zeng, Zhou, Srivastava, Kannan, Prasanna, ICLR 2020, arXiv:1907.04931).

    batch = the graph among the seeds and the nodes that a walk from each of them visits
    edge_weight(u, v) = A(u, v) / P(v in batch | u in batch)     node_norm(v) = 1 / (N P(v in batch))

Both probabilities are estimated by frequencies, which are counted beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import Hops, Layers, check_fields, whole
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import Array, Csr, is_no_row
from lightning_gnn_dist.engine.rng import below, draw, key, permutation
from lightning_gnn_dist.engine.sample import MAX_ENTRIES, BatchKey, Sample, csr_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import Weight, edge_weights
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.subgraph import induced

log = logging.getLogger(__name__)

_U = np.uint64

_BEFORE = -2  # takes the place of the epoch in a key, so that counted batches are others than those of training
_NO_NORMS = torch.zeros(0), torch.zeros(0)


@dataclass(frozen=True)
class RandomWalkSampler:
    """Make batches of the nodes that random walks from the seeds visit, and all edges among them.

    Walks go from receivers to senders. ``batch.edge_weight``, also the values of ``block.weighted_adj``, replaces the
    graph's: with it, a sum over the neighbours of a node is right on average over the batches that the node is in. Use
    layers that add up, as with :class:`LayerSampler`; ``block.adj``, without these weights, is refused. The loss may be
    its mean over the seeds, as with all samplers, or the paper's, over all training nodes of the batch:
    ``(losses * batch.node_norm)[batch.train_mask].sum()``, with ``Loading(all_labels=True)``.

    Before the first batch of a size, batches are drawn to count how often nodes and edges are in them. That takes at
    least as long as ``visits`` passes over the graph, and 4 bytes per edge; Ctrl-C takes effect only when it is done.
    A pass may have batches of two sizes, which differ by one.

    Args:
        num_hops: Layers of the model.
        walk_length: Steps of a walk.
        weight: Name of the graph's edge array that holds A, all at least 0. Default: 1 / in-degree.
        visits: How many of the counted batches a node is in, on average. With 0 nothing is counted: there is no
            ``node_norm``, and ``edge_weight`` is the graph's.
    """

    num_hops: Layers
    walk_length: Hops = 2
    weight: Weight = None
    visits: Annotated[int, whole(0, MAX_ENTRIES)] = 50
    is_for_nodes: ClassVar[bool] = True  # not for pairs of them

    def __post_init__(self) -> None:
        check_fields(self)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, batch_key) for ids, batch_key in self._checked(graph, seeds, keys)]

    def _checked(
        self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> list[tuple[Tensor, BatchKey]]:
        return check_bulk(
            graph, seeds, keys, untyped=f"RandomWalkSampler(visits={self.visits})" if self.visits else None
        )

    def _sample(self, graph: Graph, seeds: Tensor, batch_key: BatchKey) -> Sample:
        sample = self._walk(graph, seeds, batch_key, with_ids=True if self.visits else None)
        if not self.visits:
            return sample
        of_edges, of_nodes = self._norms(graph, seeds.numel(), batch_key.seed) if seeds.numel() else _NO_NORMS
        assert sample.edge_ids is not None
        return sample._replace(
            edge_weight=of_edges[sample.edge_ids],
            node_norm=of_nodes[sample.nodes],
            edge_ids=sample.edge_ids if graph.edge_arrays else None,
        )

    def _walk(self, graph: Graph, seeds: Tensor, batch_key: BatchKey, *, with_ids: bool | None) -> Sample:
        visited = np.empty(seeds.numel() * self.walk_length, np.int64)
        if not walk(csr_of(graph), seeds.numpy(), key(*batch_key, 0), self.walk_length, visited):
            raise graph_is_damaged(graph)
        return induced(graph, seeds, torch.from_numpy(visited), batch_key, self.num_hops, with_ids=with_ids)

    def _norms(self, graph: Graph, num_seeds: int, seed: int) -> tuple[Tensor, Tensor]:
        """``edge_weight`` of each edge and ``node_norm`` of each node in batches of ``num_seeds`` seeds."""
        return remembered(graph, (self, num_seeds, seed), lambda: self._count(graph, num_seeds, seed))

    def _count(self, graph: Graph, num_seeds: int, seed: int) -> tuple[Tensor, Tensor]:
        if self.weight is not None:
            edge_weights(graph, self.weight)  # refuses wrong weights before the long count
        roots = self._roots(graph)
        in_pass = max(1, roots.numel() // num_seeds)  # to permute for each batch would take longer than the walks
        nodes = torch.zeros(graph.num_nodes, dtype=torch.int32)
        edges = torch.zeros(graph.num_edges, dtype=torch.int32)
        batches = visited = 0
        whole = RandomWalkSampler(max(2, self.num_hops), self.walk_length)  # 2 hops give all nodes' rows
        while visited < self.visits * graph.num_nodes:
            number, within = divmod(batches, in_pass)
            if within == 0:
                order = roots[permutation(roots.numel(), seed, _BEFORE - number)]
            ids = order[within * num_seeds : (within + 1) * num_seeds]
            sample = whole._walk(graph, ids, BatchKey(seed, _BEFORE, batches), with_ids=True)
            nodes[sample.nodes] += 1
            edges[sample.edge_ids] += 1
            visited, batches = visited + sample.nodes.numel(), batches + 1
        log.info("Counted nodes and edges in %d batches of %d random walks", batches, num_seeds)
        return self._weights(graph, nodes, edges), batches / (graph.num_nodes * nodes.clamp(min=1)).float()

    def _roots(self, graph: Graph) -> Tensor:
        """The nodes that are seeds in training: those of ``train_mask``, or all."""
        if "train_mask" not in graph.node_arrays:
            return torch.arange(graph.num_nodes)
        roots = graph.split("train")
        if not roots.numel():
            raise ValueError(
                "Walks are counted from the training nodes, but train_mask marks none: mark some, leave the mask out "
                "to walk from all nodes, or set visits=0 to go without node_norm."
            )
        return roots

    def _weights(self, graph: Graph, nodes: Tensor, edges: Tensor) -> Tensor:
        """A (n + 1) / (k + 1) for an edge in k of its receiver's n batches: its mean is A / p; A n / k has a larger."""
        degrees = graph.degrees()
        if self.weight is None:
            values = 1.0 / degrees.repeat_interleave(degrees).float()
        else:
            values = torch.from_numpy(edge_weights(graph, self.weight))
        return values * (nodes + 1).repeat_interleave(degrees) / (edges + 1)


@compiled
def walk(csr: Csr, seeds: Array, key: np.uint64, length: int, out: Array) -> bool:
    """Walk ``length`` steps from each seed, each to a random sender if there is one. False if the graph is damaged."""
    for i in range(len(seeds)):
        node = np.int64(seeds[_U(i)])
        for step in range(length):
            first, last = csr.indptr[_U(node)], csr.indptr[_U(node + 1)]
            if is_no_row(first, last, len(csr.indices)):
                return False
            if last > first:
                node = np.int64(csr.indices[_U(first + below(draw(key, seeds[_U(i)], step), last - first))])
            if _U(node) >= _U(len(csr.indptr) - 1):
                return False
            out[_U(i * length + step)] = node
    return True
