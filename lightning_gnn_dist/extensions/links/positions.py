"""Edges as targets: their positions and ends, and samples without them.

A model that is asked whether an edge exists must not receive messages along it, in either direction. Both ends of every
target are seeds, so the edges to remove are in the rows of seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph

# They take the place of the hop in a key, so that these draws and those of a sampler never share one.
FALSE_ENDS, DIRECTION = -1, -2


class TargetType(NamedTuple):
    """The edge type of the targets in a graph with types.

    Attributes:
        number: Its place among the edge types.
        reverse: The place of the edge type that has the same links turned round, if there is one.
    """

    number: int
    reverse: int | None = None

    def shows(self, graph: Graph, sample: Sample) -> Tensor:
        """Which edges of a sample could give a target away: a bool for each."""
        kinds = kinds_of(graph, sample)
        is_shown = kinds == self.number
        return is_shown if self.reverse is None else is_shown | (kinds == self.reverse)

    @property
    def numbers(self) -> list[int]:
        """The places of both edge types."""
        return [self.number] if self.reverse is None else [self.number, self.reverse]


def positions_of_links(
    graph: Graph,
    owner: Tensor,
    undirected: bool,
    target_type: TargetType | None = None,
    *,
    loops: bool = False,
    across: bool = False,
) -> Tensor:
    """The positions in ``indices`` of the edges whose two ends have the same owner.

    Args:
        graph: The graph that has the edges.
        owner: A number for every node; nodes with a negative one have no owner.
        undirected: Whether the graph has every edge in both directions; then only one of them is returned.
        target_type: Of a graph with types, the one whose edges are returned.
        loops: Whether self-loops are returned, too.
        across: Whether edges are returned whose receiver alone has an owner, or another one than the sender.
    """

    def is_chosen(sender: Tensor, receiver: Tensor) -> Tensor:
        is_inside = ((owner[sender] == owner[receiver]) | across) & (owner[receiver] >= 0)
        return is_inside & are_links(sender, receiver, undirected, loops=loops)

    return positions_where(graph, is_chosen, target_type)


def are_links(sender: Tensor, receiver: Tensor, undirected: bool, *, loops: bool) -> Tensor:
    """Which edges are asked for, by their ends: one direction of each, where there are both."""
    return (sender < receiver if undirected else sender != receiver) | ((sender == receiver) & loops)


def positions_where(
    graph: Graph, is_chosen: Callable[[Tensor, Tensor], Tensor], target_type: TargetType | None = None
) -> Tensor:
    """The positions in ``indices`` of edges that are chosen by their senders and receivers, a bool for each."""
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        positions = torch.arange(start, min(start + EDGES_AT_ONCE, graph.num_edges))
        if target_type is not None:
            positions = positions[graph.types.edge_type[positions] == target_type.number]
        found.append(positions[is_chosen(*edges_at(graph, positions))])
    return torch.cat(found)


def edges_at(graph: Graph, positions: Tensor) -> Tensor:
    """Senders and receivers of the edges at these positions, shape ``(2, n)``."""
    receivers = torch.searchsorted(graph.indptr, positions, right=True) - 1
    return torch.stack([graph.indices[positions].to(torch.int64), receivers])


def directed(edges: Tensor, ids: Tensor, batch_key: BatchKey, undirected: bool) -> Tensor:
    """The edges, shape ``(2, n)``; if ``undirected``, each has its ends swapped at random."""
    if not undirected:
        return edges
    return torch.where(draw_bits(key(*batch_key, DIRECTION), ids), edges.flip(0), edges)


def kinds_of(graph: Graph, sample: Sample) -> Tensor:
    """The type of each edge of a sample of a typed graph."""
    if sample.edge_kinds is not None:
        return sample.edge_kinds
    assert sample.edge_ids is not None
    return graph.types.edge_type[sample.edge_ids]


def without_targets(graph: Graph, sample: Sample, ends: Tensor, target_type: TargetType | None = None) -> Sample:
    """The sample without the edges between these pairs of seeds, in either direction. ``ends`` are positions in it.

    Of a graph with types, edges of other types between them stay.
    """
    num_seeds, num_edges = sample.num_sampled_nodes[0], sample.num_sampled_edges[0]
    rows = torch.arange(num_seeds, device=ends.device)
    rows = rows.repeat_interleave(sample.indptr[: num_seeds + 1].diff(), output_size=num_edges)
    columns = sample.indices[:num_edges].to(torch.int64)
    number = torch.cat([ends[0] * num_seeds + ends[1], ends[1] * num_seeds + ends[0]])
    dropped = torch.zeros_like(sample.indices, dtype=torch.bool)
    dropped[:num_edges] = (columns < num_seeds) & torch.isin(rows * num_seeds + columns, number)
    if target_type is not None:
        dropped &= target_type.shows(graph, sample)
    return without(sample, dropped)


def without(sample: Sample, dropped: Tensor) -> Sample:
    """The sample without the edges that the mask ``dropped`` marks; all nodes stay."""
    kept = ~dropped
    upto = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # edges kept before each edge
    hops = upto[torch.tensor([0, *accumulate(sample.num_sampled_edges)], device=upto.device)].diff()
    left = kept.nonzero().view(-1)
    return sample._replace(
        indptr=upto[sample.indptr.to(torch.int64)].to(sample.indptr.dtype),
        indices=sample.indices[left],
        num_sampled_edges=hops.tolist(),
        edge_ids=None if sample.edge_ids is None else sample.edge_ids[left],
        edge_weight=None if sample.edge_weight is None else sample.edge_weight[left],
        edge_kinds=None if sample.edge_kinds is None else sample.edge_kinds[left],
        is_constant=False,
    )
