"""Draws from rows of a graph, by time too, and batches that grow by what is drawn, hop by hop.

    frontier -> edges of each type into its nodes -> their senders -> those that are new are the next frontier

What a node may receive by time depends on the time of the seed that it is reached from, so it is in the batch once for
each tree that it is in: it is called ``tree << bits | node`` there, and the table of a batch tells such names apart as
it tells nodes. The edges of a type into a node are in order of time, so those that a seed may see are next to each
other: two binary searches find them, and they are drawn from as if they were a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import (
    BLOCK,
    REPEATED_SEED,
    ROWS_AHEAD,
    ZERO,
    Array,
    Csr,
    Table,
    Work,
    draw_row,
    end_of_piece,
    is_no_row,
    is_whole,
    place,
    prefetch_types,
    slot_of,
    take_row,
)
from lightning_gnn_dist.engine.sample import Sample, csr_of, graph_is_damaged, refuse_repeated, scratch_of_thread
from lightning_gnn_dist.engine.weighted import Piece, Rule, Weights, aside_for, prefetch_weights
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.sampling.base import check_seeds

_U = np.uint64

_ALL_BITS = 62  # of a name, where it is an id


class RowRequest(NamedTuple):
    """The rows to draw from.

    Attributes:
        edge_type: The type of each edge of the shard; empty if there is one type alone.
        rows: Their numbers in the shard, int64.
        nodes: The ids of their nodes in the whole graph, int64.
        groups: The number of the batch, or of the tree by time, that each is for, int64.
        keys: The key of each group and edge type at this hop, uint64, shape (groups, types).
        fanouts: Neighbours to draw of each edge type, int64; -1 takes all, 0 none.
        rule: How the neighbours of one type are drawn. Weights are for a graph of one type.
        latest: Whether the latest edges are drawn, instead of any.
        upto: Each group sees events no later than this, int64. Empty if there are no times.
        order: The edges by time; as :data:`NO_ORDER` if there are no times.
    """

    edge_type: Array
    rows: Array
    nodes: Array
    groups: Array
    keys: Array
    fanouts: Array
    rule: Rule
    latest: bool
    upto: Array
    order: TimeOrder


NO_ORDER = TimeOrder(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_))


def draw_from_rows(graph: Graph, asked: RowRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Draw edges of each type that leads to a row; a graph without types counts as one of one type.

    Returns how many each row gives, their places in the shard, row after row, and their senders.
    """
    csr, counts = csr_of(graph), np.empty(len(asked.rows), np.int64)
    longest = _count(csr, asked, counts)
    if longest < 0:
        raise graph_is_damaged(graph)
    starts = counts.cumsum() - counts
    positions = np.empty(int(counts.sum()), np.int64)
    senders = graph.indices.new_empty(len(positions))
    if not _draw(csr, asked, asked.rule.weights, longest, starts, positions, senders.numpy()):
        raise graph_is_damaged(graph)
    return torch.from_numpy(counts), torch.from_numpy(positions), senders


# Arrays are taken out of their tuples before the loops: numba would count references to them at every use.


