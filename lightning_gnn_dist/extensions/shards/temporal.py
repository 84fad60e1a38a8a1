"""Batches by time of a graph in shards: those of :class:`TemporalSampler` on the whole graph, bit for bit.

seeds -> their times, from their owners -> names (tree, node) -> owners draw what each tree sees, hop by hop

A graph without types counts as one whose nodes, and whose edges, have type 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.extensions.shards.draws import DrawRule, GrowingBatch, OwnedGraph, draw_hops
from lightning_gnn_dist.extensions.shards.owner import NODES
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, check_comparable, seen_by
from lightning_gnn_dist.extensions.temporal.times import TimeSource, node_times, ordered, sources_of
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.turns import Steps


def prepare_times(graph: ShardedGraph, name: str) -> None:
    """Order the own edges by the times called ``name``, for draws by time. Collective, the first time."""
    if name in graph.orders:
        return
    rows, types = graph.shard.rows, graph.shard.rows.types
    sources = list(sources_of(rows, name))
    for number, source in enumerate(sources):
        if source is not None and source.first_sender is not None:  # who may be another rank's
            kind = types.edge_types[number]
            sender = types.node_types.index(kind[0])
            ids = rows.indices[types.edges_of(kind)].to(torch.int64) - graph.types.offsets[sender]
            sources[number] = TimeSource(graph.answered(graph.array_of(NODES, sender, name, ids)), None)
    graph.orders[name] = ordered(rows, sources)
    graph.channel.exchange([torch.empty(0)] * graph.channel.size)  # from now on each rank answers


def times_of_all_nodes(graph: ShardedGraph, number: int, name: str) -> Tensor:
    """Return the times called ``name`` of all nodes of a type. Collective."""
    own = graph.shard.rows.types.node_arrays[graph.types.node_types[number]][name]
    return torch.cat(graph.channel.exchange([own[:]] * graph.channel.size))


def sample_timed(
    graph: ShardedGraph, sampler: TemporalSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what the sampler draws from the whole graph; the samples' ``edge_ids`` count in the edges' types.

    Collective, the first time for each name of times.
    """
    prepare_times(graph, sampler.time)
    times = yield from _times_of_seeds(graph, seeds, sampler)
    return (yield from sample_at_times(graph, sampler, seeds, times.split(list(map(len, seeds))), keys))


def sample_at_times(
    graph: OwnedGraph,
    sampler: TemporalSampler,
    seeds: Sequence[Tensor],
    times: Sequence[Tensor],
    keys: Sequence[BatchKey],
) -> Steps[list[Sample]]:
    """Draw batches around nodes at times of their own; a node may be a seed at several. One turn a hop.

    The graph's :func:`prepare_times` has run.
    """
    bits, first = max(1, (graph.num_nodes - 1).bit_length()), torch.tensor([0, *map(len, seeds)]).cumsum(0).tolist()
    growing = [GrowingBatch(ids, graph.num_nodes, at, bits) for ids, at in zip(seeds, first, strict=False)]
    of_seeds = torch.tensor(list(map(len, seeds)))
    after, upto = map(torch.from_numpy, seen_by(sampler, torch.cat(list(times))))
    trees = torch.stack([torch.arange(len(seeds)).repeat_interleave(of_seeds), torch.cat(list(seeds)), after, upto])
    how = DrawRule(time=sampler.time, latest=sampler.pick == "latest", trees=trees)
    samples = yield from draw_hops(graph, growing, sampler.of_types(graph.types), keys, how)
    return [of._replace(extra={**of.extra, SEED_TIME: at}) for of, at in zip(samples, times, strict=True)]


def _times_of_seeds(graph: ShardedGraph, seeds: Sequence[Tensor], sampler: TemporalSampler) -> Steps[Tensor]:
    """Return the time of each seed of all batches."""
    for ids in seeds:
        check_seeds(ids, graph.num_nodes)
        refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
    types, rows, ids = graph.types, graph.shard.rows, torch.cat(list(seeds))
    kind = types.seed_type()
    number, of_type = types.node_types.index(kind), types.nodes_of(kind)
    if ids.numel() and not of_type.start <= int(ids.min()) <= int(ids.max()) < of_type.stop:
        raise ValueError(f"The seeds of a batch by time must be nodes of type {kind!r}, which the shards learn from.")
    name = sampler.sight[1]
    node_times(rows, name, kind)  # refuses an array that is not there
    times = yield from graph.array_of(NODES, number, name, ids - of_type.start)
    check_comparable(sampler, rows, times)
    return times
