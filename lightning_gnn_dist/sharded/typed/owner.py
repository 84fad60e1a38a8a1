"""What a rank answers of its own shard of a typed graph.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sharded.messages import (
    DEGREES,
    DRAW_TYPES,
    EDGES,
    HAPPENED,
    LINKED,
    NODES,
    TIMES_OF_EDGES,
    TIMES_OF_NODES,
    Message,
    gathered,
    narrow,
)
from lightning_gnn_dist.sharded.owner import linked
from lightning_gnn_dist.sharded.temporal.answers import TimedAnswers


class TypedOwner:
    """Answers questions about a shard, in any thread.

    Args:
        shard: The shard.
        pool: Lends memory for rows, until they are sent.
        orders: The shard's edges in the order of times, by the names of times.
    """

    def __init__(self, shard: Shard, pool: Pool, orders: Mapping[str, TimeOrder]) -> None:
        assert shard.rows.types is not None and shard.bounds.types is not None
        self._rows, self._types, self._pool = shard.rows, shard.rows.types, pool
        self._bounds, self._index = shard.bounds.types, shard.index
        self._has_arrays = any(self._types.edge_arrays.values())
        self._timed = TimedAnswers(shard.rows, orders)

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question."""
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW_TYPES: self._draw, NODES: self._nodes, EDGES: self._edges, DEGREES: self._degrees}
        of_kinds |= {TIMES_OF_NODES: self._timed.of_nodes, TIMES_OF_EDGES: self._timed.of_edges}
        of_kinds |= {HAPPENED: self._timed.happened, LINKED: self._linked}
        return of_kinds[kind](*question)

    def _draw(self, rows: Tensor, *question: Tensor) -> Message:
        """The edges drawn for each row, their senders and types, and where there are edge arrays, their places."""
        local = rows.to(torch.int64)
        drawn, positions = self._timed.drawn(local, self._bounds.to_whole(self._index, local), list(question))
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

    def _nodes(self, rows: Tensor, number: Tensor) -> Message:
        """Rows of the arrays of a node type, by their places in it."""
        return gathered(self._types.node_arrays[self._types.node_types[int(number)]], rows, self._pool)

    def _edges(self, rows: Tensor, number: Tensor) -> Message:
        return gathered(self._types.edge_arrays[self._types.edge_types[int(number)]], rows, self._pool)
