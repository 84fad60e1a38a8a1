"""The whole graph as one rank sees it: its own rows are memory-mapped, and it asks other ranks for theirs.

    ids -> the ranks that own them -> their answers -> back in the order of the ids

Every method that asks is collective: all ranks of a channel call it together, also those that need nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import Rule
from lightning_gnn_dist.engine.layer_kernels import add_column_norms
from lightning_gnn_dist.engine.row_kernels import draw_rows
from lightning_gnn_dist.engine.weights import NONE, edge_weights
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.rows import bytes_per_row, edge_positions, take_rows
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.cache import RowCache
from lightning_gnn_dist.wire.channel import Channel

_BYTES_OF_A_ROUND = 1 << 26


class Drawn(NamedTuple):
    """The edges drawn for some nodes.

    Attributes:
        counts: The number of edges drawn for each node.
        senders: The senders of these edges, node after node, by their ids in the whole graph.
        edge_ids: The edges' ids in the whole graph; None if it has no edge arrays.
    """

    counts: Tensor
    senders: Tensor
    edge_ids: Tensor | None


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


class Route:
    """Sorts the rows of a request by the rank that they go to, and the answers back into order.

    Args:
        owners: The rank that each row goes to.
        num_ranks: The number of ranks.
    """

    def __init__(self, owners: Tensor, num_ranks: int) -> None:
        self.order = owners.argsort(stable=True)
        self.sizes: list[int] = torch.bincount(owners, minlength=num_ranks).tolist()

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the rows that each rank is sent, in order of rank."""
        return list(rows[self.order].split(self.sizes))

    def restore(self, answers: Sequence[Tensor]) -> Tensor:
        """Return one answer for each row of the request, in its order."""
        rows = torch.cat(list(answers))
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out


