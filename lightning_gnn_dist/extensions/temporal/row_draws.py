"""Draws from rows of a graph, by time too, and batches that grow by what is drawn, hop by hop.

    frontier -> edges of each type into its nodes -> their senders -> those that are new are the next frontier

What a node may receive by time depends on the time of the seed that it is reached from, so it is in the batch once for
each tree that it is in: it is called ``tree << bits | node`` there, and the table of a batch tells such names apart as
it tells nodes. The edges of a type into a node are in order of time, so those that a seed may see are next to each
other: two binary searches find them, and they are drawn from as if they were a row.

Of a graph that this host has one kernel draws all hops of a batch. Who owns rows draws one hop of the batches of all
ranks, with the number of a batch in the place of a tree where there are no times.
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
    DAMAGED,
    REPEATED_SEED,
    ZERO,
    Array,
    Csr,
    Table,
    Work,
    draw_row,
    end_of_piece,
    is_whole,
    longest_row,
    open_rows,
    place,
    place_seeds,
    prefetch_types,
    slot_of,
    take_row,
)
from lightning_gnn_dist.engine.sample import Sample, csr_of, graph_is_damaged, refuse_repeated, scratch_of_thread
from lightning_gnn_dist.engine.weighted import Piece, Rule, Weights, aside_for, prefetch_weights
from lightning_gnn_dist.extensions.temporal.times import BEFORE_ALL, TimeOrder
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.sampling.base import check_seeds

_U = np.uint64

_ALL_BITS = 62  # of a name, where it is an id

AS_ROWS = np.empty(0, np.int64)  # where nodes have the numbers of their rows
NO_ORDER = TimeOrder(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_))


def bits_of(num_rows: int) -> int:
    """How many bits of a name the number of a row takes."""
    return max(1, (num_rows - 1).bit_length())


class RowDraws(NamedTuple):
    """What is drawn from rows that go by names, ``group << bits | row``. A group is a tree by time, or a batch.

    Attributes:
        bits: How many bits of a name are the row.
        ids: The ids by which the rows of a frontier draw; :data:`AS_ROWS` if these are their numbers.
        edge_type: The type of each edge; empty if there is one type alone.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all, 0 none.
        keys: The key of each hop, group and edge type, uint64, shape (hops, groups, types).
        rule: How the neighbours of one type are drawn. Weights are for a graph of one type.
        latest: Whether the latest edges are drawn, instead of any.
        after: Each group sees events later than this, int64; ``BEFORE_ALL`` for all. Empty if there are no times.
        upto: And no later than this.
        order: The edges by time; :data:`NO_ORDER` if there are no times.
    """

    bits: int
    ids: Array
    edge_type: Array
    fanouts: Array
    keys: Array
    rule: Rule
    latest: bool
    after: Array
    upto: Array
    order: TimeOrder


def draw_from_rows(graph: Graph, rows: Tensor, groups: Tensor, draws: RowDraws) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one hop from some rows, each for a group; a graph without types counts as one of one type.

    Returns how many edges each row gives, their places in the graph, row after row, and their senders.
    """
    names, csr, fanouts = ((groups << draws.bits) | rows).numpy(), csr_of(graph), draws.fanouts
    room = len(names) * int(fanouts.clip(min=0).sum())  # most of which no draw writes to, so that it takes no memory
    if (fanouts < 0).any():
        room += int((graph.indptr[rows + 1] - graph.indptr[rows]).clamp(0, graph.num_edges).sum())
    starts, (first, degree) = np.empty(len(names) + 1, np.int64), np.empty((2, len(names)), np.int64)
    positions, senders = np.empty(room, np.int64), graph.indices.new_empty(room)
    work = Work(names, starts, positions, senders.numpy(), first, degree, *_NOT_NOTED)
    num_edges = _draw_hop(csr, draws, work)
    if num_edges == DAMAGED:
        raise graph_is_damaged(graph)
    return torch.from_numpy(starts).diff(), torch.from_numpy(positions[:num_edges]), senders[:num_edges]


_NOT_NOTED = np.empty(0, np.float32), np.empty(0, np.uint8)  # the weights and types of edges


