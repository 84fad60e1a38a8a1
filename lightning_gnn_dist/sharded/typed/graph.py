"""A whole typed graph as one rank sees it: rows of each type, from the ranks that own them."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import RowCache, Rows
from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds
from lightning_gnn_dist.sharded.messages import DEGREES, EDGES, NODES, narrow
from lightning_gnn_dist.sharded.questions import Question
from lightning_gnn_dist.sharded.remote_graph import Route, ShardedGraph
from lightning_gnn_dist.sharded.tables import Table
from lightning_gnn_dist.sharded.typed.owner import TypedOwner
from lightning_gnn_dist.sharded.typed.tables import Caches
from lightning_gnn_dist.wire.channel import Channel


class TypedShardedGraph(ShardedGraph):
    """A typed graph of which each rank of a channel holds one shard. Making one is collective.

    Attributes:
        types: The types of the whole graph, and which rank owns which ids.
        of_nodes: The arrays of each node type, in the order of types.
        of_edges: The arrays of each edge type.
    """

    cache: Caches  # type: ignore[assignment]

    def __init__(self, shard: Shard, channel: Channel, *, cache_bytes: int = 0) -> None:
        assert shard.bounds.types is not None and shard.rows.types is not None
        self.types: TypedBounds = shard.bounds.types
        super().__init__(shard, channel, cache_bytes=cache_bytes)
        own = shard.rows.types
        self.of_edges = [
            self._table(EDGES, number, dict(own.edge_arrays[kind]), self.types.edges[number], 0)
            for number, kind in enumerate(self.types.edge_types)
        ]

    @property
    def has_edge_arrays(self) -> bool:
        return any(table.own for table in self.of_edges)

    def degrees(self, nodes: Tensor) -> Tensor:
        """Return the in-degrees of some nodes, in their order."""
        owners, rows = self.owners(nodes)
        route = Route(owners, self.channel.size)
        sizes = self.shard.bounds.nodes.diff().tolist()
        questions = [[narrow(some, most)] for some, most in zip(route.pieces(rows), sizes, strict=True)]
        (answers,) = self.ask([Question(DEGREES, questions)])
        return route.restore([answer[0] for answer in answers])

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.types.owners(ids)

    def ids_of_own(self, rows: Tensor) -> Tensor:
        return self.types.to_whole(self.shard.index, rows)

    def _new_owner(self, pool: Pool) -> TypedOwner:
        return TypedOwner(self.shard, pool, self.orders)

    def _new_cache(self, num_bytes: int) -> Caches:  # type: ignore[override]
        """Make the tables of nodes; each type's cache has the share of its rows in the bytes of all rows of others."""
        types = self.shard.rows.types
        assert types is not None
        arrays = [dict(types.node_arrays[kind]) for kind in self.types.node_types]
        others = self.types.nodes[:, -1] - self.types.nodes.diff()[:, self.shard.index]
        sizes = [int(count) * bytes_per_row(own) for count, own in zip(others, arrays, strict=True)]
        self.of_nodes = [
            self._table(NODES, number, own, self.types.nodes[number], num_bytes * sizes[number] // max(1, sum(sizes)))
            for number, own in enumerate(arrays)
        ]
        return Caches([table.cache for table in self.of_nodes])

    def _table(self, kind: int, number: int, own: Rows, bounds: Tensor, cache_bytes: int) -> Table:
        first, end = bounds[self.shard.index : self.shard.index + 2].tolist()
        offset = self.types.offsets[number] if kind == NODES else 0
        most = min(cache_bytes // max(1, bytes_per_row(own)), int(bounds[-1]) - (end - first))
        cache = RowCache(own, most, lambda ids: self._count_edges_from(ids + offset))
        return Table(
            own, first, end - first, cache, lambda ids: self._fetched(kind, ids, bounds, own, torch.tensor([number]))
        )
