"""Samples around edges of a graph in shards: the same, bit for bit, as where every host has the graph.

own edges -> false receivers, of which owners say whether they are edges -> the ends of all -> their neighbourhoods
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.evaluation.layered_loader import Targets
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.links import (
    HeldLinkSampler,
    LinkSampler,
    directed,
    edges_at,
    ends_of_pairs,
    targets,
)
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.links.negatives import draw_false_ends, without_edge
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
        links, kind = self.links, self.links.target_type and self.links.target_type.number
        assert isinstance(links.candidates, range)
        edges = [own_edges(graph, *of, self.first, links.undirected) for of in zip(seeds, keys, strict=True)]
        wanted = without_edge(graph, torch.cat(edges, 1)[0], links.candidates, kind)
        false = yield from draw_false_ends(wanted, links.num_negatives, seeds, keys)
        pairs = [targets(some, receivers) for some, receivers in zip(edges, false, strict=True)]
        found = yield from around_across(graph, links.sampler, pairs, keys)
        rows = graph.shard.rows
        return [links.finished(rows, *drawn, ids - self.first, rows) for ids, drawn in zip(seeds, found, strict=True)]


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

    def around(self, sampler: Sampler) -> HeldLinks:
        """Return the same, with the neighbourhoods that a sampler draws."""
        return replace(self, held=replace(self.held, sampler=sampler))

    def targets(self, ids: Tensor) -> Targets:
        """Return the ends of some edges and of their negatives, and what batches say of them."""
        return Targets(*self.held.ends(ids - self.first))


def own_edges(graph: ShardedGraph, ids: Tensor, batch_key: BatchKey, first: int, undirected: bool) -> Tensor:
    """Return the ends of own edges, by ids in the whole graph; if ``undirected``, each has its ends swapped at random.

    Args:
        graph: The graph.
        ids: The positions of the edges in the whole graph.
        batch_key: The key of the batch that asks for them.
        first: The position there of the edge at position 0 of the shard.
        undirected: Whether both directions of each are there.
    """
    senders, receivers = edges_at(graph.shard.rows, ids - first)
    return directed(torch.stack([senders, graph.ids_of_own(receivers)]), ids, batch_key, undirected)


def around_across(
    graph: ShardedGraph, sampler: object, pairs: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[tuple[Sample, Tensor]]]:
    """For each batch, a sample around the ends of its pairs, and the positions of these ends in it, shape (2, m)."""
    found = [ends_of_pairs(ends) for ends in pairs]
    of_nodes = check_sampler(sampler, graph.shard.bounds.types)
    samples = yield from sample_bulk(graph, of_nodes, [seeds for seeds, _ in found], keys)
    return [(sample, ends) for sample, (_, ends) in zip(samples, found, strict=True)]
