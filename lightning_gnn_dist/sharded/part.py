"""The part of a rank: its shard, and the nodes of other shards that a boundary brings along, asked for once.

own rows -> nodes of the first hop -> their rows, asked for -> nodes of the second hop -> ... -> arrays of all nodes
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.part_reader import PartRows, RowReading, induced, joined
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.typed.part import read_typed_part


def read_part(graph: ShardedGraph, boundary: Boundary, coverage: Coverage | None, seed: int) -> tuple[Graph, Tensor]:
    """Return the part in RAM, and the ids of its nodes in the whole graph: those of the shard first. Collective.

    Of a typed graph, the nodes are in the order of their ids.

    Args:
        graph: The whole graph.
        boundary: Which nodes come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
        seed: Decides everything random.
    """
    if have_names(graph.types):
        return read_typed_part(graph, boundary, coverage, seed)
    own, first = graph.shard.rows, graph.shard.first_node
    residents, counted = torch.arange(first, first + own.num_nodes), _without_ids(own)
    boundary.check_fits(counted)
    reading = _ShardRows(graph, residents)
    hops = boundary.around(counted, residents, reading.edges_into, seed)
    receiving = [reading.rows_of(hop) for hop in [residents, *hops][: len(hops)]]
    outside = torch.cat([residents[:0], *hops])
    nodes = torch.cat([residents, outside])
    arrays = graph.extended(own.node_arrays, outside) if hops else {}
    part = induced(joined(receiving), nodes, arrays) if hops else graph.shard.part()
    if coverage is not None:
        degrees = graph.extended({"degrees": own.degrees()}, outside)["degrees"]
        part.node_arrays["coverage"] = coverage.of(part, degrees, own.num_nodes)
    return part, nodes


class _ShardRows(RowReading):
    """Has the rows of the own nodes, and asks other ranks for theirs.

    Args:
        graph: The whole graph.
        residents: The own nodes.
    """

    def __init__(self, graph: ShardedGraph, residents: Tensor) -> None:
        super().__init__()
        self._graph, self._residents = graph, residents

    def read(self, nodes: Tensor) -> PartRows:
        if nodes is self._residents:
            own = self._graph.shard.rows
            return PartRows(own.indptr, own.indices, own.edge_arrays)
        rows, edges = self._graph.answered(self._graph.rows(nodes, weight=None)), dict[str, Tensor]()
        if self._graph.has_edge_arrays:
            ids = rows.edge_ids(torch.arange(rows.senders.numel()))
            edges = self._graph.answered(self._graph.of_edges[0].fetch(ids))
        return PartRows(rows.starts, rows.senders, edges)


def _without_ids(rows: Graph) -> Graph:
    """Return the shard's rows without ``n_id``, which whole graphs do not have: a budget of bytes counts the others."""
    arrays = {name: array for name, array in rows.node_arrays.items() if name != "n_id"}
    return checked_graph(rows.indptr, rows.indices, arrays, rows.edge_arrays, num_senders=rows.num_senders)
