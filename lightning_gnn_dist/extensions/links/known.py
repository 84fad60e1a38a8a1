"""Pairs of nodes that are links already, and so are not proposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.links.ends import LinkEnds
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import (
    EDGES_PER_PIECE,
    Lookup,
    degrees_of,
    edge_positions,
    row_pieces,
    starts_of,
)
from lightning_gnn_dist.layers.row_table import Ids, ids_of

LeftOut = Literal["edges", "val", "test", "self"]


class Known(NamedTuple):
    """The links into the nodes of a rank.

    Attributes:
        rows: The graph, or the own shard, whose rows list the senders to each node.
        at: Returns the rows of own nodes.
        edge_type: The number of the links' type, or None where all edges are links.
        held: Links that are held back, by ids in the graph, shape ``(2, n)``, in the order of receivers.
        has_edges: Whether edges of the graph are left out.
        has_self: Whether a node is left out for itself.
    """

    rows: Graph
    at: Callable[[Ids], Ids]
    edge_type: int | None
    held: Tensor
    has_edges: bool
    has_self: bool

    def leave_out_(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        """Set the scores of pairs that are links to minus infinity.

        Args:
            scores: The scores of each sender and receiver.
            senders: Finds the senders.
            receivers: The receivers, some of the rank's own.
        """
        if self.has_edges:
            self._leave_edges_out(scores, senders, receivers)
        if self.has_self:
            _leave_out(scores, senders, receivers, torch.arange(len(receivers)))
        if self.held.shape[1]:
            self._leave_held_out(scores, senders, receivers)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the senders and receivers of links that are left out in all rows, some at a time."""
        for start in range(0, self.held.shape[1], EDGES_PER_PIECE):
            senders, receivers = self.held[:, start : start + EDGES_PER_PIECE]
            yield senders, receivers
        if not self.has_edges:
            return
        indptr = self.rows.indptr
        for nodes, positions in row_pieces(indptr, torch.arange(self.rows.num_nodes)):
            receivers, is_link = nodes.repeat_interleave(degrees_of(indptr, nodes)), self._are_links(positions)
            yield self.rows.indices[positions].to(torch.int64)[is_link], receivers[is_link]

    def _are_links(self, positions: Tensor) -> Tensor | slice:
        """Return which of the edges at some positions are of the links' type."""
        return slice(None) if self.edge_type is None else self.rows.types.edge_type[positions] == self.edge_type

    def _leave_held_out(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        least, most = receivers.aminmax()
        first, last = torch.searchsorted(self.held[1], torch.stack([least, most + 1])).tolist()
        column, is_here = Lookup(receivers)(self.held[1, first:last].contiguous())
        _leave_out(scores, senders, self.held[0, first:last][is_here], column)

    def _leave_edges_out(self, scores: Tensor, senders: Lookup, receivers: Tensor) -> None:
        first, indptr = 0, self.rows.indptr
        for nodes, positions in row_pieces(indptr, ids_of(self.at(receivers))):
            column = torch.arange(first, first + len(nodes)).repeat_interleave(degrees_of(indptr, nodes))
            first += len(nodes)
            sender, is_link = self.rows.indices[positions].to(torch.int64), self._are_links(positions)
            _leave_out(scores, senders, sender[is_link], column[is_link])


class KnownBySender:
    """The links that are left out by their senders: of few senders, not the rows of all receivers are read for them.

    Args:
        known: The links into all nodes.
        graph: The graph, of which this keeps 4 bytes an edge and 8 a node.
    """

    def __init__(self, known: Known, graph: Graph) -> None:
        counts = torch.zeros(graph.num_nodes, dtype=torch.int64)
        for senders, _ in known.pieces():
            counts.index_add_(0, senders, torch.ones_like(senders))
        self._known, self._indptr = known, starts_of(counts)
        self._receivers = torch.empty(int(self._indptr[-1]), dtype=index_dtype(graph.num_nodes))
        free = self._indptr[:-1].clone()  # where the next receiver of each sender goes
        for senders, receivers in known.pieces():
            senders, order = senders.sort()
            some, counts = senders.unique_consecutive(return_counts=True)
            places = torch.arange(len(senders)) + (free[some] - starts_of(counts)[:-1]).repeat_interleave(counts)
            self._receivers[places] = receivers[order].to(self._receivers.dtype)
            free[some] += counts

    def of(self, senders: Tensor, more: Tensor) -> Known:
        """Return what is left out for some senders of the graph, and of more links, by ids in the graph."""
        known, own = self._known, self._receivers[edge_positions(self._indptr, senders)].to(torch.int64)
        pairs = [torch.stack([senders.repeat_interleave(degrees_of(self._indptr, senders)), own])]
        pairs += [more] if known.has_edges else []
        pairs += [senders.expand(2, -1)] if known.has_self else []
        held = torch.cat(pairs, 1)
        return known._replace(held=held[:, held[1].argsort()], has_edges=False, has_self=False)


def _leave_out(scores: Tensor, senders: Lookup, sender: Tensor, column: Tensor) -> None:
    row, is_asked = senders(sender)
    scores[row.to(scores.device), column[is_asked].to(scores.device)] = -math.inf


def held_links(split: LinkSplit, ends: LinkEnds, names: tuple[LeftOut, ...]) -> Tensor:
    """Return the held links of some names by ids in the graph, in the order of receivers, of both directions."""
    some = [ends.in_graph(edges) for name, edges in split.edges.items() if name in names]
    found = torch.cat([torch.empty((2, 0), dtype=torch.int64), *some], 1)
    found = torch.cat([found, found.flip(0)], 1) if split.undirected else found
    return found[:, found[1].argsort(stable=True)]
