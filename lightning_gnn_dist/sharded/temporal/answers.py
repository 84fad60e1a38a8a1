"""What a rank answers of times in its own shard, and of edges that are drawn by type or by time.

A graph without types counts as one whose nodes, and whose edges, have type 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import first_words
from lightning_gnn_dist.engine.temporal.order import TimeOrder
from lightning_gnn_dist.engine.typed.rows import NO_ORDER, Asked, draw_of_types
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.temporal.negatives import have_happened
from lightning_gnn_dist.sharded.messages import Message, name_of


class TimedAnswers:
    """Answers in any thread.

    Args:
        rows: The shard.
        orders: Its edges in the order of times, by the names of times.
    """

    def __init__(self, rows: Graph, orders: Mapping[str, TimeOrder]) -> None:
        self._rows, self._orders = rows, orders

    def drawn(self, local: Tensor, nodes: Tensor, question: Message) -> tuple[Tensor, Tensor]:
        """Return how many edges are drawn for each row, and their positions in the shard.

        Args:
            local: The rows.
            nodes: The ids of their nodes in the whole graph.
            question: What follows the rows in the question.
        """
        counts, keys, fanouts, flags, trees, name = question
        batches, words = torch.arange(len(counts)).repeat_interleave(counts), keys.numpy().view(np.uint64)
        of_batch, seeds, after, upto = trees.numpy()
        time, order = name_of(name), NO_ORDER
        if time:  # what a tree draws does not depend on the other trees of its batch
            words, order = first_words(words[of_batch], seeds[:, None]), self._orders[time]
        replace, latest = map(bool, flags)
        given = local.numpy(), nodes.numpy(), batches.numpy(), words, fanouts.numpy()
        return draw_of_types(self._rows, Asked(*given, replace, latest, after, upto, order))

    def of_nodes(self, places: Tensor, number: Tensor, name: Tensor) -> Message:
        """The times of some nodes of a type, by their places in it."""
        return [arrays_of_nodes(self._rows, int(number))[name_of(name)][places.to(torch.int64)]]

    def of_edges(self, places: Tensor, number: Tensor, name: Tensor) -> Message:
        """The times of some edges of a type, by their places in it."""
        types = self._rows.types
        arrays = self._rows.edge_arrays if types is None else types.edge_arrays[types.edge_types[int(number)]]
        return [arrays[name_of(name)][places.to(torch.int64)]]

    def happened(self, receivers: Tensor, senders: Tensor, times: Tensor, edge_type: Tensor, name: Tensor) -> Message:
        """A bool for each pair of nodes: whether the first sent something to the second at the time."""
        edges = torch.stack([senders.to(torch.int64), receivers.to(torch.int64)])
        return [have_happened(self._rows, self._orders[name_of(name)], edges, times, *edge_type.tolist())]


def arrays_of_nodes(rows: Graph, number: int) -> Mapping[str, Tensor]:
    """The arrays of a node type of a shard."""
    return rows.node_arrays if rows.types is None else rows.types.node_arrays[rows.types.node_types[number]]