@compiled
def _count(csr: Csr, asked: RowRequest, counts: Array) -> Any:
    """Count the edges that each row gives; return the length of the longest row.

    Or return -1, if one is no row of the graph, or has an edge of a type that is none.
    """
    indptr, num_edges = csr.indptr, len(csr.indices)
    edge_type, rows, fanouts = asked.edge_type, asked.rows, asked.fanouts
    groups, times, upto = asked.groups, asked.order.times, asked.upto
    has_time, replace, longest = asked.order.has_time, asked.rule.replace, ZERO
    for i in range(len(rows)):
        prefetch(indptr, rows[_U(min(i + ROWS_AHEAD, len(rows) - 1))])
        soon = _U(rows[_U(min(i + ROWS_AHEAD // 2, len(rows) - 1))])
        degree = indptr[soon + _U(1)] - indptr[soon]
        if len(edge_type):
            prefetch_types(edge_type, indptr[soon], degree)
        if len(upto):
            prefetch(times, indptr[soon])
            prefetch(times, indptr[soon] + degree // 2)
        row = _U(rows[_U(i)])
        first, last, total = indptr[row], indptr[row + _U(1)], ZERO
        if is_no_row(first, last, num_edges):
            return -1
        longest = max(longest, last - first)
        while first < last:
            kind, stop = ZERO, last
            if len(edge_type):
                kind, stop = np.int64(edge_type[_U(first)]), end_of_piece(edge_type, first, last)
            if _U(kind) >= _U(len(fanouts)):  # read as unsigned, a negative number is large
                return -1
            end = stop
            if len(upto) and has_time[_U(kind)]:
                end = first_later(times, first, stop, upto[_U(groups[_U(i)])])
            fanout = fanouts[_U(kind)]
            total += end - first if is_whole(end - first, fanout, replace) else fanout
            first = stop
        counts[_U(i)] = total
    return longest


@compiled
def _draw(
    csr: Csr, asked: RowRequest, weights: Weights | None, longest: int, starts: Array, positions: Array, senders: Array
) -> Any:
    """Write which edges the rows give, each row's from its place in ``starts`` on; return whether all are edges.

    What stands there is read a block of rows later: it was prefetched when it was drawn.
    """
    indptr, indices, edge_type, rows, fanouts = csr.indptr, csr.indices, asked.edge_type, asked.rows, asked.fanouts
    groups, times, upto = asked.groups, asked.order.times, asked.upto
    has_time, replace, latest, places = asked.order.has_time, asked.rule.replace, asked.latest, asked.order.places
    keys, nodes, count, read = asked.keys, asked.nodes, len(rows), 0
    aside, is_right = None if weights is None else aside_for(weights, longest), True
    for low in range(0, count + BLOCK, BLOCK):
        if weights is not None:
            for i in range(low + BLOCK, min(low + 2 * BLOCK, count) if len(weights.table) else 0):
                first, key = indptr[_U(rows[_U(i)])], keys[_U(groups[_U(i)]), ZERO]
                degree = indptr[_U(rows[_U(i)]) + _U(1)] - first
                if not is_whole(degree, fanouts[ZERO], replace):
                    prefetch_weights(Piece(first, degree, fanouts[ZERO], key, nodes[_U(i)]), replace, weights)
        for i in range(low, min(low + BLOCK, count)):
            prefetch(indptr, rows[_U(min(i + ROWS_AHEAD, count - 1))])
            row, out = _U(rows[_U(i)]), starts[_U(i)]
            first, last = indptr[row], indptr[row + _U(1)]
            while first < last:
                kind, stop = ZERO, last
                if len(edge_type):
                    kind, stop = np.int64(edge_type[_U(first)]), end_of_piece(edge_type, first, last)
                end = stop
                if len(upto) and has_time[_U(kind)]:
                    end = first_later(times, first, stop, upto[_U(groups[_U(i)])])
                if len(places):
                    prefetch(places, first)
                    prefetch(places, end - 1)
                fanout, degree = fanouts[_U(kind)], end - first
                takes_all = is_whole(degree, fanout, replace)
                number = degree if takes_all else fanout
                if takes_all or latest:
                    take_row(indices, end - number, number, positions, out)
                else:
                    piece = Piece(first, degree, fanout, keys[_U(groups[_U(i)]), _U(kind)], nodes[_U(i)])
                    draw_row(indices, piece, replace, weights, aside, positions, out)
                out, first = out + number, stop
        for i in range(max(0, low - BLOCK), min(low, count) if len(places) else 0):
            for edge in range(starts[_U(i)], starts[_U(i + 1)] if i + 1 < count else len(positions)):
                at = indptr[_U(rows[_U(i)])] + places[_U(positions[_U(edge)])]
                is_right &= at < len(indices)
                positions[_U(edge)] = min(at, len(indices) - 1)
        stop = starts[_U(low)] if low < count else len(positions)
        for edge in range(read, stop):
            senders[_U(edge)] = indices[_U(positions[_U(edge)])]
        read = stop
    return is_right


@inlined
def first_later(times: Array, low: int, high: int, time: int) -> Any:
    """The first of the places ``low`` to ``high`` with a time later than ``time``; ``high`` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if times[_U(middle)] > time:
            high = middle
        else:
            low = middle + 1
    return low


# Batches that grow.


class Drawn(NamedTuple):
    """The edges drawn for some nodes.

    Attributes:
        counts: The number of edges drawn for each node, int64.
        senders: The senders of these edges, node after node, by their ids in the whole graph.
        kinds: The number of each edge's type; None if the graph has no types.
        edge_ids: The edges' ids in their types; None if no type has edge arrays.
        weights: The edges' weights, float32, where they are wanted.
    """

    counts: Tensor
    senders: Tensor
    kinds: Tensor | None
    edge_ids: Tensor | None
    weights: Tensor | None

    def divided(self, sizes: list[int]) -> list[Drawn]:
        """Return what was drawn for each batch, given how many nodes it asked for."""
        parts = self.counts.split(sizes)
        lengths = [int(some.sum()) for some in parts]
        split = [[None] * len(sizes) if column is None else column.split(lengths) for column in self[1:]]
        return [Drawn(*found) for found in zip(parts, *split, strict=True)]


class GrowingBatch:
    """A batch that grows by one hop at a time.

    With trees, its nodes go by names: a node that several trees reach has one in each.

    Args:
        seeds: Its first nodes, by their ids in the whole graph.
        num_nodes: The number of nodes of the whole graph.
        group: Its number among all batches; with trees that of its first tree among those of all batches.
        bits: The lowest bits of a name are the node's id, and those above them say which tree: each seed has one.
            Default: there are no trees, and a name is an id.
    """

    def __init__(self, seeds: Tensor, num_nodes: int, group: int = 0, bits: int | None = None) -> None:
        check_seeds(seeds, num_nodes)
        self._group, self._bits, self._num_names = group, bits or _ALL_BITS, num_nodes
        if bits is not None:
            seeds, self._num_names = (torch.arange(len(seeds)) << bits) + seeds, max(1, len(seeds)) << bits
        self._hops = [seeds]
        # Of each hop the edges of each node of the frontier, and of each edge its sender, id, weight and type.
        self._edges: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]] = []

    @property
    def frontier(self) -> Tensor:
        """The names that were found last."""
        return self._hops[-1]

    @property
    def asked(self) -> tuple[Tensor, Tensor]:
        """The nodes of the frontier, and the group that each is of."""
        return self.frontier & ((1 << self._bits) - 1), (self.frontier >> self._bits) + self._group

    def open(self, senders: Tensor, num_edges: int) -> tuple[Array, Work, Table]:
        """Return the batch's nodes, and what a kernel writes the next hop into, with room for so many edges."""
        known = torch.cat(self._hops)
        scratch = scratch_of_thread(senders.numpy().dtype)
        scratch.reserve(len(known) + num_edges)
        return known.numpy(), scratch.work, scratch.open_table(self._num_names, 1)

    def join(self, drawn: Drawn) -> None:
        """Add a hop: what was drawn for the frontier, which stays in the trees of its receivers."""
        senders = drawn.senders
        if self._bits != _ALL_BITS:
            trees = (self.frontier >> self._bits) << self._bits
            senders = senders.to(torch.int64) | trees.repeat_interleave(drawn.counts)
        known, work, table = self.open(senders, len(senders))
        self.add(join_hop(known, senders.numpy(), work, table), work, drawn)

    def add(self, found: int, work: Work, drawn: Drawn) -> None:
        """Add the hop that a kernel has written, of whose edges all but the senders is known.

        Args:
            found: How many nodes there are now, or that a seed is there twice, which is refused.
            work: What it has written into.
            drawn: The edges.
        """
        if found == REPEATED_SEED:
            refuse_repeated(self._hops[0])
        known = sum(map(len, self._hops))
        self._hops.append(torch.from_numpy(work.nodes[known:found].astype(np.int64)))
        columns = torch.from_numpy(work.columns[: int(drawn.counts.sum())].astype(np.int32))
        self._edges.append((drawn.counts, columns, drawn.edge_ids, drawn.weights, drawn.kinds))

    def sample(self) -> Sample:
        """The batch; with trees its ``extra["batch"]`` says which tree each node is of."""
        counts, columns, *more = zip(*self._edges, strict=True)
        edge_ids, weights, kinds = (None if of_hops[0] is None else torch.cat(of_hops) for of_hops in more)
        names = torch.cat(self._hops)
        return Sample(
            nodes=names & ((1 << self._bits) - 1),
            indptr=starts_of(torch.cat(counts)).to(torch.int32),
            indices=torch.cat(columns),
            num_sampled_nodes=list(map(len, self._hops)),
            num_sampled_edges=list(map(len, columns)),
            edge_ids=edge_ids,
            edge_weight=weights,
            edge_kinds=kinds,
            extra={} if self._bits == _ALL_BITS else {"batch": names >> self._bits},
        )


@compiled
def join_hop(known: Array, senders: Array, work: Work, table: Table) -> Any:
    """Find the nodes that a hop adds to a batch, as :func:`kernels.sample` does; return how many nodes it has then.

    Or return ``REPEATED_SEED``.

    Args:
        known: The batch's nodes, int64, which ``work.nodes`` begins with at the end.
        senders: The senders of the hop's edges. Their positions in ``work.nodes`` are left in ``work.columns``.
        work: Has room for the nodes that are known and the edges together.
        table: A table without valid entries.
    """
    found = _place_all(known, work, table, ZERO)
    if found != len(known):
        return np.int64(REPEATED_SEED)
    return _place_all(senders, work, table, found)


@part
def _place_all(ids: Array, work: Work, table: Table, found: Any) -> Any:
    for low in range(0, len(ids) + BLOCK, BLOCK):  # each block is prefetched before the one before it is placed
        for i in range(low, min(low + BLOCK, len(ids))):
            work.columns[_U(i)] = ids[_U(i)]
            prefetch(table.entries, slot_of(_U(ids[_U(i)]), table.shift))
        if low:
            found = place(low - BLOCK, min(low, len(ids)), work, table, found)
    return found