@compiled
def _draw_hop(csr: Csr, draws: RowDraws, work: Work) -> Any:
    """Draw one hop from the rows of all names in ``work``; return how many edges there are, or ``DAMAGED``."""
    work.starts[0] = 0
    found = _expand(csr, ZERO, len(work.nodes), ZERO, ZERO, draws, draws.rule.weights, work, None)
    return found if found < 0 else work.starts[_U(len(work.nodes))]


@compiled
def sample_trees(
    csr: Csr, roots: Array, draws: RowDraws, work: Work, table: Table, num_nodes: Array, num_edges: Array
) -> Any:
    """Sample one batch into ``work``, by the names of nodes; ``roots`` are those of the seeds.

    Return as :func:`kernels.sample` does.
    """
    begin, end = ZERO, place_seeds(roots, work, table)
    if end != len(roots):
        return REPEATED_SEED
    num_nodes[0] = end
    for hop in range(len(draws.fanouts)):
        found = _expand(csr, begin, end, len(roots), hop, draws, draws.rule.weights, work, table)
        if found < 0:
            return DAMAGED
        total = work.starts[_U(end)]
        if len(roots) + total > len(work.positions):
            return len(roots) + total
        num_edges[hop] = total - work.starts[_U(begin)]
        num_nodes[hop + 1] = found - end
        begin, end = end, found
    return len(roots) + work.starts[_U(begin)]


@part
def _expand(
    csr: Csr,
    begin: int,
    end: int,
    others: int,
    hop: int,
    draws: RowDraws,
    weights: Weights | None,
    work: Work,
    table: Table | None,
) -> Any:
    """One hop in five stages, each a block of rows behind the one before; return as :func:`kernels.expand` does.

    Without a table senders are not placed. With too little room for all edges it counts them, and finds no more nodes.
    """
    mask = (_U(1) << _U(draws.bits)) - _U(1)
    if not open_rows(csr, begin, end, mask, work):
        return np.int64(DAMAGED)
    found, blocks, total = end, (end - begin + BLOCK - 1) // BLOCK, work.starts[_U(begin)]
    room = len(work.positions) - others
    aside = None if weights is None else aside_for(weights, longest_row(end - begin, work))
    for block in range(blocks + 4):
        low = begin + block * BLOCK
        _await_rows(begin, low, min(low + BLOCK, end), hop, draws, weights, work)
        low -= BLOCK
        if 1 <= block <= blocks:
            total = _draw_rows(
                csr.indices, begin, low, min(low + BLOCK, end), total, room, hop, draws, weights, aside, work
            )
            if total < 0:
                return np.int64(DAMAGED)
        if total > room:
            continue
        low -= BLOCK
        is_right: Any = True
        if 2 <= block <= blocks + 1:
            is_right = _find_edges(csr.indices, begin, low, min(low + BLOCK, end), draws.order.places, work)
        low -= BLOCK
        if is_right and 3 <= block <= blocks + 2:
            is_right = _read_senders(csr, low, min(low + BLOCK, end), draws.bits, work, table)
        if not is_right:
            return np.int64(DAMAGED)
        low -= BLOCK
        if block >= 4 and table is not None:
            found = place(work.starts[_U(low)], work.starts[_U(min(low + BLOCK, end))], work, table, found)
    return found


