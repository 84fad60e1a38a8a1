"""What a rank answers of its own shard, when others ask and when it needs the same itself.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type, and numbers in as few
bytes as the largest of them needs. A graph without types counts as one of one type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.asked_rows import NO_ORDER, Asked, draw_from_rows
from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import Rule
from lightning_gnn_dist.engine.rng import first_words
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.weights import edge_weights, weights_of
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.sampling.negatives import Moments, has_edges
from lightning_gnn_dist.sharded.messages import (
    DEGREES,
    DRAW,
    EDGES,
    LINKED,
    NODES,
    ROWS,
    TIMES_OF_EDGES,
    TIMES_OF_NODES,
    Message,
    gathered,
    name_of,
    narrow,
)


class Owner:
    """Answers questions about a shard, in any thread.

    Args:
        shard: The shard.
        pool: Lends memory for rows, until they are sent.
        orders: The shard's edges in the order of times, by the names of times.
    """

    def __init__(self, shard: Shard, pool: Pool, orders: Mapping[str, TimeOrder]) -> None:
        self._shard, self._rows, self._pool, self._orders = shard, shard.rows, pool, orders
        self._types = shard.bounds.types
        self._with_arrays = [
            number for number, kind in enumerate(self._types.edge_types) if self._rows.types.edge_arrays[kind]
        ]

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question."""
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, ROWS: self._whole_rows, DEGREES: self._degrees, LINKED: self._linked}
        of_kinds |= {NODES: self._nodes, EDGES: self._edges}
        of_kinds |= {TIMES_OF_NODES: self._times_of_nodes, TIMES_OF_EDGES: self._times_of_edges}
        return of_kinds[kind](*question)

    def _draw(
        self,
        rows: Tensor,
        counts: Tensor,
        keys: Tensor,
        fanouts: Tensor,
        flags: Tensor,
        weight: Tensor,
        trees: Tensor,
        time: Tensor,
    ) -> Message:
        """The number of edges drawn for each row, their senders, of several types their types, and their places.

        These are sent where some edges have arrays; they are 0 for an edge whose type has none.
        """
        local, (replace, latest) = rows.to(torch.int64), map(bool, flags)
        groups, words = torch.arange(len(counts)).repeat_interleave(counts), keys.numpy().view(np.uint64)
        of_batch, seeds, after, upto = trees.numpy()
        order, name = NO_ORDER, name_of(weight) or None
        if len(time):  # what a tree draws does not depend on the other trees of its batch
            words, order = first_words(words[of_batch], seeds[:, None]), self._orders[name_of(time)]
        rule = Rule(weights_of(self._rows, name, draws=bool((fanouts >= 0).any())), replace)
        nodes = self._types.to_whole(self._shard.index, local)
        given = local.numpy(), nodes.numpy(), groups.numpy(), words, fanouts.numpy()
        drawn = draw_from_rows(self._rows, Asked(*given, rule, latest, after, upto, order))
        kinds = [] if len(fanouts) == 1 else [self._rows.types.edge_type[drawn.positions]]
        places = [self._places(drawn.positions, *kinds)] if self._with_arrays else []
        most = int(drawn.counts.max()) if len(drawn.counts) else 0
        return [narrow(drawn.counts, most), drawn.senders, *kinds, *places]

    def _places(self, positions: Tensor, kinds: Tensor | None = None) -> Tensor:
        """Where edges stand among those of their types; 0 where a type has no arrays."""
        if kinds is None:
            return narrow(positions, self._rows.num_edges)
        places = torch.zeros_like(positions)
        for number in self._with_arrays:
            is_of = kinds == number
            places[is_of] = places_of(self._rows, number, positions[is_of])
        return narrow(places, int(self._types.edges.diff()[:, self._shard.index].max()))

    def _whole_rows(self, nodes: Tensor, weight: Tensor) -> Message:
        """The degrees, the senders and weights of all edges, and where rows begin; the last two where there are any."""
        local, name = nodes.to(torch.int64), name_of(weight) or None
        degrees, at = self._lengths(local), edge_positions(self._rows.indptr, local)
        found = [narrow(degrees, int(degrees.max()) if len(degrees) else 0), self._rows.indices[at]]
        if name is not None:
            found.append(torch.from_numpy(edge_weights(self._rows, name))[at])
        if self._with_arrays:
            found.append(narrow(self._rows.indptr[local], self._rows.num_edges))
        return found

    def _degrees(self, rows: Tensor) -> Message:
        return [self._lengths(rows.to(torch.int64))]

    def _nodes(self, places: Tensor, number: Tensor) -> Message:
        """The rows of the arrays of a node type, by their places in it."""
        return gathered(self._nodes_of(number), places, self._pool)

    def _edges(self, places: Tensor, number: Tensor) -> Message:
        return gathered(self._edges_of(number), places, self._pool)

    def _linked(
        self,
        receivers: Tensor,
        senders: Tensor,
        edge_type: Tensor,
        times: Tensor | None = None,
        name: Tensor | None = None,
    ) -> Message:
        """A bool for each pair of nodes: whether the second sends to the first, or did at a time of that name."""
        at = None if times is None or name is None else Moments(self._orders[name_of(name)], times)
        pairs = torch.stack([senders.to(torch.int64), receivers.to(torch.int64)])
        return [has_edges(self._rows, pairs, int(edge_type) if edge_type.numel() else None, at)]

    def _times_of_nodes(self, places: Tensor, number: Tensor, name: Tensor) -> Message:
        """The times of some nodes of a type, by their places in it."""
        return [self._nodes_of(number)[name_of(name)][places.to(torch.int64)]]

    def _times_of_edges(self, places: Tensor, number: Tensor, name: Tensor) -> Message:
        return [self._edges_of(number)[name_of(name)][places.to(torch.int64)]]

    def _nodes_of(self, number: Tensor) -> Mapping[str, Tensor]:
        return self._rows.types.node_arrays[self._types.node_types[int(number)]]

    def _edges_of(self, number: Tensor) -> Mapping[str, Tensor]:
        return self._rows.types.edge_arrays[self._types.edge_types[int(number)]]

    def _lengths(self, local: Tensor) -> Tensor:
        """Return the lengths of own rows; refuse rows that reach beyond the shard."""
        rows = self._rows
        first, last = rows.indptr[local], rows.indptr[local + 1]
        if bool(((first < 0) | (last < first) | (last > rows.num_edges)).any()):
            raise graph_is_damaged(rows)
        return last - first
