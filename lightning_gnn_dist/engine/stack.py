"""The batches of a bulk as one graph: node ``v`` of batch ``i`` has the id ``i * n + v``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import Sample


class Edges(NamedTuple):
    """The edges of one hop, sorted by ``row``.

    Attributes:
        row: The receiver's position in the frontier.
        column: The sender, a node of the graph.
        position: The edge's position in the graph's ``indices``.
        weight: The edge's weight, or None.
    """

    row: Tensor
    column: Tensor
    position: Tensor
    weight: Tensor | None


class Stack:
    """Grows all batches of a bulk by a hop at a time, in torch operators, on the device of the seeds.

    Args:
        seeds: The first nodes of each batch.
        num_nodes: Nodes of the graph.
    """

    def __init__(self, seeds: Sequence[Tensor], num_nodes: int) -> None:
        self.num_batches, self.num_nodes = len(seeds), num_nodes
        self._hops = [torch.cat([ids + i * num_nodes for i, ids in enumerate(seeds)])]
        self._edges: list[Edges] = []  # rows and columns as ids

    @property
    def frontier(self) -> tuple[Tensor, Tensor]:
        """The batch and the id of each node that was found at the last hop, batch by batch."""
        return self._hops[-1] // self.num_nodes, self._hops[-1] % self.num_nodes

    def grow(self, edges: Edges) -> None:
        """Add a hop: the edges of the frontier, and those of their senders that are new."""
        receivers = self._hops[-1][edges.row]
        senders = receivers - receivers % self.num_nodes + edges.column
        self._edges.append(edges._replace(row=receivers, column=senders))
        known = torch.cat(self._hops)
        ids = torch.cat([known, senders])
        unique, inverse = ids.unique(return_inverse=True)
        positions = torch.arange(ids.numel(), device=ids.device)
        first = positions.new_full(unique.shape, ids.numel()).scatter_reduce_(0, inverse, positions, "amin")
        self._hops.append(ids[first[first >= known.numel()].sort().values])

    def samples(self, *, with_ids: bool) -> list[Sample]:
        return [self._sample(batch, with_ids) for batch in range(self.num_batches)]

    def _sample(self, batch: int, with_ids: bool) -> Sample:
        hops = [ids[ids // self.num_nodes == batch] for ids in self._hops]
        edges = [_take(edges, edges.row // self.num_nodes == batch) for edges in self._edges]
        nodes = torch.cat(hops)
        in_order, order = nodes.sort()
        rows = order[torch.searchsorted(in_order, torch.cat([hop.row for hop in edges]))]
        columns = order[torch.searchsorted(in_order, torch.cat([hop.column for hop in edges]))]
        degrees = torch.bincount(rows, minlength=sum(ids.numel() for ids in hops[:-1]))
        weights = [hop.weight for hop in edges if hop.weight is not None]
        return Sample(
            nodes=nodes - batch * self.num_nodes,
            indptr=torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).to(torch.int32),
            indices=columns.to(torch.int32),
            num_sampled_nodes=[ids.numel() for ids in hops],
            num_sampled_edges=[hop.row.numel() for hop in edges],
            edge_ids=torch.cat([hop.position for hop in edges]) if with_ids else None,
            edge_weight=torch.cat(weights).to(torch.float32) if weights else None,
        )


def _take(edges: Edges, chosen: Tensor) -> Edges:
    weight = None if edges.weight is None else edges.weight[chosen]
    return Edges(edges.row[chosen], edges.column[chosen], edges.position[chosen], weight)
