"""What a rank answers of its own shard of a typed graph.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.engine.typed.rows import Asked, draw_of_types
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.owner import DRAW, EDGES, NODES, Message, narrow

DEGREES = EDGES + 1  # one more kind of question


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

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question that :func:`draw_of` made, or to rows of a type."""
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, NODES: self._nodes, EDGES: self._edges, DEGREES: self._degrees}
        return of_kinds[kind](*question)

    def _draw(self, rows: Tensor, counts: Tensor, keys: Tensor, fanouts: Tensor, replace: Tensor) -> Message:
        """The edges drawn for each row, their senders and types, and where there are edge arrays, their places."""
        local, batches = rows.to(torch.int64), torch.arange(len(counts)).repeat_interleave(counts)
        nodes, words = self._bounds.to_whole(self._index, local), keys.numpy().view(np.uint64)
        asked = Asked(local.numpy(), nodes.numpy(), batches.numpy(), words, fanouts.numpy(), bool(replace))
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

    def _nodes(self, rows: Tensor, number: Tensor) -> Message:
        """Rows of the arrays of a node type, by their places in it."""
        return self._gathered(self._types.node_arrays[self._types.node_types[int(number)]], rows)

    def _edges(self, rows: Tensor, number: Tensor) -> Message:
        return self._gathered(self._types.edge_arrays[self._types.edge_types[int(number)]], rows)

    def _gathered(self, arrays: Mapping[str, Tensor], rows: Tensor) -> Message:
        local = rows.to(torch.int64)
        return [gather_rows(arrays[name], local, self._pool) for name in sorted(arrays)]


def draw_of(rows: Tensor, batches: Tensor, keys: Tensor, fanouts: Tensor, replace: bool, most: int) -> Message:
    """The question for neighbours of some nodes, per edge type.

    Args:
        rows: Their rows in the owner's shard.
        batches: The number of the batch that each is for, in increasing order.
        keys: The random key of each batch and edge type, shape (batches, types).
        fanouts: Neighbours to draw of each edge type; -1 takes all.
        replace: Whether an edge may be drawn more than once.
        most: How many rows the shard has.
    """
    counts = torch.bincount(batches, minlength=len(keys))
    return [narrow(rows, most), counts, keys, fanouts, torch.tensor([replace])]
