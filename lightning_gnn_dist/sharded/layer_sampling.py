"""Layer-wise sampling of a sharded graph: the same draws, bit for bit, as where one host has all rows.

    P = Q A, row by row: the owners of a bulk's frontier nodes send their rows, once for all batches of the bulk

Importances are sums of squares over the rows, and floating point sums depend on their order. So owners send the entries
of their rows in order, and the rank that makes the batch adds them up as one host would. Entries take 4 bytes an edge;
sums would take 12 bytes for each sender, and the chosen edges would still have to be sent. Q A needs only the rows of A
that Q names, and shards are made of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import reserve
from lightning_gnn_dist.engine.kernels import REPEATED_SEED, Array
from lightning_gnn_dist.engine.layer_kernels import Layers, sample_layer
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.scratch import scratch_of_thread
from lightning_gnn_dist.engine.weights import NONE
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.fastgcn import FastGCNSampler
from lightning_gnn_dist.sampling.ladies import LadiesSampler
from lightning_gnn_dist.sharded.remote_graph import FetchedRows, ShardedGraph, union

LayerWise = LadiesSampler | FastGCNSampler


def sample_layer_wise(
    graph: ShardedGraph, sampler: LayerWise, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[Sample]:
    """Return what ``sampler`` draws from the whole graph, one sample for each batch. Collective the first time."""
    importance = importance_of(graph, sampler)
    batches = [_Batch(check_seeds(ids, graph.num_nodes), graph.num_nodes) for ids in seeds]
    for hop in range(sampler.num_hops):
        nodes, positions = union([batch.frontier for batch in batches])
        rows = graph.rows(nodes, sampler.weight)
        values = NONE if rows.weights is None else rows.weights.numpy()
        layers = Layers(np.array(sampler.num_nodes, np.int64), values, *importance, sampler.normalize)
        for batch, at, batch_key in zip(batches, positions, keys, strict=True):
            batch.grow(rows, at, key(*batch_key, hop), hop, layers)
    return [batch.sample() for batch in batches]


def importance_of(graph: ShardedGraph, sampler: LayerWise) -> tuple[Array, Array]:
    """Return what :meth:`LayerSampler.importance` does for one host. Collective, the first time."""
    if isinstance(sampler, LadiesSampler):
        return np.empty(0), np.empty(0)
    norms = remembered(graph, ("column norms", sampler.weight), lambda: graph.column_norms(sampler.weight).numpy())
    return norms, remembered(graph, ("scales", sampler.weight, sampler.num_nodes), lambda: sampler.scales(norms))


class _Batch:
    """A batch that grows by one hop at a time.

    Args:
        seeds: Its first nodes, by their ids in the whole graph.
        num_nodes: The number of nodes of the whole graph.
    """

    def __init__(self, seeds: Tensor, num_nodes: int) -> None:
        self._hops, self._num_nodes = [seeds], num_nodes
        self._counts: list[Tensor] = []
        self._columns: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._edge_ids: list[Tensor] = []

    @property
    def frontier(self) -> Tensor:
        """The nodes that were found last."""
        return self._hops[-1]

    def grow(self, rows: FetchedRows, at: Tensor, word: np.uint64, hop: int, layers: Layers) -> None:
        """Draw a layer for the frontier; ``at`` are the places of its nodes among ``rows``."""
        known, begin = torch.cat(self._hops), sum(map(len, self._hops[:-1]))
        scratch = scratch_of_thread(rows.senders.numpy().dtype)
        reserve(scratch, len(known) + int((rows.starts[at + 1] - rows.starts[at]).sum()))
        work, table = scratch.work, scratch.open_table(self._num_nodes, 1)
        csr = rows.starts.numpy(), rows.senders.numpy(), at.numpy()
        found = sample_layer(*csr, known.numpy(), begin, word, hop, layers, work, table)
        if found == REPEATED_SEED:
            refuse_repeated(self._hops[0])
        starts = torch.from_numpy(work.starts[begin : len(known) + 1].copy())
        edges = int(starts[-1])
        self._counts.append(starts.diff())
        self._hops.append(torch.from_numpy(work.nodes[len(known) : found].astype(np.int64)))
        self._columns.append(torch.from_numpy(work.columns[:edges].astype(np.int32)))
        self._weights.append(torch.from_numpy(work.weights[:edges].copy()))
        if rows.first_edges is not None:
            self._edge_ids.append(rows.edge_ids(torch.from_numpy(work.positions[:edges].copy())))

    def sample(self) -> Sample:
        degrees = torch.cat(self._counts)
        return Sample(
            nodes=torch.cat(self._hops),
            indptr=torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).to(torch.int32),
            indices=torch.cat(self._columns),
            num_sampled_nodes=[len(nodes) for nodes in self._hops],
            num_sampled_edges=[len(columns) for columns in self._columns],
            edge_ids=torch.cat(self._edge_ids) if self._edge_ids else None,
            edge_weight=torch.cat(self._weights),
        )
