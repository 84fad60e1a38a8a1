"""The part of a rank of a typed graph: its shard, and what a boundary brings along, in the order of ids.

own rows -> nodes of the first hop -> their rows, asked for -> ... -> edges among all of them, arrays of each type
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.typed.part import learned_from, weights_of_part
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, edge_positions, senders_by_row
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of
from lightning_gnn_dist.sampling.turns import together
from lightning_gnn_dist.sharded.draws import Drawn, whole_rows
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph


def read_typed_part(
    graph: ShardedGraph, boundary: Boundary, coverage: Coverage | None, seed: int
) -> tuple[Graph, Tensor]:
    """Return the part in RAM, and the ids of its nodes in the whole graph, which increase.

    Args:
        graph: The whole graph.
        boundary: Which nodes come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
        seed: Decides everything random.
    """
    own, sizes = graph.shard.rows, _sizes_of_whole(graph)
    residents = graph.types.to_whole(graph.shard.index, torch.arange(own.num_nodes))
    boundary.check_fits(sizes)
    reading = _Reading(graph)
    hops = boundary.around(sizes, residents, reading.edges_into, seed)
    receiving = torch.cat([residents, *hops[:-1]])
    nodes = torch.cat([residents, *hops]).sort().values
    part = _built(graph, nodes, receiving, [reading.rows_of(hop) for hop in [residents, *hops[:-1]]])
    is_own = Lookup(residents).contains(nodes)
    train = graph.types.to_whole(graph.shard.index, learned_from(own))
    part.node_arrays |= {"n_id": nodes, "train_mask": Lookup(train).contains(nodes)}
    if coverage is not None:
        part.node_arrays["coverage"] = weights_of_part(coverage, part, graph.answered(graph.degrees(nodes)), is_own)
    return part, nodes


class _Reading:
    """Asks for the rows of nodes, and remembers them: a boundary asks first."""

    def __init__(self, graph: ShardedGraph) -> None:
        self._graph, self._known = graph, list[tuple[Tensor, Drawn]]()

    def rows_of(self, nodes: Tensor) -> Drawn:
        for known, rows in self._known:
            if known is nodes:
                return rows
        self._known.append((nodes, whole_rows(self._graph, nodes)))
        return self._known[-1][1]

    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each edge into some nodes, the number of the node among them, and the sender, piece by piece."""
        rows = self.rows_of(nodes)
        return senders_by_row(torch.cat([rows.counts.new_zeros(1), rows.counts.cumsum(0)]), rows.senders)


def _built(graph: ShardedGraph, nodes: Tensor, receiving: Tensor, pieces: list[Drawn]) -> Graph:
    """Return the graph among ``nodes``, of which some receive: their whole rows stand in ``pieces``."""
    counts, order = torch.cat([piece.counts for piece in pieces]), receiving.argsort()
    at = edge_positions(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), order)
    senders, is_here = Lookup(nodes)(torch.cat([piece.senders for piece in pieces])[at].to(torch.int64))
    at = at[is_here]
    rows = torch.arange(len(order)).repeat_interleave(counts[order])[is_here]
    degrees = torch.zeros_like(nodes)
    degrees[Lookup(receiving).contains(nodes)] = torch.bincount(rows, minlength=len(order))
    kinds = torch.cat([piece.kinds for piece in pieces if piece.kinds is not None])[at]
    ids = [piece.edge_ids for piece in pieces if piece.edge_ids is not None]
    types = _types(graph, nodes, kinds, torch.cat(ids)[at] if ids else None)
    starts = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])
    return typed_graph(starts, senders.to(index_dtype(len(nodes))), types, node_arrays={})


def _types(graph: ShardedGraph, nodes: Tensor, kinds: Tensor, edge_ids: Tensor | None) -> GraphTypes:
    """Return the types of a part, with the rows of all arrays."""
    whole = graph.types
    begins = torch.searchsorted(nodes, torch.tensor(whole.offsets))
    local = [some - first for some, first in zip(nodes.split(begins.diff().tolist()), whole.offsets, strict=False)]
    of_nodes = [table.take(ids) for table, ids in zip(graph.of_nodes, local, strict=True)]
    of_edges = (
        [] if edge_ids is None else [table.take(edge_ids[kinds == number]) for number, table in graph.of_edges.items()]
    )
    found = graph.answered(together([*of_nodes, *of_edges]))
    node_arrays = dict(zip(whole.node_types, found, strict=False))
    edge_arrays: dict[EdgeType, dict[str, Tensor]] = {kind: {} for kind in whole.edge_types}
    edge_arrays |= {
        whole.edge_types[number]: rows for number, rows in zip(graph.of_edges, found[len(of_nodes) :], strict=True)
    }
    num_edges = torch.bincount(kinds, minlength=len(whole.edge_types)).tolist()
    own = graph.shard.rows.types
    sizes = offsets_of(list(map(len, local)))
    made = whole.node_types, sizes, whole.edge_types, tuple(num_edges), kinds, node_arrays, edge_arrays
    return GraphTypes(*made, own.time, whole.seeds)


def _sizes_of_whole(graph: ShardedGraph) -> Graph:
    """Return a graph with as many nodes of each type as the whole one, and arrays as wide, that takes no memory.

    A budget of bytes is counted by it. It has no edges, and no ``n_id``, which whole graphs do not have.
    """
    whole, own = graph.types, graph.shard.rows.types
    arrays = {
        kind: {
            name: array.new_zeros(1, *array.shape[1:]).expand(len(whole.nodes_of(kind)), *array.shape[1:])
            for name, array in own.node_arrays[kind].items()
            if name != "n_id"
        }
        for kind in whole.node_types
    }
    none, no_edges = own.edge_type[:0], [0] * len(whole.edge_types)
    nothing: dict[tuple[str, str, str], dict[str, Tensor]] = {kind: {} for kind in whole.edge_types}
    types = GraphTypes(whole.node_types, whole.offsets, whole.edge_types, tuple(no_edges), none, arrays, nothing)
    return typed_graph(torch.zeros(1, dtype=torch.int64).expand(whole.offsets[-1] + 1), torch.empty(0).long(), types)
