"""Batches of a typed graph in shards: the same, bit for bit, as where every host has the graph.

frontier -> its owners draw neighbours of each edge type, hop by hop -> taken apart -> the rows of each type, by owner
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps, together
from lightning_gnn_dist.batches.batch import LABELS, PoolOf
from lightning_gnn_dist.batches.hetero import SampledHeteroData, TypedArrays, assemble_typed
from lightning_gnn_dist.batches.pool import Widen, gather_joined
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.typed.apart import Apart, by_types
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.draws import draw_types
from lightning_gnn_dist.sharded.growing import GrowingBatch
from lightning_gnn_dist.sharded.remote_graph import divided
from lightning_gnn_dist.sharded.tables import Found, Sought
from lightning_gnn_dist.sharded.temporal.sampling import sample_timed
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph

TypedSampler = NeighborSampler | TemporalSampler


class TypedBulk(NamedTuple):
    """Batches that are drawn, without their arrays.

    Attributes:
        samples: What was drawn, for each batch.
        apart: The same by types.
        nodes: The rows of each node type that all of them need.
    """

    samples: list[Sample]
    apart: list[Apart]
    nodes: list[Sought]


def bulk_of_types(graph: TypedShardedGraph, samples: list[Sample]) -> TypedBulk:
    """Return the drawn batches of a bulk, by types."""
    apart = [_apart(graph, sample) for sample in samples]
    nodes = [
        table.seek(torch.cat([of_batch.nodes[number] for of_batch in apart]))
        for number, table in enumerate(graph.of_nodes)
    ]
    return TypedBulk(samples, apart, nodes)


def finish_typed(
    graph: TypedShardedGraph,
    bulk: TypedBulk,
    coming: Sequence[TypedBulk] = (),
    pool_of: PoolOf = lambda _: None,
    *,
    widen: Widen = True,
    all_labels: bool = True,
) -> Steps[list[SampledHeteroData]]:
    """Return the batches of a bulk with their arrays. The next bulks say what will be needed again.

    The owners are asked for the rows of all types at once.
    """
    numbers = [number for number, table in enumerate(graph.of_edges) if table.own]
    nodes, of_edge_types = yield from together(
        [together(_nodes(graph, bulk, coming)), together([_edges(graph, bulk, number) for number in numbers])]
    )
    edges = dict(zip(numbers, of_edge_types, strict=True))
    at_node = [
        found.places.split([len(apart.nodes[number]) for apart in bulk.apart]) for number, found in enumerate(nodes)
    ]
    at_edge = {
        number: found.places.split([len(apart.rows[number].edge_ids) for apart in bulk.apart])
        for number, found in edges.items()
    }
    made = []
    for batch, (sample, apart) in enumerate(zip(bulk.samples, bulk.apart, strict=True)):
        of_nodes = {
            kind: _rows(nodes[i], kind, at_node[i][batch], pool_of, None if all_labels else apart.num_sampled[i][0])
            for i, kind in enumerate(graph.types.node_types)
        }
        of_edges = {
            kind: _rows(edges[i], kind, at_edge[i][batch], pool_of) if i in edges else {}
            for i, kind in enumerate(graph.types.edge_types)
        }
        arrays = TypedArrays(graph.types, apart, of_nodes, of_edges)
        made.append(assemble_typed(arrays, sample, widen=widen, all_labels=all_labels))
    return made


def sample_typed(
    graph: TypedShardedGraph, sampler: TypedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what the sampler draws from the whole graph; the samples' ``edge_ids`` count in the edges' types."""
    if isinstance(sampler, TemporalSampler):
        return (yield from sample_timed(graph, sampler, seeds, keys))
    fanouts = torch.from_numpy(sampler.of_types(graph.types))  # (hops, types)
    words = [typed_keys(*key, *fanouts.shape).view(np.int64) for key in keys]
    growing = [GrowingBatch(ids, graph.num_nodes) for ids in seeds]
    for hop, of_hop in enumerate(fanouts):
        frontiers = [batch.frontier for batch in growing]
        sizes = list(map(len, frontiers))
        batch_of = torch.arange(len(growing)).repeat_interleave(torch.tensor(sizes))
        of_batches = torch.from_numpy(np.stack([of_batch[hop] for of_batch in words]))
        given = torch.cat(frontiers), batch_of, of_batches, of_hop
        drawn = yield from draw_types(graph, *given, replace=sampler.replace)
        for batch, own in zip(growing, divided(drawn, sizes), strict=True):
            batch.join(own.senders, own.counts, own.edge_ids, own.kinds)
    return [batch.sample() for batch in growing]


def _apart(graph: TypedShardedGraph, sample: Sample) -> Apart:
    apart = by_types(graph.types, sample)
    if apart is None:
        raise ValueError(
            "A rank has an edge whose ends are of other types than its type says: its shard was changed after it was "
            "opened. Copy the shards again."
        )
    return apart


def _nodes(graph: TypedShardedGraph, bulk: TypedBulk, coming: Sequence[TypedBulk]) -> list[Steps[Found]]:
    """Fetch the rows of each node type."""
    return [
        table.find(wanted, [other.nodes[number].distinct for other in coming])
        for number, (table, wanted) in enumerate(zip(graph.of_nodes, bulk.nodes, strict=True))
    ]


def _edges(graph: TypedShardedGraph, bulk: TypedBulk, number: int) -> Steps[Found]:
    """Fetch the rows of an edge type."""
    table = graph.of_edges[number]
    return table.find(table.seek(torch.cat([apart.rows[number].edge_ids for apart in bulk.apart])))


def _rows(
    found: Found, kind: object, places: Tensor, pool_of: PoolOf, num_labels: int | None = None
) -> dict[str, Tensor]:
    """Gather the rows of a batch of all arrays of a type: of labels the first ones."""
    rows = {}
    for name in found.own:
        at = places[:num_labels] if name == LABELS else places
        pool = pool_of(f"{kind} {name}")
        rows[name] = gather_joined(found.own[name], found.held[name], found.fetched[name], at, pool)
    return rows
