"""The batches of a bulk as one graph: node ``v`` of batch ``i`` of ``k`` has the id ``i * n + v``.

How many nodes and edges a hop finds is known on the device alone, until the host asks once for the counts of all hops.
So arrays are as long as they could have to be, and what stands behind their numbers belongs to a batch ``k`` that does
not exist, whose only node has the id ``k * n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.sample import Sample, refuse_repeated

MAX_EDGES = 2**31 - 1  # of one hop of all batches
UNSEEN, SEEN = 2**31 - 1, -(2**31)  # entry of a new node; bit that marks the position of a known one in its batch


class Edges(NamedTuple):
    """The edges of one hop, sorted by ``row``, and behind them any number of entries of the frontier's last row.

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
    """Grows all batches of a bulk by a hop at a time, in torch operators; many take as many launches as one.

    A table tells which nodes a batch has: it has an int32 for each node of the graph and each batch.

    Args:
        seeds: The first nodes of each batch, as ``check_bulk`` returns them.
        num_nodes: Nodes of the graph.
        device: Where the graph is. Default: where the seeds are.

    Attributes:
        batch: The batch of each node of the frontier, the nodes that were found last, in increasing order. Those of
            the last entry, and of some before it, are of the batch ``num_batches`` and do not exist.
        nodes: The ids of the nodes of the frontier; 0 for those that do not exist.
    """

    batch: Tensor
    nodes: Tensor

    def __init__(self, seeds: Sequence[Tensor], num_nodes: int, device: torch.device | None = None) -> None:
        self._seeds = seeds
        self.num_batches, self.num_nodes = len(seeds), num_nodes
        self._nowhere = len(seeds) * num_nodes  # the id of what does not exist
        device = seeds[0].device if device is None else device
        self._table = torch.full((self._nowhere + 1,), UNSEEN, dtype=torch.int32, device=device)
        self._table[self._nowhere :].fill_(SEEN)
        self._starts = (torch.arange(len(seeds) + 2, device=device) * num_nodes).clamp_(max=self._nowhere + 1)
        self._found = torch.zeros(len(seeds) + 1, dtype=torch.int64, device=device)
        self._nodes: list[Tensor] = []
        self._degrees: list[Tensor] = []
        self._columns: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._counts: list[Tensor] = []  # of nodes and edges in turn, one number for each batch
        self._enter(sent(torch.cat([ids + i * num_nodes for i, ids in enumerate(seeds)]), device))

    def grow(self, edges: Edges) -> None:
        """Add a hop: the edges of the frontier, and those of their senders that are new."""
        if edges.row.numel() > MAX_EDGES:
            raise ValueError(
                f"The batches of a bulk may have {MAX_EDGES} edges a hop, but these can have {edges.row.numel()}. "
                "Use fewer seeds a batch, or a smaller bulk_size."
            )
        starts = torch.searchsorted(edges.row, torch.arange(self.nodes.numel(), device=edges.row.device))
        batch = self.batch[edges.row]
        self._degrees.append(starts.diff())
        self._counts.append(torch.searchsorted(batch, torch.arange(len(self._starts), device=batch.device)).diff())
        self._positions.append(edges.position)
        if edges.weight is not None:
            self._weights.append(edges.weight.to(torch.float32))
        ids = (batch * self.num_nodes + edges.column).clamp_(max=self._nowhere)
        self._enter(ids)
        self._columns.append(self._table[ids] ^ SEEN)

    def trim(self) -> None:
        """Leave out of the frontier what does not exist, but for the last entry. The host waits for the device."""
        size = int((self.batch < self.num_batches).sum()) + 1
        self.batch, self.nodes = self.batch[:size], self.nodes[:size]

    def _enter(self, ids: Tensor) -> None:
        """Give each new id the next position in its batch, and make the new nodes the frontier."""
        order = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
        self._table.scatter_reduce_(0, ids, order, "amin")  # entries of known nodes are negative, and stay
        is_new = self._table[ids] == order
        new = packed(ids, is_new, self._nowhere, min(ids.numel(), self._nowhere))
        count = torch.searchsorted(new, self._starts).diff()
        self.batch = new // self.num_nodes
        self.nodes = new - self._starts[self.batch]
        before = count.cumsum(0) - count
        position = torch.arange(new.numel(), device=ids.device) + (self._found - before)[self.batch]
        self._table[new] = position.to(torch.int32) ^ SEEN
        self._found[:-1] += count[:-1]
        self._nodes.append(self.nodes)
        self._counts.append(count)

    def samples(self, *, with_ids: bool) -> list[Sample]:
        """The batches, each in arrays of its own."""
        counts = torch.stack(self._counts)[:, :-1].tolist()  # here the host waits, once for all hops
        num_nodes, num_edges = counts[::2], counts[1::2]
        for ids, count in zip(self._seeds, num_nodes[0], strict=True):
            if count < ids.numel():
                refuse_repeated(ids)
        nodes, degrees = _dealt(self._nodes, num_nodes), _dealt(self._degrees, num_nodes[:-1])
        columns, positions = _dealt(self._columns, num_edges), _dealt(self._positions, num_edges)
        weights = _dealt(self._weights, num_edges)
        zero = self._starts[:1]
        return [
            Sample(
                nodes=torch.cat(nodes[i]),
                indptr=torch.cat([zero, *degrees[i]]).cumsum(0, dtype=torch.int32),
                indices=torch.cat(columns[i]),
                num_sampled_nodes=[hop[i] for hop in num_nodes],
                num_sampled_edges=[hop[i] for hop in num_edges],
                edge_ids=torch.cat(positions[i]) if with_ids else None,
                edge_weight=torch.cat(weights[i]) if weights else None,
            )
            for i in range(self.num_batches)
        ]


def _dealt(hops: list[Tensor], counts: list[list[int]]) -> list[list[Tensor]]:
    """For each batch, its piece of every hop's tensor, as views."""
    if not hops:
        return []
    pieces = [hop[: sum(sizes)].split(sizes) for hop, sizes in zip(hops, counts, strict=True)]
    return [list(of_batch) for of_batch in zip(*pieces, strict=True)]


def packed(values: Tensor, is_kept: Tensor, filler: int, room: int) -> Tensor:
    """The kept values in their order, of which there are at most ``room``, and fillers up to ``room + 1`` numbers."""
    place = torch.where(is_kept, is_kept.cumsum(0) - 1, room)
    return values.new_full((room + 1,), filler).scatter_(0, place, torch.where(is_kept, values, filler))