@part
def _await_rows(
    begin: int, low: int, high: int, hop: int, draws: RowDraws, weights: Weights | None, work: Work
) -> None:
    """Ask for what draws from the rows ``low`` to ``high`` will read first."""
    for i in range(low, high):
        first, degree = work.first[_U(i - begin)], work.degree[_U(i - begin)]
        if len(draws.edge_type):
            prefetch_types(draws.edge_type, first, degree)
        if len(draws.after):
            prefetch(draws.order.times, first)
            prefetch(draws.order.times, first + degree // 2)
        if weights is not None:
            fanout = draws.fanouts[_U(hop), ZERO]
            if len(weights.table) and not is_whole(degree, fanout, draws.rule.replace):
                key = draws.keys[_U(hop), _U(work.nodes[_U(i)]) >> _U(draws.bits), ZERO]
                prefetch_weights(
                    Piece(first, degree, fanout, key, draws.ids[_U(i - begin)]), draws.rule.replace, weights
                )


@part
def _draw_rows(
    indices: Array,
    begin: int,
    low: int,
    high: int,
    total: int,
    room: int,
    hop: int,
    draws: RowDraws,
    weights: Weights | None,
    aside: Any,
    work: Work,
) -> Any:
    """Choose the edges of the frontier rows ``low`` to ``high``, by their places in the order of time.

    Return the batch's edges so far, or ``DAMAGED``.
    """
    num_types, replace, latest, ids = draws.fanouts.shape[1], draws.rule.replace, draws.latest, draws.ids
    edge_type, places, times, has_time = draws.edge_type, draws.order.places, draws.order.times, draws.order.has_time
    fanouts, keys, after, upto, positions = draws.fanouts, draws.keys, draws.after, draws.upto, work.positions
    for i in range(low, high):
        first = work.first[_U(i - begin)]
        last = first + work.degree[_U(i - begin)]
        group = _U(work.nodes[_U(i)]) >> _U(draws.bits)
        node: Any = np.int64(_U(work.nodes[_U(i)]) ^ (group << _U(draws.bits)))
        if len(ids):
            node = ids[_U(i - begin)]
        while first < last:
            kind, stop = ZERO, last
            if len(edge_type):
                kind = np.int64(edge_type[_U(first)])
                stop = end_of_piece(edge_type, first, last)
            if _U(kind) >= _U(num_types):  # read as unsigned, a negative number is large
                return np.int64(DAMAGED)
            start, end = first, stop
            if len(after) and has_time[_U(kind)]:  # a function of its own would take a fifth longer
                if after[group] != BEFORE_ALL:
                    start = first_later(times, first, stop, after[group])
                end = first_later(times, start, stop, upto[group])
            fanout, degree = fanouts[_U(hop), _U(kind)], end - start
            takes_all = is_whole(degree, fanout, replace)
            out, total = total, total + (degree if takes_all else fanout)
            if total <= room:
                piece = Piece(start, degree, fanout, keys[_U(hop), group, _U(kind)], node)
                count = total - out if takes_all or latest else ZERO
                if len(places):
                    _choose(places, piece, count, replace, weights, aside, positions, out)
                else:
                    _choose(indices, piece, count, replace, weights, aside, positions, out)
            first = stop
        work.starts[_U(i + 1)] = total
    return total


@inlined
def _choose(
    read: Array, piece: Piece, latest: int, replace: bool, weights: Any, aside: Any, positions: Array, out: int
) -> None:
    """Take so many of the last edges of a piece, or draw from it; ask for what is read next of each."""
    if latest:
        take_row(read, piece.first + piece.degree - latest, latest, positions, out)
    elif piece.fanout:
        draw_row(read, piece, replace, weights, aside, positions, out)


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


@part
def _find_edges(indices: Array, begin: int, low: int, high: int, places: Array, work: Work) -> Any:
    """Turn places in the order of time into positions of edges; return whether they are in their rows."""
    starts, positions = work.starts, work.positions
    is_damaged: Any = False
    for i in range(low, high if len(places) else low):
        first, degree = work.first[_U(i - begin)], work.degree[_U(i - begin)]
        for edge in range(starts[_U(i)], starts[_U(i + 1)]):
            within = places[_U(positions[_U(edge)])]
            is_damaged |= _U(within) >= _U(degree)
            positions[_U(edge)] = first + within
            prefetch(indices, first + within)
    return not is_damaged


@part
def _read_senders(csr: Csr, low: int, high: int, bits: int, work: Work, table: Table | None) -> Any:
    """Read the senders of the edges of some rows, and name those to place; return whether these are nodes."""
    starts, positions, columns, nodes, indices = work.starts, work.positions, work.columns, work.nodes, csr.indices
    is_damaged: Any = False
    if table is None:  # whoever asked knows how many nodes there are
        for edge in range(starts[_U(low)], starts[_U(high)]):
            columns[_U(edge)] = indices[_U(positions[_U(edge)])]
        return True
    entries, shift, count = table.entries, table.shift, _U(len(csr.indptr) - 1)
    for i in range(low, high):
        tree = _U(nodes[_U(i)]) >> _U(bits) << _U(bits)
        for edge in range(starts[_U(i)], starts[_U(i + 1)]):
            source = _U(indices[_U(positions[_U(edge)])])
            is_damaged |= source >= count  # read as unsigned, a negative id is large
            name = tree | source
            columns[_U(edge)] = name
            prefetch(entries, slot_of(name, shift))
    return not is_damaged


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
