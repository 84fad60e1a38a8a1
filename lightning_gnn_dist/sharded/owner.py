"""What a rank answers of its own shard, when others ask and when it needs the same itself.

Ids travel as places in the owner's shard, and numbers in as few bytes as the largest of them needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows
from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import Rule
from lightning_gnn_dist.engine.row_kernels import draw_rows
from lightning_gnn_dist.engine.weights import edge_weights, weights_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sampling.negatives import has_edges

Message: TypeAlias = list[Tensor]

DRAW, ROWS, NODES, EDGES, LINKED = range(5)  # kinds of questions
_WIDTHS = (torch.uint8, torch.int16, torch.int32)


class Answers(Protocol):
    """Answers questions about a shard, in any thread."""

    def answer(self, kind: int, question: Message) -> Message: ...


class Owner:
    """Answers questions about a shard, in any thread.

    Args:
        shard: The shard.
        pool: Lends memory for rows, until they are sent.
    """

    def __init__(self, shard: Shard, pool: Pool) -> None:
        self._shard, self._rows, self._pool = shard, shard.rows, pool

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question that a function of this module made, or to the ids of rows."""
        return (self._draw, self._whole_rows, self._nodes, self._edges, self._linked)[kind](*question)

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


def narrow(numbers: Tensor, most: int) -> Tensor:
    """Numbers from 0 to ``most`` in as few bytes as ``most`` needs."""
    dtype = next((dtype for dtype in _WIDTHS if most <= torch.iinfo(dtype).max), torch.int64)
    return numbers.to(dtype)


def gathered(arrays: Mapping[str, Tensor], places: Tensor, pool: Pool) -> Message:
    """The rows of all arrays at some places, in the order of the arrays' names."""
    local = places.to(torch.int64)
    return [gather_rows(arrays[name], local, pool) for name in sorted(arrays)]


def letters_of(name: str | None) -> Tensor:
    """A name as it travels; None travels as no letters."""
    return torch.tensor(list((name or "").encode()), dtype=torch.uint8)


def name_of(letters: Tensor) -> str:
    return letters.numpy().tobytes().decode()
