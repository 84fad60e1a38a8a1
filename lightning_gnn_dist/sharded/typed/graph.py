"""A whole typed graph as one rank sees it: draws per edge type, and rows of each type, from the ranks that own them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import RowCache, Rows
from lightning_gnn_dist.batches.ahead.turns import Steps
from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.engine.temporal.order import ordered
from lightning_gnn_dist.engine.temporal.times import BEFORE_ALL, as_integers, sources_of
from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds
from lightning_gnn_dist.sharded.owner import DRAW, EDGES, NODES, letters_of, narrow
from lightning_gnn_dist.sharded.questions import Question
from lightning_gnn_dist.sharded.remote_graph import Route, ShardedGraph
from lightning_gnn_dist.sharded.tables import Table
from lightning_gnn_dist.sharded.typed.owner import DEGREES, TIMES, Seen, TypedOwner, draw_of
from lightning_gnn_dist.sharded.typed.tables import Caches
from lightning_gnn_dist.wire.channel import Channel


class TypedDrawn(NamedTuple):
    """The edges drawn for some nodes.

    Attributes:
        counts: The number of edges drawn for each node, int64.
        senders: The senders of these edges, node after node, by their ids in the whole graph.
        kinds: The number of each edge's type.
        edge_ids: The edges' ids in their types; None if no type has edge arrays.
    """

    counts: Tensor
    senders: Tensor
    kinds: Tensor
    edge_ids: Tensor | None


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

    def draw_types(
        self,
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
            nodes: The nodes, by their ids in the whole graph.
            batches: The number of the batch that each node is for, in increasing order.
            keys: The random key of this hop in each batch, for each edge type, shape (batches, types).
            fanouts: Neighbours to draw of each edge type; -1 takes all.
            replace: Whether an edge may be drawn more than once.
            seen: What the trees of batches by time see; then ``batches`` are numbers of trees. None for all edges.
        """
        owners, rows = self.types.owners(nodes)
        route, sizes = Route(owners, self.channel.size), self.shard.bounds.nodes.diff().tolist()
        pieces = zip(route.pieces(rows), route.pieces(batches), sizes, strict=True)
        how = keys, fanouts, replace, seen
        (answers,) = yield [Question(DRAW, [draw_of(some, of, *how, most) for some, of, most in pieces])]
        counts, senders, join = self._drawn(route, answers)
        kinds, edge_ids = join([answer[2] for answer in answers]), None
        if self.has_edge_arrays:
            edge_ids = join([self._edge_ids(answer[3], answer[2], rank) for rank, answer in enumerate(answers)])
        return TypedDrawn(counts, senders, kinds, edge_ids)

    def whole_rows(self, nodes: Tensor) -> TypedDrawn:
        """Return all edges of some nodes, in their order."""
        keys, batches = torch.zeros(1, len(self.types.edge_types), dtype=torch.int64), torch.zeros_like(nodes)
        return self.answered(self.draw_types(nodes, batches, keys, torch.full_like(keys[0], -1), replace=False))

    def degrees(self, nodes: Tensor) -> Tensor:
        """Return the in-degrees of some nodes, in their order."""
        owners, rows = self.types.owners(nodes)
        route = Route(owners, self.channel.size)
        sizes = self.shard.bounds.nodes.diff().tolist()
        questions = [[narrow(some, most)] for some, most in zip(route.pieces(rows), sizes, strict=True)]
        (answers,) = self.ask([Question(DEGREES, questions)])
        return route.restore([answer[0] for answer in answers])

    def times_of(self, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        """Return the rows of one array of a node type, for ids in it in any order."""
        bounds = self.types.nodes[number]
        owners = torch.searchsorted(bounds, ids.contiguous(), right=True) - 1
        route, more = Route(owners, self.channel.size), [torch.tensor([number]), letters_of(name)]
        pieces = zip(route.pieces(ids - bounds[owners]), bounds.diff().tolist(), strict=True)
        (answers,) = yield [Question(TIMES, [[narrow(some, most), *more] for some, most in pieces])]
        return route.restore([answer[0] for answer in answers])

    def prepare_times(self, name: str) -> None:
        """Order the own edges by the times called ``name``, for draws by time. Collective, the first time."""
        if name in self._of_types.orders:
            return
        rows, own = self.shard.rows, self.shard.rows.types
        assert own is not None
        times = torch.full((rows.num_edges,), BEFORE_ALL)
        for (sender, *_), source, edge_type in zip(own.edge_types, sources_of(rows, name), own.edge_types, strict=True):
            at = own.edges_of(edge_type)
            if source is not None and source.first_sender is None:
                times[at] = as_integers(source.times)
            elif source is not None:
                ids, inverse = (rows.indices[at].to(torch.int64) - self.types.nodes_of(sender).start).unique(
                    return_inverse=True
                )
                found = self.answered(self.times_of(own.node_types.index(sender), name, ids))
                times[at] = as_integers(found)[inverse]
        self._of_types.orders[name] = ordered(rows, name, times)
        self.channel.exchange([torch.empty(0)] * self.channel.size)  # from now on each rank answers

    def _edge_ids(self, places: Tensor, kinds: Tensor, rank: int) -> Tensor:
        return places.to(torch.int64) + self.types.edges[:, rank][kinds.to(torch.int64)]

    def _owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.types.owners(ids)

    def ids_of_own(self, rows: Tensor) -> Tensor:
        return self.types.to_whole(self.shard.index, rows)

    def _new_owner(self, pool: Pool) -> TypedOwner:
        self._of_types = TypedOwner(self.shard, pool)
        return self._of_types

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
