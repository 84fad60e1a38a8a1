"""Batches of a sharded graph: the same, bit for bit, as where every host has the graph.

frontier -> its owners draw neighbours, hop by hop -> ... -> the rows of all nodes of a bulk, others' fetched once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps, together
from lightning_gnn_dist.batches.batch import LABELS, Arrays, PoolOf, assemble
from lightning_gnn_dist.batches.pool import Widen, gather_joined
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.torch_rng import keys_of
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds
from lightning_gnn_dist.sampling.fastgcn import FastGCNSampler
from lightning_gnn_dist.sampling.ladies import LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.growing import GrowingBatch
from lightning_gnn_dist.sharded.layer_sampling import LayerWise, sample_layer_wise
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph, divided
from lightning_gnn_dist.sharded.tables import Found, Sought
from lightning_gnn_dist.sharded.temporal.sampling import sample_timed
from lightning_gnn_dist.sharded.typed import batches as typed
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph

ShardedSampler = NeighborSampler | TemporalSampler | LayerWise


@runtime_checkable
class EdgeSampler(Protocol):
    """Samples around edges: it finds their ends, and draws neighbourhoods of these by a sampler of nodes."""

    def sample_across(
        self, graph: ShardedGraph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """Draw a sample for each batch."""


class Bulk(NamedTuple):
    """Batches that are drawn, without their arrays.

    Attributes:
        samples: What was drawn, for each batch.
        nodes: The rows that all of them need.
    """

    samples: list[Sample]
    nodes: Sought


AnyBulk = Bulk | typed.TypedBulk


def begin(
    graph: ShardedGraph, sampler: ShardedSampler | EdgeSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[AnyBulk]:
    """Draw the batches of a bulk: one turn a hop, and those before that the seeds take if these are edges."""
    if isinstance(sampler, EdgeSampler):
        samples = yield from sampler.sample_across(graph, seeds, keys)
    else:
        samples = yield from sample_bulk(graph, sampler, seeds, keys)
    if isinstance(graph, TypedShardedGraph):
        return typed.bulk_of_types(graph, samples)
    return Bulk(samples, graph.nodes.seek(torch.cat([sample.nodes for sample in samples])))


def finish(
    graph: ShardedGraph,
    bulk: AnyBulk,
    coming: Sequence[AnyBulk] = (),
    pool_of: PoolOf = lambda _: None,
    *,
    widen: Widen = True,
    all_labels: bool = True,
) -> Steps[list[Any]]:
    """Return the batches of a bulk with their arrays, in one turn. The next bulks say what will be needed again."""
    if isinstance(graph, TypedShardedGraph):
        drawn: Any = bulk
        others: Any = coming
        return (yield from typed.finish_typed(graph, drawn, others, pool_of, widen=widen, all_labels=all_labels))
    assert isinstance(bulk, Bulk)
    samples = bulk.samples
    ids = [sample.nodes[:0] if sample.edge_ids is None else sample.edge_ids for sample in samples]
    rows_of_nodes = graph.nodes.find(bulk.nodes, [other.nodes.distinct for other in coming if isinstance(other, Bulk)])
    nodes, edges = yield from together([rows_of_nodes, graph.edges.find(graph.edges.seek(torch.cat(ids)))])
    at_node = nodes.places.split([len(sample.nodes) for sample in samples])
    at_edge = edges.places.split(list(map(len, ids)))
    made: list[Any] = []
    for sample, rows, positions in zip(samples, at_node, at_edge, strict=True):
        labelled = {} if all_labels else {LABELS: rows[: sample.num_sampled_nodes[0]]}
        of_nodes = {name: _rows(nodes, name, labelled.get(name, rows), pool_of) for name in nodes.own}
        of_edges = {name: _rows(edges, name, positions, pool_of) for name in edges.own}
        made.append(assemble(Arrays(of_nodes, of_edges, are_gathered=True), sample, widen=widen))
    return made


def _rows(found: Found, name: str, places: Tensor, pool_of: PoolOf) -> Tensor:
    return gather_joined(found.own[name], found.held[name], found.fetched[name], places, pool_of(name))


def sample_bulk(
    graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what ``sampler`` draws from the whole graph, one sample for each batch."""
    if isinstance(graph, TypedShardedGraph):
        return (yield from typed.sample_typed(graph, _of_types(sampler), seeds, keys))
    if isinstance(sampler, LayerWise):
        return (yield from sample_layer_wise(graph, sampler, seeds, keys))
    if isinstance(sampler, TemporalSampler):
        return (yield from sample_timed(graph, sampler, seeds, keys))
    assert isinstance(sampler, NeighborSampler)
    growing = [GrowingBatch(ids, graph.num_nodes) for ids in seeds]
    for hop, fanout in enumerate(sampler.per_hop):
        frontiers = [batch.frontier for batch in growing]
        sizes = list(map(len, frontiers))
        batch_of = torch.arange(len(growing)).repeat_interleave(torch.tensor(sizes))
        words = keys_of(keys, hop, batch_of.device)
        drawn = yield from graph.draw(
            torch.cat(frontiers), batch_of, words, fanout, replace=sampler.replace, weight=sampler.weight
        )
        for batch, own in zip(growing, divided(drawn, sizes), strict=True):
            batch.join(own.senders, own.counts, own.edge_ids)
    return [batch.sample() for batch in growing]


def check_sampler(sampler: object, types: TypedBounds | None = None) -> ShardedSampler:
    """Return the sampler; refuse one that needs the whole graph on one host, or that knows none of the types."""
    if types is not None:
        return _of_types(sampler, types)
    if isinstance(sampler, NeighborSampler | TemporalSampler | LadiesSampler | FastGCNSampler):
        return sampler
    raise ValueError(
        "A sharded graph is sampled by NeighborSampler, TemporalSampler, LadiesSampler or FastGCNSampler, got "
        f"{shown(sampler)}: others ask for edges among nodes of several hosts. Choose one of these, or give every host "
        "the whole graph."
    )


def _of_types(sampler: object, types: TypedBounds | None = None) -> typed.TypedSampler:
    """Return the sampler of a typed graph."""
    if not isinstance(sampler, NeighborSampler | TemporalSampler):
        raise ValueError(
            f"A typed graph in shards is sampled by NeighborSampler or TemporalSampler, got {shown(sampler)}: choose "
            "one of these, or give every host the whole graph."
        )
    if types is not None:
        sampler.of_types(types)  # refuses numbers of other types
    return sampler
