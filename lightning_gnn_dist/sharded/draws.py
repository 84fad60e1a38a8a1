"""Draws for each edge type, and by time, by the ranks that own the rows.

A graph without types counts as one of one type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.sharded.messages import DRAW_TYPES, Message, letters_of, narrow
from lightning_gnn_dist.sharded.questions import Question
from lightning_gnn_dist.sharded.remote_graph import Route, ShardedGraph


class Seen(NamedTuple):
    """What the trees of batches by time see.

    Attributes:
        time: The name of the times of edges, or of the nodes that send.
        latest: Whether the latest edges are drawn, instead of any.
        trees: For each tree the number of its batch, the id of its seed, after which time it sees events, and up to
            which, as integers, int64, shape (4, trees).
    """

    time: str
    latest: bool
    trees: Tensor


class TypedDrawn(NamedTuple):
    """The edges drawn for some nodes.

    Attributes:
        counts: The number of edges drawn for each node, int64.
        senders: The senders of these edges, node after node, by their ids in the whole graph.
        kinds: The number of each edge's type; None if the graph has no types.
        edge_ids: The edges' ids in their types; None if no type has edge arrays.
    """

    counts: Tensor
    senders: Tensor
    kinds: Tensor | None
    edge_ids: Tensor | None


def draw_types(
    graph: ShardedGraph,
    nodes: Tensor,
    batches: Tensor,
    keys: Tensor,
    fanouts: Tensor,
    *,
    replace: bool,
    seen: Seen | None = None,
) -> Steps[TypedDrawn]:
    """Let the ranks that own the rows draw neighbours of some nodes, of each edge type so many.

    Args:
        graph: The graph; where trees see times, its :func:`prepare_times` has run.
        nodes: The nodes, by their ids in the whole graph.
        batches: The number of the batch that each node is for, in increasing order.
        keys: The random key of this hop in each batch, for each edge type, shape (batches, types).
        fanouts: Neighbours to draw of each edge type; -1 takes all.
        replace: Whether an edge may be drawn more than once.
        seen: What the trees of batches by time see; then ``batches`` are numbers of trees. None for all edges.
    """
    owners, rows = graph.owners(nodes)
    route, sizes = Route(owners, graph.channel.size), graph.shard.bounds.nodes.diff().tolist()
    pieces = zip(route.pieces(rows), route.pieces(batches), sizes, strict=True)
    how = keys, fanouts, replace, seen
    (answers,) = yield [Question(DRAW_TYPES, [_draws_of(some, of, *how, most) for some, of, most in pieces])]
    counts, senders, join = graph.in_order(route, answers)
    places = [answer[2:] for answer in answers]
    kinds = None if graph.shard.bounds.types is None else join([of.pop(0) for of in places])
    edge_ids = None
    if graph.has_edge_arrays:
        firsts = _first_edges(graph, [answer[2] for answer in answers])
        edge_ids = join([of[0].to(torch.int64) + first for of, first in zip(places, firsts, strict=True)])
    return TypedDrawn(counts, senders, kinds, edge_ids)


def whole_rows(graph: ShardedGraph, nodes: Tensor, num_types: int) -> TypedDrawn:
    """Return all edges of some nodes, in their order."""
    keys, batches = torch.zeros(1, num_types, dtype=torch.int64), torch.zeros_like(nodes)
    return graph.answered(draw_types(graph, nodes, batches, keys, torch.full_like(keys[0], -1), replace=False))


def _first_edges(graph: ShardedGraph, kinds: list[Tensor]) -> list[Tensor]:
    """The id of each rank's first edge, of a typed graph for each edge that it has drawn, given their types."""
    types = graph.shard.bounds.types
    if types is None:
        return list(graph.shard.bounds.edges[:-1])
    return [types.edges[:, rank][of_rank.to(torch.int64)] for rank, of_rank in enumerate(kinds)]


def _draws_of(
    rows: Tensor, batches: Tensor, keys: Tensor, fanouts: Tensor, replace: bool, seen: Seen | None, most: int
) -> Message:
    """The question for neighbours of some rows of a shard that has ``most`` of them."""
    trees = keys.new_empty(4, 0) if seen is None else seen.trees
    counts = torch.bincount(batches, minlength=len(keys) if seen is None else trees.shape[1])
    flags = torch.tensor([replace, seen is not None and seen.latest])
    return [narrow(rows, most), counts, keys, fanouts, flags, trees, letters_of(None if seen is None else seen.time)]
