"""Samples around edges of a graph in shards: the same, bit for bit, as where every host has the graph.

own edges -> false receivers, of which owners say whether they are edges -> the ends of all -> their neighbourhoods
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.evaluation.layered_loader import Targets
from lightning_gnn_dist.sampling.links import (
    FALSE_ENDS,
    HeldLinkSampler,
    LinkSampler,
    directed,
    edges_at,
    ends_of_pairs,
    targets,
)
from lightning_gnn_dist.sharded.links.negatives import Draws, draw_receivers_across
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import check_sampler, sample_bulk


@dataclass(frozen=True, eq=False)
class OwnLinks:
    """Samples around edges of the own shard. Its seeds are the positions that they have in the whole graph.

    Args:
        links: Says what is asked, and draws as if this rank had the whole graph.
        first: The position in the whole graph of the edge at position 0 of the shard, for edges of their type.
    """

    links: LinkSampler
    first: int

    @property
    def num_hops(self) -> int:
        return self.links.num_hops

    def sample_across(
        self, graph: ShardedGraph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """Draw a sample for each batch: one turn for negatives, seldom two, and one for each hop."""
        edges = [self._edges(graph, ids, of) for ids, of in zip(seeds, keys, strict=True)]
        false = yield from self._false_ends(graph, edges, seeds, keys)
        pairs = [targets(some, receivers) for some, receivers in zip(edges, false, strict=True)]
        found = yield from around_across(graph, self.links.sampler, pairs, keys)
        rows = graph.shard.rows
        return [
            self.links.finished(rows, *drawn, ids - self.first, rows) for ids, drawn in zip(seeds, found, strict=True)
        ]

    def _edges(self, graph: ShardedGraph, ids: Tensor, batch_key: BatchKey) -> Tensor:
        """Return the ends of own edges, by ids in the whole graph."""
        senders, receivers = edges_at(graph.shard.rows, ids - self.first)
        return directed(torch.stack([senders, graph.ids_of_own(receivers)]), ids, batch_key, self.links.undirected)

    def _false_ends(
        self, graph: ShardedGraph, edges: list[Tensor], seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Tensor]]:
        """Return the receivers of the negatives of each edge of each batch, shape (n, negatives)."""
        count, links = self.links.num_negatives, self.links
        assert isinstance(links.candidates, range)
        sizes = torch.tensor(list(map(len, seeds)))
        words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in keys], np.uint64).view(np.int64))
        total, kind = int(sizes.sum()), links.target_type and links.target_type.number
        of_edges = words.repeat_interleave(sizes), torch.cat([some[0] for some in edges]), torch.cat(list(seeds))
        keys_of_draws, senders, ids = (array.repeat_interleave(count) for array in of_edges)
        draws = Draws(keys_of_draws, senders, ids, torch.arange(count).repeat(total))
        drawn = yield from draw_receivers_across(graph, draws, links.candidates, kind)
        return list(drawn.view(total, count).split(sizes.tolist()))


@dataclass(frozen=True, eq=False)
class HeldLinks:
    """Samples around this rank's share of the held edges. Its seeds are their numbers among all held edges.

    Args:
        held: Knows the share.
        first: The number of its first edge.
    """

    held: HeldLinkSampler
    first: int

    @property
    def num_hops(self) -> int:
        return self.held.num_hops

    def sample_across(
        self, graph: ShardedGraph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """Draw a sample for each batch: one turn for each hop."""
        places = [ids - self.first for ids in seeds]
        found = yield from around_across(graph, self.held.sampler, [self.held.pairs(ids) for ids in places], keys)
        return [self.held.finished(*drawn, ids) for ids, drawn in zip(places, found, strict=True)]

    def targets(self, ids: Tensor) -> Targets:
        """Return the ends of some edges and of their negatives, and what batches say of them."""
        return Targets(*self.held.ends(ids - self.first))


def around_across(
    graph: ShardedGraph, sampler: object, pairs: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[tuple[Sample, Tensor]]]:
    """For each batch, a sample around the ends of its pairs, and the positions of these ends in it, shape (2, m)."""
    found = [ends_of_pairs(ends) for ends in pairs]
    of_nodes = check_sampler(sampler, graph.shard.bounds.types)
    samples = yield from sample_bulk(graph, of_nodes, [seeds for seeds, _ in found], keys)
    return [(sample, ends) for sample, (_, ends) in zip(samples, found, strict=True)]