class ShardedGraph:
    """A graph of which each rank of a channel holds one shard.

    Args:
        shard: This rank's shard. Rank ``i`` of the channel has shard ``i``.
        channel: The ranks that hold all shards together.
        cache_bytes: Memory for feature rows of other ranks: of the nodes that most edges of the own shard come from.
    """

    def __init__(self, shard: Shard, channel: Channel, *, cache_bytes: int = 0) -> None:
        if channel.size != shard.bounds.num_shards or channel.rank != shard.index:
            raise ValueError(
                f"Rank {channel.rank} of {channel.size} needs shard {channel.rank} of {channel.size}, and has shard "
                f"{shard.index} of {shard.bounds.num_shards}: divide the graph into as many shards as ranks hold it "
                "together."
            )
        self.shard, self.channel = shard, channel
        self._splits: dict[str, Tensor] = {}
        self._norms: dict[str | None, Tensor] = {}
        self.cache = RowCache(self._asked_most(cache_bytes), self._fetch_nodes)

    @property
    def num_nodes(self) -> int:
        return int(self.shard.bounds.nodes[-1])

    @property
    def has_edge_arrays(self) -> bool:
        return bool(self.shard.rows.edge_arrays)

    def split(self, name: str) -> Tensor:
        """Return the ids of all nodes of the whole graph that ``<name>_mask`` marks, increasing. Collective."""
        if name not in self._splits:
            own = self.shard.rows.split(name) + self.shard.first_node
            self._splits[name] = torch.cat(self.channel.exchange([own] * self.channel.size))
        return self._splits[name]

    def rows(self, nodes: Tensor, weight: str | None) -> FetchedRows:
        """Return all edges of some nodes, for samplers that look at many rows at once. Collective.

        Args:
            nodes: The nodes, in increasing order of their ids in the whole graph.
            weight: The name of the edge array that weighs edges, or None.
        """
        sizes = self._route(nodes, self.shard.bounds.nodes).sizes
        asked = self.channel.exchange(nodes.to(index_dtype(self.num_nodes)).split(sizes))
        own, local = self.shard.rows, torch.cat(asked).to(torch.int64) - self.shard.first_node
        degrees = self._degrees(local)
        answers = degrees.to(torch.int32).split([len(piece) for piece in asked])
        counts = self.channel.exchange(answers, sizes)
        lengths, sent = ([int(piece.sum()) for piece in pieces] for pieces in (counts, answers))
        at = edge_positions(own.indptr, local)
        senders = self._checked(torch.cat(self.channel.exchange(own.indices[at].split(sent), lengths)))
        weights = first_edges = None
        if weight is not None:
            values = torch.from_numpy(edge_weights(own, weight))[at]
            weights = torch.cat(self.channel.exchange(values.split(sent), lengths))
        if self.has_edge_arrays:
            first = own.indptr[local] + self.shard.first_edge
            first_edges = torch.cat(self.channel.exchange(first.split([len(piece) for piece in asked]), sizes))
        back = torch.cat(counts).to(torch.int64)
        return FetchedRows(torch.cat([back.new_zeros(1), back.cumsum(0)]), senders, weights, first_edges)

    def column_norms(self, weight: str | None) -> Tensor:
        """Return the squared norm of each column of A: float64, shape ``(num_nodes,)``. Collective, the first time.

        Ranks add their rows one after the other, so that the sums are bit for bit those of a rank that has all rows.
        """
        if weight not in self._norms:
            own, size, index = self.shard.rows, self.channel.size, self.shard.index
            norms = torch.zeros(self.num_nodes if index == 0 else 0, dtype=torch.float64)
            for turn in range(max(1, 2 * size - 2)):  # once around to add, and again to tell
                sender, receiver = turn % size, (turn + 1) % size
                if turn == index:
                    values = NONE if weight is None else edge_weights(own, weight)
                    if not add_column_norms(own.indptr.numpy(), own.indices.numpy(), values, norms.numpy()):
                        raise graph_is_damaged(own)
                to_next = [norms if (index, rank) == (sender, receiver) else norms[:0] for rank in range(size)]
                came = self.channel.exchange(to_next)[sender]
                norms = came if index == receiver else norms
            self._norms[weight] = norms
        return self._norms[weight]

    def draw(
        self, nodes: Tensor, batches: Tensor, keys: Tensor, fanout: int, *, replace: bool, weight: str | None = None
    ) -> Drawn:
        """Let the ranks that own the rows draw neighbours of some nodes. Collective.

        Args:
            nodes: The nodes, by their ids in the whole graph.
            batches: The number of the batch that each node is for, in increasing order.
            keys: The random key of this hop in each batch.
            fanout: Neighbours to draw; -1 takes all.
            replace: Whether an edge may be drawn more than once.
            weight: The name of the edge array that says how likely an edge is. With None all are equally likely.
        """
        route = self._route(nodes, self.shard.bounds.nodes)
        headers = [torch.stack([torch.bincount(p, minlength=len(keys)), keys], 1) for p in route.pieces(batches)]
        told = self.channel.exchange(headers)
        small = nodes.to(index_dtype(self.num_nodes))
        asked = self.channel.exchange(route.pieces(small), [int(header[:, 0].sum()) for header in told])
        words = torch.cat([header[:, 1].repeat_interleave(header[:, 0]) for header in told])
        drawn = self._draw_own(torch.cat(asked).to(torch.int64), words, fanout, self._rule(weight, replace))

        answers = drawn.counts.split([len(piece) for piece in asked])
        counts = self.channel.exchange(answers, route.sizes)
        lengths, sent = ([int(piece.sum()) for piece in pieces] for pieces in (counts, answers))
        back = torch.cat(counts).to(torch.int64)
        edge_order = route.order.repeat_interleave(back).argsort(stable=True)
        senders = self._checked(torch.cat(self.channel.exchange(drawn.senders.split(sent), lengths)))[edge_order]
        edge_ids = None
        if drawn.edge_ids is not None:
            edge_ids = torch.cat(self.channel.exchange(drawn.edge_ids.split(sent), lengths))[edge_order]
        return Drawn(route.restore([back]), senders.to(torch.int64), edge_ids)

    def fetch(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of every node array, by name, for distinct nodes. Collective."""
        held, rest = self.cache.find(ids)
        return self.cache.fill(self._fetch_nodes(ids[rest]), held, rest)

    def fetch_edges(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of every edge array, by name, for some edge ids. Collective."""
        return self._ask(ids, self.shard.bounds.edges, self.shard.rows.edge_arrays)

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
        rounds = -(-int(counts.max()) * bytes_per_row(arrays) // _BYTES_OF_A_ROUND)
        for start in range(rounds):
            at = slice(start, None, rounds)
            for name, rows in self._ask(ids[at].contiguous(), self.shard.bounds.nodes, arrays).items():
                full[name][num_own:][at] = rows
        return full

    def _fetch_nodes(self, ids: Tensor) -> dict[str, Tensor]:
        return self._ask(ids, self.shard.bounds.nodes, self.shard.rows.node_arrays)

    def _ask(self, ids: Tensor, bounds: Tensor, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Send each id to its owner, and return the rows of each array that owners answer with. Collective."""
        route = self._route(ids, bounds)
        first = int(bounds[self.shard.index])
        asked = [piece - first for piece in self.channel.exchange(route.pieces(ids))]
        answers = {name: [take_rows(array, rows) for rows in asked] for name, array in sorted(arrays.items())}
        return {name: route.restore(self.channel.exchange(rows, route.sizes)) for name, rows in answers.items()}

    def _route(self, ids: Tensor, bounds: Tensor) -> Route:
        return Route(torch.searchsorted(bounds, ids, right=True) - 1, self.channel.size)

    def _rule(self, weight: str | None, replace: bool) -> Rule:
        return Rule(NONE if weight is None else edge_weights(self.shard.rows, weight), replace)

    def _degrees(self, local: Tensor) -> Tensor:
        """Return the lengths of own rows; refuse rows that reach beyond the shard, where compiled loops would read."""
        rows = self.shard.rows
        first, last = rows.indptr[local], rows.indptr[local + 1]
        if bool(((first < 0) | (last < first) | (last > rows.num_edges)).any()):
            raise graph_is_damaged(rows)
        return last - first

    def _checked(self, senders: Tensor) -> Tensor:
        """Return senders that ranks sent; refuse ids outside the graph, which would index beyond a table."""
        low, high = (int(end) for end in senders.aminmax()) if senders.numel() else (0, -1)
        if low < 0 or high >= self.num_nodes:
            raise ValueError(
                f"A rank has an edge from node {low if low < 0 else high}, but ids lie in [0, {self.num_nodes}): its "
                "shard was changed after it was opened. Copy the shards again."
            )
        return senders

    def _draw_own(self, nodes: Tensor, words: Tensor, fanout: int, rule: Rule) -> Drawn:
        rows, local = self.shard.rows, nodes - self.shard.first_node
        degrees = self._degrees(local)
        is_whole = torch.full_like(degrees, fanout < 0, dtype=torch.bool)
        is_whole |= (degrees == 0) if rule.replace else (degrees <= fanout)
        counts = torch.where(is_whole, degrees, fanout)
        starts = counts.cumsum(0) - counts
        positions = np.empty(int(counts.sum()), np.int64)
        draw_rows(
            rows.indptr.numpy(),
            rows.indices.numpy(),
            local.numpy(),
            nodes.numpy(),
            words.numpy().view(np.uint64),
            fanout,
            rule,
            np.empty(max(fanout, int(degrees.max()) if len(degrees) else 0) if len(rule.weights) else 0),
            starts.numpy(),
            positions,
        )
        at = torch.from_numpy(positions)
        edge_ids = at + self.shard.first_edge if self.has_edge_arrays else None
        return Drawn(counts.to(torch.int32), rows.indices[at], edge_ids)

    def _asked_most(self, num_bytes: int) -> Tensor:
        """Return as many nodes of other ranks as fit, those that most edges of the own shard come from first."""
        shard = self.shard
        per_row = bytes_per_row(shard.rows.node_arrays)
        room = num_bytes // max(1, per_row)
        if not room:
            return torch.empty(0, dtype=torch.int64)
        ids, counts = shard.rows.indices.unique(return_counts=True)
        is_own = (ids >= shard.first_node) & (ids < shard.first_node + shard.rows.num_nodes)
        ids, counts = ids[~is_own].to(torch.int64), counts[~is_own]
        most: Tensor = ids[counts.argsort(descending=True, stable=True)[:room]]
        return most


def union(vectors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the distinct entries of several vectors, increasing, and the places of each vector's entries in them."""
    distinct, inverse = torch.cat(list(vectors)).unique(return_inverse=True)
    return distinct, inverse.split([vector.numel() for vector in vectors])
