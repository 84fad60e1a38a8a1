"""Negatives drawn from the whole graph, for a rank that trains on a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.sampling.links import (
    LinkSampler,
    TargetType,
    around,
    directed,
    edges_at,
    kinds_of,
    labelled,
    targets,
    without,
    without_targets,
)


@dataclass(frozen=True, eq=False)
class FarNegativesSampler:
    """Like :class:`LinkSampler`, around edges of a part, with negatives from all nodes of the graph that it samples.

    A batch joins two samples: nodes in the part are sampled there, other negatives in the whole graph, as a negative
    without neighbours would be recognised by that alone. Both use ids of the whole graph, where features are read.

    Args:
        links: Samples the edges of the part. Its candidates are nodes of the whole graph.
        part: The graph of the part. Seeds are positions in its ``indices``.
    """

    links: LinkSampler
    part: Graph

    @property
    def num_hops(self) -> int:
        return self.links.num_hops

    @cached_property
    def _places(self) -> Lookup:
        return Lookup(self.part.node_arrays["n_id"])

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [self._sample(graph, ids, batch_key) for ids, batch_key in zip(seeds, keys, strict=True)]

    def _sample(self, graph: Graph, ids: Tensor, batch_key: BatchKey) -> Sample:
        edges = directed(edges_at(self.part, ids), ids, batch_key, self.links.undirected)
        n_id, sampler = self.part.node_arrays["n_id"], self.links.sampler
        far, kind = self.links.false_ends(graph, n_id[edges[0]], ids, batch_key), self.links.target_type
        at, is_here = self._places(far.view(-1))
        false = torch.zeros_like(far).view(-1)
        false[is_here] = at
        # For a receiver that lies elsewhere, the first edge's sender stands in until the samples are joined.
        false[~is_here] = edges[0, 0] if ids.numel() else 0
        ((near, ends),) = around(self.part, sampler, [targets(edges, false.view_as(far))], [batch_key])
        near = without_targets(self.part, near, ends[:, : ids.numel()], kind)
        ((outside, strangers),) = around(graph, sampler, [far.view(-1)[~is_here]], [batch_key])
        outside = _without_edges(graph, outside, n_id[edges], kind)
        near = near._replace(nodes=n_id[near.nodes])
        if kind is not None:
            near = near._replace(edge_kinds=kinds_of(self.part, near))
            outside = outside._replace(edge_kinds=kinds_of(graph, outside))
        joined, place_near, place_outside = _side_by_side(near, outside)
        ends = place_near[ends]
        ends[1, ids.numel() :][~is_here] = place_outside[strangers]
        return labelled(joined, ends, ids.numel(), kind)


def _without_edges(graph: Graph, sample: Sample, edges: Tensor, target_type: TargetType | None) -> Sample:
    """The sample without these edges of the whole graph and their reverses, in any row."""
    num_nodes = graph.num_nodes
    rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff())
    sent = sample.nodes[sample.indices.to(torch.int64)] * num_nodes + sample.nodes[rows]
    there, back = edges[0] * num_nodes + edges[1], edges[1] * num_nodes + edges[0]
    dropped = torch.isin(sent, torch.cat([there, back]))
    return without(sample, dropped if target_type is None else dropped & target_type.shows(graph, sample))


def _side_by_side(one: Sample, other: Sample) -> tuple[Sample, Tensor, Tensor]:
    """Both samples as one, unconnected, in the order of hops; and the positions of each sample's nodes in it."""
    num_nodes = [sum(pair) for pair in zip(one.num_sampled_nodes, other.num_sampled_nodes, strict=True)]
    starts = [0, *accumulate(num_nodes)][:-1]
    first = _places(one, starts)
    second = _places(other, [start + n for start, n in zip(starts, one.num_sampled_nodes, strict=True)])
    degrees = torch.zeros(one.indptr.numel() + other.indptr.numel() - 2, dtype=torch.int64)
    for sample, positions in ((one, first), (other, second)):
        degrees[positions[: sample.indptr.numel() - 1]] = sample.indptr.diff().to(torch.int64)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    nodes, indices = one.nodes.new_empty(sum(num_nodes)), one.indices.new_empty(int(indptr[-1]))
    kinds = None if one.edge_kinds is None else one.edge_kinds.new_empty(int(indptr[-1]))
    for sample, positions in ((one, first), (other, second)):
        nodes[positions] = sample.nodes
        counts = sample.indptr.diff().to(torch.int64)
        shift = indptr[positions[: counts.numel()]] - sample.indptr[:-1]
        at = torch.arange(sample.indices.numel()) + shift.repeat_interleave(counts)
        indices[at] = positions[sample.indices.to(torch.int64)].to(indices.dtype)
        if kinds is not None and sample.edge_kinds is not None:
            kinds[at] = sample.edge_kinds
    num_edges = [sum(pair) for pair in zip(one.num_sampled_edges, other.num_sampled_edges, strict=True)]
    joined = Sample(nodes, indptr.to(one.indptr.dtype), indices, num_nodes, num_edges, None, edge_kinds=kinds)
    return joined, first, second


def _places(sample: Sample, starts: Sequence[int]) -> Tensor:
    """The position of each node, if the nodes of hop ``h`` begin at ``starts[h]``."""
    hops = zip(starts, sample.num_sampled_nodes, strict=True)
    return torch.cat([torch.arange(start, start + count) for start, count in hops])
