"""The part of a rank: its shard, and the nodes of other shards that a boundary brings along, asked for once.

own rows -> nodes of the first hop -> their rows, asked for -> nodes of the second hop -> ... -> arrays of all nodes
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.extensions.shards.draws import whole_rows
from lightning_gnn_dist.extensions.shards.owner import EDGES
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.graph.graph import Graph, checked_graph, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, starts_of
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of
from lightning_gnn_dist.homes.parts import PartRows, RowReading, around, edges_among
from lightning_gnn_dist.partition.base import learned_from


def read_part(graph: ShardedGraph, boundary: Boundary, coverage: Coverage | None, seed: int) -> tuple[Graph, Tensor]:
    """Return the part in RAM, and the ids of its nodes in the whole graph: those of the shard first. Collective.

    Of a typed graph, the nodes are in the order of their ids.

    Args:
        graph: The whole graph.
        boundary: Which nodes come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
        seed: Decides everything random.
    """
    residents = graph.ids_of_own(torch.arange(graph.shard.rows.num_nodes))
    source = _Shards(graph)
    boundary.check_fits(source.sizes)
    part, nodes, is_own = around(source, residents, residents, boundary, seed)
    if have_names(graph.types):
        part.node_arrays |= {"n_id": nodes, "train_mask": is_own & learned_from(part, graph.types.seeds)}
    if coverage is not None:
        part.node_arrays["coverage"] = coverage.weights(part, graph.answered(graph.degrees(nodes)), is_own)
    return part, nodes


class _Shards(RowReading):
    """Has the rows of the own nodes, and asks other ranks for theirs.

    Args:
        graph: The whole graph.
    """

    def __init__(self, graph: ShardedGraph) -> None:
        super().__init__()
        self._graph, self.sizes = graph, _sizes_of_whole(graph)

    def read(self, nodes: Tensor) -> PartRows:
        drawn = self._graph.answered(whole_rows(self._graph, nodes))
        columns = {"kinds": drawn.kinds, "ids": drawn.edge_ids}
        found = {name: column for name, column in columns.items() if column is not None}
        return PartRows(starts_of(drawn.counts), drawn.senders, found)

    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        graph, (at, receives) = self._graph, Lookup(torch.cat(hops))(nodes)
        indptr, senders, edges = edges_among(self.rows_of_hops(hops), at, nodes, receives)
        local = [nodes[(nodes >= first) & (nodes < end)] for first, end in pairwise(graph.types.offsets)]
        of_types = zip(graph.of_nodes, local, graph.shard.rows.types.offsets, strict=False)
        arrays = [graph.rows_of(table.own, ids, first_row) for table, ids, first_row in of_types]
        if not have_names(graph.types):
            of_edges = [graph.answered(graph.rows_at(EDGES, kind, edges["ids"])) for kind in graph.of_edges]
            return checked_graph(indptr, senders, arrays[0], *of_edges or [{}])
        return typed_graph(indptr, senders, _types(graph, list(map(len, local)), arrays, edges), node_arrays={})


def _types(
    graph: ShardedGraph, sizes: list[int], node_arrays: list[dict[str, Tensor]], edges: dict[str, Tensor]
) -> GraphTypes:
    """Return the types of a part, with the rows of all arrays."""
    whole, kinds = graph.types, edges["kinds"]
    edge_arrays: dict[EdgeType, dict[str, Tensor]] = {kind: {} for kind in whole.edge_types}
    for number in graph.of_edges:
        ids = edges["ids"][kinds == number]
        edge_arrays[whole.edge_types[number]] = graph.answered(graph.rows_at(EDGES, number, ids))
    num_edges = tuple(torch.bincount(kinds, minlength=len(whole.edge_types)).tolist())
    arrays = dict(zip(whole.node_types, node_arrays, strict=True)), edge_arrays
    time = graph.shard.rows.types.time
    return GraphTypes(
        whole.node_types, offsets_of(sizes), whole.edge_types, num_edges, kinds, *arrays, time, whole.seeds
    )


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
    none, nothing = torch.empty(0, dtype=torch.int64), dict[str, Tensor]()
    indptr = none.new_zeros(1).expand(whole.offsets[-1] + 1)
    if not have_names(whole):
        return checked_graph(indptr, none, arrays[whole.node_types[0]], nothing)
    of_edges = tuple(0 for _ in whole.edge_types), own.edge_type[:0], arrays, dict.fromkeys(whole.edge_types, nothing)
    return typed_graph(indptr, none, GraphTypes(whole.node_types, whole.offsets, whole.edge_types, *of_edges))
