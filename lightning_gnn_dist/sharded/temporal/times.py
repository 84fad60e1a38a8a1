"""Times of nodes and edges across shards, and what happened when, from the ranks that own them.

A graph without types counts as one whose nodes, and whose edges, have type 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.engine.temporal.order import ordered
from lightning_gnn_dist.engine.temporal.times import BEFORE_ALL, as_integers, sources_of
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.messages import (
    TIMES_OF_EDGES,
    TIMES_OF_NODES,
    Question,
    letters_of,
    narrow,
)
from lightning_gnn_dist.sharded.remote_graph import Route, ShardedGraph


def prepare_times(graph: ShardedGraph, name: str) -> None:
    """Order the own edges by the times called ``name``, for draws by time. Collective, the first time."""
    if name in graph.orders:
        return
    rows, types = graph.shard.rows, graph.shard.rows.types
    times = torch.full((rows.num_edges,), BEFORE_ALL)
    for number, source in enumerate(sources_of(rows, name)):
        at = types.edges_of(types.edge_types[number])
        if source is not None and source.first_sender is None:
            times[at] = as_integers(source.times)
        elif source is not None:
            sender = types.node_types.index(types.edge_types[number][0])
            ids, inverse = (rows.indices[at].to(torch.int64) - graph.types.offsets[sender]).unique(return_inverse=True)
            found = graph.answered(times_of_nodes(graph, sender, name, ids))
            times[at] = as_integers(found)[inverse]
    graph.orders[name] = ordered(rows, name, times)
    graph.channel.exchange([torch.empty(0)] * graph.channel.size)  # from now on each rank answers


def times_of_nodes(graph: ShardedGraph, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
    """Return the times called ``name`` of some nodes of a type, by their ids in it, in any order."""
    return (yield from _times_of(graph, TIMES_OF_NODES, graph.types.nodes[number], number, name, ids))


def times_of_edges(graph: ShardedGraph, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
    """Return the times called ``name`` of some edges of a type, by their ids in it, in any order."""
    return (yield from _times_of(graph, TIMES_OF_EDGES, graph.types.edges[number], number, name, ids))


def times_of_all_nodes(graph: ShardedGraph, number: int, name: str) -> Tensor:
    """Return the times called ``name`` of all nodes of a type. Collective."""
    own = graph.shard.rows.types.node_arrays[graph.types.node_types[number]][name]
    return torch.cat(graph.channel.exchange([own[:]] * graph.channel.size))


def _times_of(graph: ShardedGraph, kind: int, bounds: Tensor, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
    owners = torch.searchsorted(bounds, ids.contiguous(), right=True) - 1
    route, more = Route(owners, graph.channel.size), [torch.tensor([number]), letters_of(name)]
    pieces = zip(route.pieces(ids - bounds[owners]), bounds.diff().tolist(), strict=True)
    (answers,) = yield [Question(kind, [[narrow(some, most), *more] for some, most in pieces])]
    return route.restore([answer[0] for answer in answers])
