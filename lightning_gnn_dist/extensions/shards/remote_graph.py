"""The whole graph as one rank sees it: its own rows are memory-mapped, and it asks other ranks for theirs.

    ids -> the ranks that own them -> their answers -> back in the order of the ids

Ranks answer at any time (:mod:`wire.asking`), so that each asks for what it needs when it likes, in the background too.
The few methods that are collective say so: all ranks of a channel call them together, also those that need nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import BufferPool
from lightning_gnn_dist.engine.layer_kernels import add_column_norms
from lightning_gnn_dist.engine.sample import csr_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import NONE, edge_weights
from lightning_gnn_dist.extensions.larger_than_memory.row_cache import Arrays, RowCache
from lightning_gnn_dist.extensions.larger_than_memory.tables import Table, Tables
from lightning_gnn_dist.extensions.shards.index import Shard, TypedBounds
from lightning_gnn_dist.extensions.shards.owner import (
    DEGREES,
    EDGES,
    LINKED,
    NODES,
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
from lightning_gnn_dist.graph.rows import bytes_per_row, take_rows
from lightning_gnn_dist.sampling.turns import Result, Steps, answered
from lightning_gnn_dist.wire.asking import Asking
from lightning_gnn_dist.wire.channel import Channel

BYTES_OF_A_ROUND = 1 << 26  # of rows of other ranks that are asked for at once


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
        of_nodes = list(self._tables(NODES, cache_bytes).values())
        super().__init__(self.types, of_nodes, self._tables(EDGES), cache_bytes)

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

    def rows_of(self, arrays: dict[str, Tensor], ids: Tensor, first_row: int = 0) -> dict[str, Tensor]:
        """Return the rows of some nodes of arrays that each rank has of its own ones. Collective.

        Others' rows come in rounds that bound what else is held. A round takes every so-manieth node: consecutive ones
        are mostly of one rank, which would answer all ranks while the others wait.

        Args:
            arrays: The arrays of the own nodes, in RAM or mapped.
            ids: The nodes whose rows are wanted, with all own ones, in their order.
            first_row: The row of the shard that these arrays begin with.
        """
        (owners, rows), names = self.types.owners(ids), sorted(arrays)
        is_other = owners != self.shard.index
        full = {name: arrays[name].new_empty((len(ids), *arrays[name].shape[1:])) for name in names}
        for name, out in full.items():
            out[~is_other] = arrays[name]
        others = is_other.nonzero().view(-1)
        counts = torch.cat(self.channel.exchange([torch.tensor([len(others)])] * self.channel.size))
        rounds = -(-int(counts.max()) * bytes_per_row(arrays) // BYTES_OF_A_ROUND)
        for at in (others[start::rounds] for start in range(rounds)):
            route = Route(owners[at], self.channel.size)
            asked = [some - first_row for some in self.channel.exchange(route.pieces(rows[at]))]
            for name in names:
                answers = [take_rows(arrays[name], some) for some in asked]
                full[name][at] = route.restore(self.channel.exchange(answers, route.sizes))
        return full

    def fetched(self, kind: int, number: int, ids: Tensor, name: str | None = None) -> Steps[Arrays]:
        """Return rows of a type of nodes or edges, for increasing ids in it.

        Args:
            kind: ``NODES`` or ``EDGES``.
            number: The number of the type.
            ids: The ids.
            name: The array that is asked for. Default: all.
        """
        arrays, bounds = self._of_kind(kind)
        pieces = ids.split(torch.searchsorted(ids, bounds[number]).diff().tolist())
        of_ranks = zip(pieces, bounds[number].tolist(), bounds[number].diff().tolist(), strict=False)
        more = torch.tensor([number]), letters_of(name)
        (answers,) = yield [Question(kind, [[narrow(some - low, most), *more] for some, low, most in of_ranks])]
        names = sorted(arrays[number]) if name is None else [name]
        return {each: _joined([answer[at] for answer in answers]) for at, each in enumerate(names)}

    def rows_at(self, kind: int, number: int, ids: Tensor, name: str | None = None) -> Steps[Arrays]:
        """Return rows of a type for some ids in it, in any order; the arguments are those of :meth:`fetched`."""
        distinct, at = ids.unique(return_inverse=True)
        rows = yield from self.fetched(kind, number, distinct, name)
        return {each: array[at] for each, array in rows.items()}

    def array_of(self, kind: int, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        """Return what an array of a type holds for some ids in it, in any order."""
        return (yield from self.rows_at(kind, number, ids, name))[name]

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
        (name, times), none = ("", []) if at is None else (at[0], [at[1]]), torch.empty(0, dtype=torch.int64)
        route, questions = self.to_owners(edges[1].contiguous(), senders, *times)
        asked = [[rows, of, kind, *(when or [none]), letters_of(name)] for rows, of, *when in questions]
        (answers,) = yield [Question(LINKED, asked)]
        return route.restore([answer[0] for answer in answers])

    def ids_of_own(self, rows: Tensor) -> Tensor:
        """Return the ids in the whole graph of some rows of the own shard."""
        return self.types.to_whole(self.shard.index, rows)

    def _of_kind(self, kind: int) -> tuple[list[Arrays], Tensor]:
        """The own arrays of each type of nodes or edges, and where each shard's begin."""
        types = self.shard.rows.types
        if kind == NODES:
            return [dict(own) for own in types.node_arrays.values()], self.types.nodes
        return [dict(own) for own in types.edge_arrays.values()], self.types.edges

    def _tables(self, kind: int, cache_bytes: int = 0) -> dict[int, Table]:
        """The rows of each type of nodes, or of those types of edges that have arrays: nobody may count the others."""
        (arrays, bounds), found = self._of_kind(kind), dict[int, Table]()
        for number, own in enumerate(arrays):
            if kind == NODES or own:
                first, end = bounds[number, self.shard.index : self.shard.index + 2].tolist()
                width = bytes_per_row(own)
                most = min(cache_bytes // width, int(bounds[number, -1]) - (end - first)) if width else 0
                fetch = partial(self.fetched, kind, number)
                found[number] = Table(own, first, end - first, RowCache(own, most), fetch)
        return found


def union(vectors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the distinct entries of several vectors, increasing, and the places of each vector's entries in them."""
    distinct, inverse = torch.cat(list(vectors)).unique(return_inverse=True)
    return distinct, inverse.split([vector.numel() for vector in vectors])


def _joined(pieces: list[Tensor]) -> Tensor:
    """The rows of several tensors, copied only if there are several."""
    filled = [piece for piece in pieces if len(piece)]
    return torch.cat(filled) if len(filled) > 1 else (filled or pieces)[0]
