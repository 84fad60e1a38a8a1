"""Batches of a sharded graph: the same, bit for bit, as where every host has the graph.

frontier -> its owners draw neighbours, hop by hop -> ... -> the rows of all nodes of a bulk, others' fetched once

Layer-wise samplers take P = Q A, row by row: the owners of a bulk's frontier nodes send their rows, once for all
batches of the bulk. Importances are sums of squares over the rows, and floating point sums depend on their order. So
owners send the entries of their rows in order, and the rank that makes the batch adds them up as one host would.
Entries take 4 bytes an edge; sums would take 12 for each sender, and the chosen edges would still have to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import Stream
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.layer_kernels import LayerDraws, sample_layer
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.weighted import NONE
from lightning_gnn_dist.extensions.larger_than_memory.ahead import AheadSource
from lightning_gnn_dist.extensions.links.link_sampler import Home, LinkSampler
from lightning_gnn_dist.extensions.shards.draws import Drawn, DrawRule, GrowingBatch, draw_hops, whole_rows
from lightning_gnn_dist.extensions.shards.links import draw_false_ends
from lightning_gnn_dist.extensions.shards.owner import EDGES, Message, Question
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph, union
from lightning_gnn_dist.extensions.shards.temporal import prepare_times, sample_at_times, sample_timed
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.graph.typed.names import TypeNames, have_names
from lightning_gnn_dist.homes.settings import Loading
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.turns import Steps

LayerWise = LadiesSampler | FastGCNSampler
ShardedSampler = NeighborSampler | TemporalSampler | LayerWise | LinkSampler


def sample_bulk(
    graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what ``sampler`` draws from the whole graph, one sample for each batch.

    The samples' ``edge_ids`` count in the edges' types.
    """
    if isinstance(sampler, LinkSampler):
        return (yield from sampler.sample_across(home_of_shard(graph), seeds, keys))
    if isinstance(sampler, LadiesSampler | FastGCNSampler):
        return (yield from sample_layer_wise(graph, sampler, seeds, keys))
    if isinstance(sampler, TemporalSampler):
        return (yield from sample_timed(graph, sampler, seeds, keys))
    growing = [GrowingBatch(ids, graph.num_nodes, number) for number, ids in enumerate(seeds)]
    how = DrawRule(sampler.replace, sampler.weight)
    return (yield from draw_hops(graph, growing, sampler.of_types(graph.types), keys, how))


def home_of_shard(graph: ShardedGraph) -> Home:
    """A graph in shards, as targets see it: this rank learns edges of its own shard, and asks owners for the rest."""

    def draw(sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return sample_bulk(graph, check_sampler(sampler, graph.types), seeds, keys)

    asked = partial(sample_at_times, graph), partial(draw_false_ends, graph), partial(graph.array_of, EDGES)
    return Home(graph.shard.rows, graph.num_nodes, graph.ids_of_own, draw, *asked)


def check_sampler(sampler: object, types: TypeNames) -> ShardedSampler:
    """Return the sampler; refuse one that needs the whole graph on one host, or that knows none of the types."""
    if isinstance(sampler, LinkSampler):
        check_sampler(sampler.sampler, types)
        return sampler
    if isinstance(sampler, NeighborSampler | TemporalSampler):
        sampler.of_types(types)  # refuses numbers of other types
        return sampler
    if have_names(types):
        raise ValueError(
            f"A typed graph in shards is sampled by NeighborSampler or TemporalSampler, got {shown(sampler)}: choose "
            "one of these, or give every host the whole graph."
        )
    if isinstance(sampler, LadiesSampler | FastGCNSampler):
        return sampler
    raise ValueError(
        "A sharded graph is sampled by NeighborSampler, TemporalSampler, LadiesSampler or FastGCNSampler, got "
        f"{shown(sampler)}: others ask for edges among nodes of several hosts. Choose one of these, or give every host "
        "the whole graph."
    )


def sample_layer_wise(
    graph: ShardedGraph, sampler: LayerWise, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what ``sampler`` draws from the whole graph, one sample for each batch. Collective the first time."""
    importance = importance_of(graph, sampler)
    batches = [GrowingBatch(ids, graph.num_nodes) for ids in seeds]
    for hop in range(sampler.num_hops):
        nodes, positions = union([batch.frontier for batch in batches])
        rows = yield from whole_rows(graph, nodes, sampler.weight)
        starts, values = starts_of(rows.counts), NONE if rows.weights is None else rows.weights.numpy()
        layers = LayerDraws(np.array(sampler.num_nodes, np.int64), values, *importance, sampler.normalize)
        for batch, at, batch_key in zip(batches, positions, keys, strict=True):
            _grow(batch, rows, starts, at, key(*batch_key, hop), hop, layers)
    return [batch.sample() for batch in batches]


def importance_of(graph: ShardedGraph, sampler: LayerWise) -> tuple[Array, Array]:
    """Return what :meth:`LayerSampler.importance` does for one host. Collective, the first time."""
    if isinstance(sampler, LadiesSampler):
        return np.empty(0), np.empty(0)
    norms = remembered(graph, ("column norms", sampler.weight), lambda: graph.column_norms(sampler.weight).numpy())
    return norms, remembered(graph, ("scales", sampler.weight, sampler.num_nodes), lambda: sampler.scales(norms))


def _grow(
    batch: GrowingBatch, rows: Drawn, starts: Tensor, at: Tensor, word: np.uint64, hop: int, layers: LayerDraws
) -> None:
    """Draw a layer for the frontier of a batch; ``at`` are the places of its nodes among ``rows``."""
    known, work, table = batch.open(rows.senders, int((starts[at + 1] - starts[at]).sum()))
    csr, begin = (starts.numpy(), rows.senders.numpy(), at.numpy()), len(known) - len(at)
    found = sample_layer(*csr, known, begin, word, hop, layers, work, table)
    ends = torch.from_numpy(work.starts[begin : len(known) + 1].copy())
    positions, weights = (torch.from_numpy(of[: int(ends[-1])].copy()) for of in (work.positions, work.weights))
    ids = None if rows.edge_ids is None else rows.edge_ids[positions]
    batch.add(found, work, Drawn(ends.diff(), rows.senders[:0], None, ids, weights))


class ShardedSource(AheadSource):
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``FastGCNSampler`` or a ``TemporalSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``, or one that samples around edges.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
        widen: Which narrow types become float32. Default: all.
    """

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        loading: Loading,
        *,
        stream: Stream | None = None,
        widen: Widen = True,
    ) -> None:
        super().__init__(graph, loading, stream, widen)
        self._graph, self._sampler = graph, check_sampler(sampler, graph.types)
        if isinstance(self._sampler, LayerWise):
            importance_of(graph, self._sampler)  # now, as all ranks are here, and not in the background
        elif isinstance(self._sampler, TemporalSampler):
            prepare_times(graph, self._sampler.time)

    def _ask(self, questions: list[Question]) -> list[list[Message]]:
        return self._graph.ask(questions)

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return sample_bulk(self._graph, self._sampler, seeds, keys)
