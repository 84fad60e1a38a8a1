"""The whole graph as one rank sees it: its own rows are memory-mapped, and it asks other ranks for theirs.

    ids -> the ranks that own them -> their answers -> back in the order of the ids

Ranks answer at any time (:mod:`wire.asking`), so that each asks for what it needs when it likes, in the background too.
The few methods that are collective say so: all ranks of a channel call them together, also those that need nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import BufferPool
from lightning_gnn_dist.engine.layer_kernels import add_column_norms
from lightning_gnn_dist.engine.sample import csr_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import NONE, edge_weights
from lightning_gnn_dist.extensions.larger_than_memory.row_cache import Arrays, RowCache
from lightning_gnn_dist.extensions.larger_than_memory.tables import Table, Tables
from lightning_gnn_dist.extensions.shards.owner import (
    DEGREES,
    EDGES,
    LINKED,
    NODES,
    ROWS,
    Join,
    Message,
    Owner,
    Question,
    Route,
    answer_of,
    ask_owners,
    letters_of,
    narrow,
)
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
from lightning_gnn_dist.graph.rows import bytes_per_row, starts_of, take_rows
from lightning_gnn_dist.graph.shard import Shard, TypedBounds
from lightning_gnn_dist.sampling.turns import Result, Steps, answered
from lightning_gnn_dist.wire.asking import Asking
from lightning_gnn_dist.wire.channel import Channel

BYTES_OF_A_ROUND = 1 << 26  # of rows of other ranks that are asked for at once


class FetchedRows(NamedTuple):
    """All edges of some nodes.

    Attributes:
        starts: Where each node's edges start in ``senders`` and ``weights``, and where the last ones end.
        senders: The senders of the edges, node after node, by their ids in the whole graph.
        weights: The edges' weights, float32; None if none were asked for.
        first_edges: The id of each node's first edge in the whole graph; None if it has no edge arrays.
    """

    starts: Tensor
    senders: Tensor
    weights: Tensor | None
    first_edges: Tensor | None

    def edge_ids(self, positions: Tensor) -> Tensor:
        """Return the ids in the whole graph of the edges at some positions of ``senders``."""
        assert self.first_edges is not None
        row = torch.searchsorted(self.starts, positions, right=True) - 1
        return self.first_edges[row] + positions - self.starts[row]


class ShardedGraph(Tables[TypedBounds]):
    """A graph of which each rank of a channel holds one shard. Making one is collective.

    Args:
        shard: This rank's shard. Rank ``i`` of the channel has shard ``i``.
        channel: The ranks that hold all shards together.
        cache_bytes: Memory for rows of other ranks that coming bulks need again.

    Attributes:
        types: Which rank owns which ids of each type; a graph without types counts as one of one type.
        orders: The shard's edges in the order of times, by the names of times.
    """

    def __init__(self, shard: Shard, channel: Channel, *, cache_bytes: int = 0) -> None:
        if channel.size != shard.bounds.num_shards or channel.rank != shard.index:
            raise ValueError(
                f"Rank {channel.rank} of {channel.size} needs shard {channel.rank} of {channel.size}, and has shard "
                f"{shard.index} of {shard.bounds.num_shards}: divide the graph into as many shards as ranks hold it "
                "together."
            )
        self.shard, self.channel, self.types = shard, channel, shard.bounds.types
        self.orders: dict[str, TimeOrder] = {}
        pool = BufferPool(2 * channel.size)  # for rows on their way, so that the system need not clear new memory
        self._owner = Owner(shard.rows, self.types, shard.index, pool, self.orders)
        self._asking = Asking(channel, partial(answer_of, self._owner), pool.take)
        self._splits: dict[str, Tensor] = {}
        super().__init__(self.types, self._tables_of_nodes(cache_bytes), self._tables_of_edges(), cache_bytes)

    @property
    def num_nodes(self) -> int:
        return int(self.shard.bounds.nodes[-1])

    @property
    def has_edge_arrays(self) -> bool:
        return bool(self.of_edges)

    def split(self, name: str) -> Tensor:
        """Return the ids of all nodes of the whole graph that ``<name>_mask`` marks, increasing. Collective."""
        if name not in self._splits:
            own = self.ids_of_own(self.shard.rows.split(name))
            self._splits[name] = torch.cat(self.channel.exchange([own] * self.channel.size))
        return self._splits[name]

    def close(self) -> None:
        """End the connections, when the other ranks need nothing more of this one. Collective."""
        self._asking.close()
        self.channel.close()

    def abort(self) -> None:
        """End the connections at once; who asks gets an error, in the background too. Not collective."""
        self._asking.abort()
        self.channel.close()

    def ask(self, questions: list[Question]) -> list[list[Message]]:
        """Return for each question the answer of each rank, the own one too, in one exchange."""
        return ask_owners(self._asking, self._owner, questions)

    def answered(self, steps: Steps[Result]) -> Result:
        """Do at once what asks other ranks."""
        return answered(steps, self.ask)

    def rows(self, nodes: Tensor, weight: str | None) -> Steps[FetchedRows]:
        """Return all edges of some nodes, for samplers that look at many rows at once.

        Args:
            nodes: The nodes, in increasing order of their ids in the whole graph.
            weight: The name of the edge array that weighs edges, or None.
        """
        local = self._local(nodes, self.shard.bounds.nodes)
        (answers,) = yield [Question(ROWS, [[narrow(some, most), letters_of(weight)] for some, most in local])]
        counts, senders = (torch.cat([answer[i] for answer in answers]) for i in (0, 1))
        weights = None if weight is None else torch.cat([answer[2] for answer in answers])
        firsts = None
        if self.has_edge_arrays:
            begins = self.shard.bounds.edges.tolist()
            firsts = torch.cat(
                [answer[-1].to(torch.int64) + begin for answer, begin in zip(answers, begins, strict=False)]
            )
        back = counts.to(torch.int64)
        starts = starts_of(back)
        return FetchedRows(starts, self._checked(senders), weights, firsts)

    def column_norms(self, weight: str | None) -> Tensor:
        """Return the squared norm of each column of A: float64, shape ``(num_nodes,)``. Collective.

        Ranks add their rows one after the other, so that the sums are bit for bit those of a rank that has all rows.
        """
        own, size, index = self.shard.rows, self.channel.size, self.shard.index
        norms = torch.zeros(self.num_nodes if index == 0 else 0, dtype=torch.float64)
        for turn in range(max(1, 2 * size - 2)):  # once around to add, and again to tell
            sender, receiver = turn % size, (turn + 1) % size
            if turn == index:
                values = NONE if weight is None else edge_weights(own, weight)
                if not add_column_norms(csr_of(own), values, norms.numpy()):
                    raise graph_is_damaged(own)
            to_next = [norms if (index, rank) == (sender, receiver) else norms[:0] for rank in range(size)]
            came = self.channel.exchange(to_next)[sender]
            norms = came if index == receiver else norms
        return norms

    def degrees(self, nodes: Tensor) -> Steps[Tensor]:
        """Return the in-degrees of some nodes, in their order."""
        route, questions = self.to_owners(nodes)
        (answers,) = yield [Question(DEGREES, questions)]
        return route.restore([answer[0] for answer in answers])

    def extended(self, arrays: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Return arrays of the own nodes in RAM, each with the rows of some other nodes below. Collective.

        They come in rounds that bound what else is held. A round takes every so-manieth node: consecutive ones are
        mostly of one rank, which would answer all ranks while the others wait.
        """
        num_own = self.shard.rows.num_nodes
        full = {name: a.new_empty((num_own + ids.numel(), *a.shape[1:])) for name, a in sorted(arrays.items())}
        for name, out in full.items():
            out[:num_own] = arrays[name]
        counts = torch.cat(self.channel.exchange([torch.tensor([ids.numel()])] * self.channel.size))
        rounds = -(-int(counts.max()) * bytes_per_row(arrays) // BYTES_OF_A_ROUND)
        for start in range(rounds):
            at = slice(start, None, rounds)
            owners, rows_there = self.types.owners(ids[at].contiguous())
            route = Route(owners, self.channel.size)
            asked = self.channel.exchange(route.pieces(rows_there))
            answers = {name: [take_rows(array, rows) for rows in asked] for name, array in sorted(arrays.items())}
            for name, of_ranks in answers.items():
                full[name][num_own:][at] = route.restore(self.channel.exchange(of_ranks, route.sizes))
        return full

    def _fetched(self, kind: int, ids: Tensor, bounds: Tensor, arrays: Arrays, *more: Tensor) -> Steps[Arrays]:
        """Return the rows of each array for increasing ids; the question goes on with ``more``."""
        local = self._local(ids, bounds)
        (answers,) = yield [Question(kind, [[narrow(some, most), *more] for some, most in local])]
        return {name: _joined([answer[at] for answer in answers]) for at, name in enumerate(sorted(arrays))}

    def _local(self, ids: Tensor, bounds: Tensor) -> list[tuple[Tensor, int]]:
        """Divide increasing ids among their owners, as places in the owners' shards, and return how many these have."""
        begins = torch.searchsorted(ids, bounds)
        pieces = ids.split(begins.diff().tolist())
        return [
            (some - low, most) for some, low, most in zip(pieces, bounds.tolist(), bounds.diff().tolist(), strict=False)
        ]

    def to_owners(self, nodes: Tensor, *columns: Tensor) -> tuple[Route, list[Message]]:
        """Divide some nodes, and a number or more that goes with each, among their owners: a question for each.

        A question begins with the nodes as rows of the owner's shard.
        """
        owners, rows = self.types.owners(nodes)
        route, sizes = Route(owners, self.channel.size), self.shard.bounds.nodes.diff().tolist()
        local = [narrow(some, most) for some, most in zip(route.pieces(rows), sizes, strict=True)]
        return route, [list(of_rank) for of_rank in zip(local, *map(route.pieces, columns), strict=True)]

    def in_order(self, route: Route, answers: list[Message]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn into the order of the request.

        Returns how many edges each row has, their senders, and what brings another number of each edge into order.
        """
        counts, senders, join = route.in_order(answers)
        return counts, self._checked(senders), join

    def _checked(self, senders: Tensor) -> Tensor:
        """Return senders that ranks sent; refuse ids outside the graph, which would index beyond a table."""
        low, high = (int(end) for end in senders.aminmax()) if senders.numel() else (0, -1)
        if low < 0 or high >= self.num_nodes:
            raise ValueError(
                f"A rank has an edge from node {low if low < 0 else high}, but ids lie in [0, {self.num_nodes}): its "
                "shard was changed after it was opened. Copy the shards again."
            )
        return senders

    def are_edges(
        self, edges: Tensor, edge_type: int | None = None, at: tuple[str, Tensor] | None = None
    ) -> Steps[Tensor]:
        """Return whether the graph has each of some edges: a bool for each.

        Args:
            edges: Senders and receivers, by their ids in the whole graph, shape (2, n).
            edge_type: Of a typed graph the number of the one type to look at.
            at: The name of times whose order is prepared, and when each edge must be there, as an integer. Default: at
                any time.
        """
        senders = edges[0].to(self.shard.rows.indices.dtype)
        kind = torch.tensor([] if edge_type is None else [edge_type])
        times, name = ([], []) if at is None else ([at[1]], [letters_of(at[0])])
        route, questions = self.to_owners(edges[1].contiguous(), senders, *times)
        (answers,) = yield [Question(LINKED, [[rows, some, kind, *when, *name] for rows, some, *when in questions])]
        return route.restore([answer[0] for answer in answers])

    def ids_of_own(self, rows: Tensor) -> Tensor:
        """Return the ids in the whole graph of some rows of the own shard."""
        return self.types.to_whole(self.shard.index, rows)

    def _tables_of_nodes(self, cache_bytes: int) -> list[Table]:
        arrays = [dict(self.shard.rows.types.node_arrays[kind]) for kind in self.types.node_types]
        of_types = zip(arrays, self.types.nodes, self.types.offsets, strict=False)
        return [
            self._table(NODES, number, own, bounds, cache_bytes, offset)
            for number, (own, bounds, offset) in enumerate(of_types)
        ]

    def _tables_of_edges(self) -> dict[int, Table]:
        """Where no edge has arrays, nobody may have counted the edges of shards."""
        arrays = [dict(self.shard.rows.types.edge_arrays[kind]) for kind in self.types.edge_types]
        return {
            number: self._table(EDGES, number, own, self.types.edges[number])
            for number, own in enumerate(arrays)
            if own
        }

    def _table(
        self, kind: int, number: int, own: Arrays, bounds: Tensor, cache_bytes: int = 0, first_node: int = 0
    ) -> Table:
        first, end = bounds[self.shard.index : self.shard.index + 2].tolist()
        width = bytes_per_row(own)
        most = min(cache_bytes // width, int(bounds[-1]) - (end - first)) if width else 0
        cache = RowCache(own, most, lambda ids: self._count_edges_from(ids + first_node))
        of_type = torch.tensor([number])
        return Table(own, first, end - first, cache, lambda ids: self._fetched(kind, ids, bounds, own, of_type))

    def _count_edges_from(self, ids: Tensor) -> Tensor:
        """Return how many edges of the shard come from each of some nodes that others own."""
        senders, counts = self._senders
        at = torch.searchsorted(senders, ids).clamp_(max=max(0, len(senders) - 1))
        return torch.where(senders[at] == ids, counts[at], 0) if len(senders) else torch.zeros_like(ids)

    @cached_property
    def _senders(self) -> tuple[Tensor, Tensor]:
        """The shard's senders, increasing, and how many edges come from each: found when they are first needed."""
        senders, counts = self.shard.rows.indices.unique(return_counts=True)
        return senders.to(torch.int64), counts


def union(vectors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the distinct entries of several vectors, increasing, and the places of each vector's entries in them."""
    distinct, inverse = torch.cat(list(vectors)).unique(return_inverse=True)
    return distinct, inverse.split([vector.numel() for vector in vectors])


def _joined(pieces: list[Tensor]) -> Tensor:
    """The rows of several tensors, copied only if there are several."""
    filled = [piece for piece in pieces if len(piece)]
    return torch.cat(filled) if len(filled) > 1 else (filled or pieces)[0]
