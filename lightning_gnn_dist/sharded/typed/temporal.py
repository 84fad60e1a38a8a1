"""Batches by time of a typed graph in shards: those of :class:`TemporalSampler` on the whole graph, bit for bit.

seeds -> their times, from their owners -> names (tree, node) -> owners draw what each tree sees, hop by hop
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME, View, check_comparable, seen_by
from lightning_gnn_dist.engine.temporal.times import node_times
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.growing import GrowingBatch
from lightning_gnn_dist.sharded.remote_graph import divided
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph
from lightning_gnn_dist.sharded.typed.owner import Seen


def sample_timed(
    graph: TypedShardedGraph, sampler: TemporalSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what the sampler draws from the whole graph; the samples' ``edge_ids`` count in the edges' types.

    Collective, the first time for each name of times.
    """
    graph.prepare_times(sampler.time)
    fanouts, view = torch.from_numpy(sampler.of_types(graph.types)), sampler.view  # (hops, types)
    words = np.stack([typed_keys(*key, *fanouts.shape).view(np.int64) for key in keys])
    sizes, bits = list(map(len, seeds)), max(1, (graph.num_nodes - 1).bit_length())
    times = yield from _times_of(graph, seeds, view)
    first, seen = torch.tensor([0, *sizes]).cumsum(0).tolist(), _seen(seeds, times, view)
    growing = [GrowingBatch((torch.arange(len(ids)) << bits) + ids, max(1, len(ids)) << bits) for ids in seeds]
    for hop, of_hop in enumerate(fanouts):
        frontiers = [batch.frontier for batch in growing]
        names, trees = torch.cat(frontiers), [(of >> bits) + low for of, low in zip(frontiers, first, strict=False)]
        nodes, of_batches = names & ((1 << bits) - 1), torch.from_numpy(words[:, hop].copy())
        given = nodes, torch.cat(trees), of_batches, of_hop
        drawn = yield from graph.draw_types(*given, replace=sampler.replace, seen=seen)
        for batch, of, own in zip(growing, frontiers, divided(drawn, list(map(len, frontiers))), strict=True):
            senders = own.senders.to(torch.int64) | ((of >> bits) << bits).repeat_interleave(own.counts)
            batch.join(senders, own.counts, own.edge_ids, own.kinds)
    return [_named(batch.sample(), bits, of) for batch, of in zip(growing, times.split(sizes), strict=True)]


def _times_of(graph: TypedShardedGraph, seeds: Sequence[Tensor], view: View) -> Steps[Tensor]:
    """Return the time of each seed of all batches."""
    for ids in seeds:
        check_seeds(ids, graph.num_nodes)
        refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
    kind, ids = graph.types.seed_type(), torch.cat(list(seeds))
    of_type, rows = graph.types.nodes_of(kind), graph.shard.rows
    if ids.numel() and not of_type.start <= int(ids.min()) <= int(ids.max()) < of_type.stop:
        raise ValueError(f"The seeds of a batch by time must be nodes of type {kind!r}, which the shards learn from.")
    node_times(rows, view.seed_time, kind)  # refuses an array that is not there
    times = yield from graph.times_of(graph.types.node_types.index(kind), view.seed_time, ids - of_type.start)
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
