"""What a rank answers of its own shard, when others ask and when it needs the same itself.

Ids travel as places in the owner's shard, and numbers in as few bytes as the largest of them needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import Rule
from lightning_gnn_dist.engine.row_kernels import draw_rows
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.weights import edge_weights, weights_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sampling.negatives import has_edges
from lightning_gnn_dist.sharded.messages import (
    DRAW,
    DRAW_TYPES,
    EDGES,
    HAPPENED,
    LINKED,
    NODES,
    ROWS,
    TIMES_OF_EDGES,
    TIMES_OF_NODES,
    Message,
    gathered,
    letters_of,
    name_of,
    narrow,
)
from lightning_gnn_dist.sharded.temporal.answers import TimedAnswers


class Owner:
    """Answers questions about a shard, in any thread.

    Args:
        shard: The shard.
        pool: Lends memory for rows, until they are sent.
        orders: The shard's edges in the order of times, by the names of times.
    """

    def __init__(self, shard: Shard, pool: Pool, orders: Mapping[str, TimeOrder]) -> None:
        self._shard, self._rows, self._pool = shard, shard.rows, pool
        self._timed = TimedAnswers(shard.rows, orders)

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question."""
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, ROWS: self._whole_rows, NODES: self._nodes, EDGES: self._edges}
        of_kinds |= {DRAW_TYPES: self._draw_by_time, TIMES_OF_NODES: self._timed.of_nodes}
        of_kinds |= {TIMES_OF_EDGES: self._timed.of_edges, HAPPENED: self._timed.happened, LINKED: self._linked}
        return of_kinds[kind](*question)

    def _draw_by_time(self, rows: Tensor, *question: Tensor) -> Message:
        """The number of edges drawn for each node, their senders, and where there are edge arrays, their places."""
        local = rows.to(torch.int64)
        drawn, positions = self._timed.drawn(local, local + self._shard.first_node, list(question))
        places = [narrow(positions, self._rows.num_edges)] if self._rows.edge_arrays else []
        most = int(drawn.max()) if len(drawn) else 0
        return [narrow(drawn, most), self._rows.indices[positions], *places]

    def _draw(self, nodes: Tensor, counts: Tensor, keys: Tensor, settings: Tensor, weight: Tensor) -> Message:
        """The number of edges drawn for each node, their senders, and where there are edge arrays, their places."""
        (fanout, replace), words = settings.tolist(), keys.repeat_interleave(counts)
        name, local = name_of(weight) or None, nodes.to(torch.int64)
        rule = Rule(weights_of(self._rows, name, draws=fanout >= 0), bool(replace))
        degrees = self._degrees(local)
        is_whole = torch.full_like(degrees, fanout < 0, dtype=torch.bool)
        is_whole |= (degrees == 0) if rule.replace else (degrees <= fanout)
        drawn = torch.where(is_whole, degrees, fanout)
        longest = int(degrees.max()) if len(degrees) else 0
        positions = np.empty(int(drawn.sum()), np.int64)
        senders = self._rows.indices.new_empty(len(positions))
        draw_rows(
            self._rows.indptr.numpy(),
            self._rows.indices.numpy(),
            local.numpy(),
            (local + self._shard.first_node).numpy(),
            words.numpy().view(np.uint64),
            fanout,
            rule,
            longest,
            (drawn.cumsum(0) - drawn).numpy(),
            positions,
            senders.numpy(),
        )
        places = [narrow(torch.from_numpy(positions), self._rows.num_edges)] if self._rows.edge_arrays else []
        return [narrow(drawn, longest if fanout < 0 else fanout), senders, *places]

    def _whole_rows(self, nodes: Tensor, weight: Tensor) -> Message:
        """The degrees, the senders and weights of all edges, and where rows begin; the last two where there are any."""
        local, name = nodes.to(torch.int64), name_of(weight) or None
        degrees, at = self._degrees(local), edge_positions(self._rows.indptr, local)
        found = [narrow(degrees, int(degrees.max()) if len(degrees) else 0), self._rows.indices[at]]
        if name is not None:
            found.append(torch.from_numpy(edge_weights(self._rows, name))[at])
        if self._rows.edge_arrays:
            found.append(narrow(self._rows.indptr[local], self._rows.num_edges))
        return found

    def _nodes(self, nodes: Tensor) -> Message:
        return gathered(self._rows.node_arrays, nodes, self._pool)

    def _edges(self, edges: Tensor) -> Message:
        return gathered(self._rows.edge_arrays, edges, self._pool)

    def _linked(self, *question: Tensor) -> Message:
        return linked(self._rows, *question)

    def _degrees(self, local: Tensor) -> Tensor:
        """Return the lengths of own rows; refuse rows that reach beyond the shard, where compiled loops would read."""
        rows = self._rows
        first, last = rows.indptr[local], rows.indptr[local + 1]
        if bool(((first < 0) | (last < first) | (last > rows.num_edges)).any()):
            raise graph_is_damaged(rows)
        return last - first


def draw_of(
    nodes: Tensor, batches: Tensor, keys: Tensor, fanout: int, replace: bool, weight: str | None, most: int
) -> Message:
    """The question for neighbours of some nodes.

    Args:
        nodes: Their places in the owner's shard.
        batches: The number of the batch that each is for, in increasing order.
        keys: The random key of each batch.
        fanout: Neighbours to draw; -1 takes all.
        replace: Whether an edge may be drawn more than once.
        weight: The name of the edge array that says how likely an edge is, or None.
        most: How many nodes the shard has.
    """
    counts = torch.bincount(batches, minlength=len(keys))
    return [narrow(nodes, most), counts, keys, torch.tensor([fanout, int(replace)]), letters_of(weight)]


def rows_of(nodes: Tensor, weight: str | None, most: int) -> Message:
    """The question for all edges of some nodes, by their places in the owner's shard."""
    return [narrow(nodes, most), letters_of(weight)]


def linked_of(senders: Tensor, receivers: Tensor, edge_type: int | None, most: int) -> Message:
    """The question which of some pairs of nodes are edges.

    Args:
        senders: Their ids in the whole graph.
        receivers: Their places in the owner's shard.
        edge_type: Of a typed graph the number of the one type to look at.
        most: How many nodes the shard has.
    """
    return [narrow(receivers, most), senders, torch.tensor([] if edge_type is None else [edge_type])]


def linked(rows: Graph, receivers: Tensor, senders: Tensor, edge_type: Tensor) -> Message:
    """The answer to :func:`linked_of`: a bool for each pair."""
    return [has_edges(rows, torch.stack([senders.to(torch.int64), receivers.to(torch.int64)]), *edge_type.tolist())]
