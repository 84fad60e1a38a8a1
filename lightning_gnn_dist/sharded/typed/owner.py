"""What a rank answers of its own shard of a typed graph.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.engine.rng import first_words
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.engine.typed.rows import NO_ORDER, Asked, draw_of_types
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.owner import (
    DRAW,
    EDGES,
    LINKED,
    NODES,
    Message,
    gathered,
    letters_of,
    linked,
    name_of,
    narrow,
)

DEGREES, TIMES = LINKED + 1, LINKED + 2  # two more kinds of questions


class Seen(NamedTuple):
    """What the trees of batches by time see.

    Attributes:
        time: The name of the times of edges, or of the nodes that send.
        latest: Whether the latest edges are drawn, instead of any.
        trees: For each tree the number of its batch, the id of its seed, after which time it sees events, and up to
            which, as integers, int64, shape (4, trees).
    """

    time: str
    latest: bool
    trees: Tensor


class TypedOwner:
    """Answers questions about a shard, in any thread.

    Args:
        shard: The shard.
        pool: Lends memory for rows, until they are sent.
    """

    def __init__(self, shard: Shard, pool: Pool) -> None:
        assert shard.rows.types is not None and shard.bounds.types is not None
        self._rows, self._types, self._pool = shard.rows, shard.rows.types, pool
        self._bounds, self._index = shard.bounds.types, shard.index
        self._has_arrays = any(self._types.edge_arrays.values())
        self.orders: dict[str, TimeOrder] = {}  # of the edges, by the names of times

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question that :func:`draw_of` made, or to rows of a type."""
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, NODES: self._nodes, EDGES: self._edges, DEGREES: self._degrees}
        of_kinds |= {TIMES: self._times, LINKED: self._linked}
        return of_kinds[kind](*question)

    def _draw(
        self, rows: Tensor, counts: Tensor, keys: Tensor, fanouts: Tensor, flags: Tensor, trees: Tensor, name: Tensor
    ) -> Message:
        """The edges drawn for each row, their senders and types, and where there are edge arrays, their places."""
        local, batches = rows.to(torch.int64), torch.arange(len(counts)).repeat_interleave(counts)
        nodes, words = self._bounds.to_whole(self._index, local), keys.numpy().view(np.uint64)
        of_batch, seeds, after, upto = trees.numpy()
        time, order = name_of(name), NO_ORDER
        if time:  # what a tree draws does not depend on the other trees of its batch
            words, order = first_words(words[of_batch], seeds[:, None]), self.orders[time]
        replace, latest = map(bool, flags)
        given = local.numpy(), nodes.numpy(), batches.numpy(), words, fanouts.numpy()
        asked = Asked(*given, replace, latest, after, upto, order)
        drawn, positions = draw_of_types(self._rows, asked)
        kinds = self._types.edge_type[positions]
        places = [self._places(positions, kinds)] if self._has_arrays else []
        most = int(drawn.max()) if len(drawn) else 0
        return [narrow(drawn, most), self._rows.indices[positions], kinds, *places]

    def _places(self, positions: Tensor, kinds: Tensor) -> Tensor:
        """Where edges stand among those of their types; 0 where a type has no arrays."""
        places = torch.zeros_like(positions)
        for number, edge_type in enumerate(self._types.edge_types):
            if self._types.edge_arrays[edge_type]:
                is_of = kinds == number
                places[is_of] = places_of(self._rows, number, positions[is_of])
        return narrow(places, max(self._types.num_edges))

    def _degrees(self, rows: Tensor) -> Message:
        local = rows.to(torch.int64)
        return [self._rows.indptr[local + 1] - self._rows.indptr[local]]

    def _linked(self, *question: Tensor) -> Message:
        return linked(self._rows, *question)

    def _times(self, rows: Tensor, number: Tensor, name: Tensor) -> Message:
        """One array of a node type, by places in it."""
        return [self._types.node_arrays[self._types.node_types[int(number)]][name_of(name)][rows.to(torch.int64)]]

    def _nodes(self, rows: Tensor, number: Tensor) -> Message:
        """Rows of the arrays of a node type, by their places in it."""
        return gathered(self._types.node_arrays[self._types.node_types[int(number)]], rows, self._pool)

    def _edges(self, rows: Tensor, number: Tensor) -> Message:
        return gathered(self._types.edge_arrays[self._types.edge_types[int(number)]], rows, self._pool)


def draw_of(
    rows: Tensor, batches: Tensor, keys: Tensor, fanouts: Tensor, replace: bool, seen: Seen | None, most: int
) -> Message:
    """The question for neighbours of some nodes, per edge type.

    Args:
        rows: Their rows in the owner's shard.
        batches: The number of the batch that each is for, in increasing order.
        keys: The random key of each batch and edge type, shape (batches, types).
        fanouts: Neighbours to draw of each edge type; -1 takes all.
        replace: Whether an edge may be drawn more than once.
        seen: What trees see; then ``batches`` are numbers of trees. None for all edges.
        most: How many rows the shard has.
    """
    trees = keys.new_empty(4, 0) if seen is None else seen.trees
    counts = torch.bincount(batches, minlength=len(keys) if seen is None else trees.shape[1])
    flags = torch.tensor([replace, seen is not None and seen.latest])
    return [narrow(rows, most), counts, keys, fanouts, flags, trees, letters_of(None if seen is None else seen.time)]
