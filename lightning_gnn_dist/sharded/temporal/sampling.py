"""Batches by time of a graph in shards: those of :class:`TemporalSampler` on the whole graph, bit for bit.

seeds -> their times, from their owners -> names (tree, node) -> owners draw what each tree sees, hop by hop
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME, View, check_comparable, seen_by
from lightning_gnn_dist.engine.temporal.times import node_times
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.draws import GrowingBatch, How, Names, Seen, draw_hops
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.temporal.times import prepare_times, times_of_nodes


def sample_timed(
    graph: ShardedGraph, sampler: TemporalSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what the sampler draws from the whole graph; the samples' ``edge_ids`` count in the edges' types.

    Collective, the first time for each name of times.
    """
    prepare_times(graph, sampler.time)
    times = yield from _times_of(graph, seeds, sampler.view)
    return (yield from sample_at_times(graph, sampler, seeds, times.split(list(map(len, seeds))), keys))


def sample_at_times(
    graph: ShardedGraph,
    sampler: TemporalSampler,
    seeds: Sequence[Tensor],
    times: Sequence[Tensor],
    keys: Sequence[BatchKey],
) -> Steps[list[Sample]]:
    """Draw batches around nodes at times of their own; a node may be a seed at several. One turn a hop.

    The graph's :func:`prepare_times` has run.
    """
    fanouts = torch.from_numpy(sampler.of_types(graph.types))  # (hops, types)
    words = np.stack([typed_keys(*key, *fanouts.shape).view(np.int64) for key in keys])
    bits = max(1, (graph.num_nodes - 1).bit_length())
    names = Names(bits, torch.tensor([0, *map(len, seeds)]).cumsum(0).tolist())
    growing = [GrowingBatch((torch.arange(len(ids)) << bits) + ids, max(1, len(ids)) << bits) for ids in seeds]
    how = How(sampler.replace, seen=_seen(seeds, torch.cat(list(times)), sampler.view))
    yield from draw_hops(graph, growing, names, fanouts, torch.from_numpy(words), how)
    return [_named(batch.sample(), bits, of) for batch, of in zip(growing, times, strict=True)]


def _times_of(graph: ShardedGraph, seeds: Sequence[Tensor], view: View) -> Steps[Tensor]:
    """Return the time of each seed of all batches."""
    for ids in seeds:
        check_seeds(ids, graph.num_nodes)
        refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
    types, rows, ids = graph.types, graph.shard.rows, torch.cat(list(seeds))
    kind = types.seed_type()
    number, of_type = types.node_types.index(kind), types.nodes_of(kind)
    if ids.numel() and not of_type.start <= int(ids.min()) <= int(ids.max()) < of_type.stop:
        raise ValueError(f"The seeds of a batch by time must be nodes of type {kind!r}, which the shards learn from.")
    node_times(rows, view.seed_time, kind)  # refuses an array that is not there
    times = yield from times_of_nodes(graph, number, view.seed_time, ids - of_type.start)
    check_comparable(rows, times, view)
    return times


def _seen(seeds: Sequence[Tensor], times: Tensor, view: View) -> Seen:
    """Return what each tree of all batches sees."""
    batches = torch.arange(len(seeds)).repeat_interleave(torch.tensor(list(map(len, seeds))))
    after, upto = map(torch.from_numpy, seen_by(times, view))
    return Seen(view.time, view.latest, torch.stack([batches, torch.cat(list(seeds)), after, upto]))


def _named(sample: Sample, bits: int, times: Tensor) -> Sample:
    """Return a sample of names as one of nodes."""
    extra = {"batch": sample.nodes >> bits, SEED_TIME: times}
    return sample._replace(nodes=sample.nodes & ((1 << bits) - 1), extra=extra)
