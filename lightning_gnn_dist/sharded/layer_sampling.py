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

from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.layer_kernels import Layers, sample_layer
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.weights import NONE
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.fastgcn import FastGCNSampler
from lightning_gnn_dist.sampling.ladies import LadiesSampler
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.growing import GrowingBatch
from lightning_gnn_dist.sharded.remote_graph import FetchedRows, ShardedGraph, union

LayerWise = LadiesSampler | FastGCNSampler


def sample_layer_wise(
    graph: ShardedGraph, sampler: LayerWise, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what ``sampler`` draws from the whole graph, one sample for each batch. Collective the first time."""
    importance = importance_of(graph, sampler)
    batches = [GrowingBatch(ids, graph.num_nodes) for ids in seeds]
    for hop in range(sampler.num_hops):
        nodes, positions = union([batch.frontier for batch in batches])
        rows = yield from graph.rows(nodes, sampler.weight)
        values = NONE if rows.weights is None else rows.weights.numpy()
        layers = Layers(np.array(sampler.num_nodes, np.int64), values, *importance, sampler.normalize)
        for batch, at, batch_key in zip(batches, positions, keys, strict=True):
            _grow(batch, rows, at, key(*batch_key, hop), hop, layers)
    return [batch.sample() for batch in batches]


def importance_of(graph: ShardedGraph, sampler: LayerWise) -> tuple[Array, Array]:
    """Return what :meth:`LayerSampler.importance` does for one host. Collective, the first time."""
    if isinstance(sampler, LadiesSampler):
        return np.empty(0), np.empty(0)
    norms = remembered(graph, ("column norms", sampler.weight), lambda: graph.column_norms(sampler.weight).numpy())
    return norms, remembered(graph, ("scales", sampler.weight, sampler.num_nodes), lambda: sampler.scales(norms))


def _grow(batch: GrowingBatch, rows: FetchedRows, at: Tensor, word: np.uint64, hop: int, layers: Layers) -> None:
    """Draw a layer for the frontier of a batch; ``at`` are the places of its nodes among ``rows``."""
    known, work, table = batch.open(rows.senders, int((rows.starts[at + 1] - rows.starts[at]).sum()))
    csr, begin = (rows.starts.numpy(), rows.senders.numpy(), at.numpy()), len(known) - len(at)
    found = batch.checked(sample_layer(*csr, known, begin, word, hop, layers, work, table))
    starts = torch.from_numpy(work.starts[begin : len(known) + 1].copy())
    edges, ids = int(starts[-1]), None
    if rows.first_edges is not None:
        ids = rows.edge_ids(torch.from_numpy(work.positions[:edges].copy()))
    batch.add(found, work, starts.diff(), ids, torch.from_numpy(work.weights[:edges].copy()))
