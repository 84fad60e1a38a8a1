"""What ranks ask each other about shards, several questions to each owner in one exchange, and what an owner answers.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type, and numbers in as few
bytes as the largest of them needs. A graph without types counts as one of one type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.compiling import compiled, inlined
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import (
    BLOCK,
    ROWS_AHEAD,
    ZERO,
    Array,
    Csr,
    draw_row,
    end_of_piece,
    is_no_row,
    is_whole,
    prefetch_types,
    take_row,
)
from lightning_gnn_dist.engine.rng import first_words
from lightning_gnn_dist.engine.sample import csr_of, edge_types_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import (
    Piece,
    Rule,
    Weights,
    aside_for,
    edge_weights,
    prefetch_weights,
    weights_of,
)
from lightning_gnn_dist.extensions.links.negatives import Moments, has_edges
from lightning_gnn_dist.extensions.temporal.times import BEFORE_ALL, TimeOrder
from lightning_gnn_dist.extensions.temporal.trees import first_later
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import TypeNames
from lightning_gnn_dist.wire.asking import Asking

_U = np.uint64

Message: TypeAlias = list[Tensor]

# Kinds of questions.
DRAW, NODES, EDGES, LINKED, DEGREES = range(5)
_WIDTHS = (torch.uint8, torch.int16, torch.int32)


def narrow(numbers: Tensor, most: int) -> Tensor:
    """Numbers from 0 to ``most`` in as few bytes as ``most`` needs."""
    dtype = next((dtype for dtype in _WIDTHS if most <= torch.iinfo(dtype).max), torch.int64)
    return numbers.to(dtype)


def letters_of(name: str | None) -> Tensor:
    """A name as it travels; None travels as no letters."""
    return torch.tensor(list((name or "").encode()), dtype=torch.uint8)


def name_of(letters: Tensor) -> str:
    return letters.numpy().tobytes().decode()


class Question(NamedTuple):
    """A question to all ranks.

    Attributes:
        kind: What it asks for.
        of_ranks: What each rank is asked. Nobody is asked about nothing, which is where the first tensor is empty.
    """

    kind: int
    of_ranks: list[Message]


def ask_owners(asking: Asking, owner: Owner, questions: Sequence[Question]) -> list[list[Message]]:
    """Return for each question the answer of each rank: the own one too, which ``owner`` gives, as those to nothing."""
    ranks = range(asking.size)
    asked = [[(kind, of[rank]) for kind, of in questions if len(of[rank][0])] for rank in ranks]
    sent = [_packed([[torch.tensor([kind]), *of] for kind, of in of_rank]) if of_rank else None for of_rank in asked]
    came, own = asking.ask(0, sent, lambda: [owner.answer(*question) for question in asked[asking.rank]])
    said = [iter([] if answer is None else _unpacked(answer)) for answer in came]
    said[asking.rank] = iter(own)
    return [
        [next(said[rank]) if len(of[rank][0]) else owner.answer(kind, of[rank]) for rank in ranks]
        for kind, of in questions
    ]


def answer_of(owner: Owner, _: int, questions: Message) -> Message:
    """Return what an owner answers to the questions of a rank."""
    return _packed([owner.answer(int(kind), question) for kind, *question in _unpacked(questions)])


def _packed(messages: Sequence[Message]) -> Message:
    """Messages as one, whose first tensor says how many tensors each of them has."""
    return [torch.tensor(list(map(len, messages)), dtype=torch.uint8), *chain(*messages)]


def _unpacked(message: Message) -> list[Message]:
    counts, *tensors = message
    rest = iter(tensors)
    return [list(islice(rest, count)) for count in counts.tolist()]


class OwnedTypes(TypeNames, Protocol):
    """The types of a graph whose rows have several owners."""

    @property
    def edges(self) -> Tensor:
        """For each edge type, how many edges of it the owners before each one have, and at the end all, int64."""

    def to_whole(self, owner: int, rows: Tensor) -> Tensor:
        """The ids in the whole graph of some rows of an owner, by which draws are keyed."""


class Owner:
    """Answers questions about rows that it owns, in any thread.

    Args:
        rows: The rows.
        types: The types of the whole graph.
        index: The owner's number.
        pool: Lends memory for rows, until they are sent.
        orders: The edges in the order of times, by the names of times.
    """

    def __init__(self, rows: Graph, types: OwnedTypes, index: int, pool: Pool, orders: Mapping[str, TimeOrder]) -> None:
        self._rows, self._types, self._index, self._pool, self._orders = rows, types, index, pool, orders
        self._with_arrays = [
            number for number, kind in enumerate(self._types.edge_types) if self._rows.types.edge_arrays[kind]
        ]

    def answer(self, kind: int, question: Message) -> Message:
        """Return the answer to a question."""
        types = self._rows.types
        if kind in (NODES, EDGES):
            of_types = types.node_arrays if kind == NODES else types.edge_arrays
            return self._rows_of(list(of_types.values()), *question)
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, DEGREES: self._degrees, LINKED: self._linked}
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
        """The number of edges drawn for each row, their senders, and of several types their types.

        Then where some edges have arrays their places, 0 for an edge whose type has none, and weights if they are
        wanted.
        """
        local, (replace, latest, weighs) = rows.to(torch.int64), map(bool, flags)
        groups, words = torch.arange(len(counts)).repeat_interleave(counts), keys.numpy().view(np.uint64)
        of_batch, seeds, after, upto = trees.numpy()
        order, name = NO_ORDER, name_of(weight) or None
        if len(time):  # what a tree draws does not depend on the other trees of its batch
            words, order = first_words(words[of_batch], seeds[:, None]), self._orders[name_of(time)]
        draws = bool((fanouts >= 0).any())
        rule = Rule(None if name is None else weights_of(self._rows, name, draws=draws), replace)
        nodes = self._types.to_whole(self._index, local)
        given = edge_types_of(self._rows.types), local.numpy(), nodes.numpy(), groups.numpy(), words, fanouts.numpy()
        drawn, positions, senders = draw_from_rows(self._rows, RowRequest(*given, rule, latest, after, upto, order))
        kinds = [] if len(fanouts) == 1 else [self._rows.types.edge_type[positions]]
        more = [*kinds, self._places(positions, *kinds)] if self._with_arrays else kinds
        if weighs and name is not None:
            more = [*more, torch.from_numpy(edge_weights(self._rows, name))[positions]]
        return [narrow(drawn, int(drawn.max()) if len(drawn) else 0), senders, *more]

    def _places(self, positions: Tensor, kinds: Tensor | None = None) -> Tensor:
        """Where edges stand among those of their types; 0 where a type has no arrays."""
        if kinds is None:
            return narrow(positions, self._rows.num_edges)
        places = torch.zeros_like(positions)
        for number in self._with_arrays:
            is_of = kinds == number
            places[is_of] = places_of(self._rows, number, positions[is_of])
        return narrow(places, int(self._types.edges.diff()[:, self._index].max()))

    def _rows_of(self, of_types: list[Mapping[str, Tensor]], places: Tensor, number: Tensor, name: Tensor) -> Message:
        """The rows of all arrays of a type in the order of their names, or of the named one, at places in the type."""
        arrays, at = of_types[int(number)], places.to(torch.int64)
        return [
            gather_rows(arrays[each], at, self._pool) for each in ([name_of(name)] if len(name) else sorted(arrays))
        ]

    def _degrees(self, rows: Tensor) -> Message:
        """The lengths of own rows; rows that reach beyond the shard are refused."""
        own, local = self._rows, rows.to(torch.int64)
        first, last = own.indptr[local], own.indptr[local + 1]
        if bool(((first < 0) | (last < first) | (last > own.num_edges)).any()):
            raise graph_is_damaged(own)
        return [last - first]

    def _linked(self, receivers: Tensor, senders: Tensor, edge_type: Tensor, times: Tensor, name: Tensor) -> Message:
        """A bool for each pair of nodes: whether the second sends to the first, or did at a time of that name."""
        at = Moments(self._orders[name_of(name)], times) if len(name) else None
        pairs = torch.stack([senders.to(torch.int64), receivers.to(torch.int64)])
        return [has_edges(self._rows, pairs, int(edge_type) if edge_type.numel() else None, at)]


# Draws from own rows: the edges that the kernels of sampling draw for their nodes.


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
        after: Each group sees events later than this, int64. Empty if there are no times.
        upto: And no later than this.
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
    after: Array
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
    _draw(csr, asked, asked.rule.weights, longest, starts, positions, senders.numpy())
    return torch.from_numpy(counts), torch.from_numpy(positions), senders


@compiled
def _count(csr: Csr, asked: RowRequest, counts: Array) -> Any:
    """Count the edges that each row gives; return the length of the longest row.

    Or return -1, if one is no row of the graph, or has an edge of a type that is none.
    """
    longest: Any = ZERO
    for i in range(len(asked.rows)):
        prefetch(csr.indptr, asked.rows[_U(min(i + ROWS_AHEAD, len(asked.rows) - 1))])
        if len(asked.edge_type):
            soon = _U(asked.rows[_U(min(i + ROWS_AHEAD // 2, len(asked.rows) - 1))])
            prefetch_types(asked.edge_type, csr.indptr[soon], csr.indptr[soon + _U(1)] - csr.indptr[soon])
        row = _U(asked.rows[_U(i)])
        first, last, total = csr.indptr[row], csr.indptr[row + _U(1)], ZERO
        if is_no_row(first, last, len(csr.indices)):
            return -1
        longest = max(longest, last - first)
        while first < last:
            kind, stop = ZERO, last
            if len(asked.edge_type):
                kind, stop = np.int64(asked.edge_type[_U(first)]), end_of_piece(asked.edge_type, first, last)
            if _U(kind) >= _U(len(asked.fanouts)):  # read as unsigned, a negative number is large
                return -1
            start, end = _seen(asked, i, kind, first, stop)
            fanout = asked.fanouts[_U(kind)]
            total += end - start if is_whole(end - start, fanout, asked.rule.replace) else fanout
            first = stop
        counts[_U(i)] = total
    return longest


@compiled
def _draw(
    csr: Csr, asked: RowRequest, weights: Weights | None, longest: int, starts: Array, positions: Array, senders: Array
) -> None:
    """Write which edges the rows give, each row's from its place in ``starts`` on.

    What stands there is read a block of rows later: it was prefetched when it was drawn.
    """
    count, read = len(asked.rows), 0
    aside = None if weights is None else aside_for(weights, longest)
    for low in range(0, count + BLOCK, BLOCK):
        if weights is not None:
            for i in range(low + BLOCK, min(low + 2 * BLOCK, count) if len(weights.table) else 0):
                first, key = csr.indptr[_U(asked.rows[_U(i)])], asked.keys[_U(asked.groups[_U(i)]), ZERO]
                degree = csr.indptr[_U(asked.rows[_U(i)]) + _U(1)] - first
                if not is_whole(degree, asked.fanouts[ZERO], asked.rule.replace):
                    piece = Piece(first, degree, asked.fanouts[ZERO], key, asked.nodes[_U(i)])
                    prefetch_weights(piece, asked.rule.replace, weights)
        for i in range(low, min(low + BLOCK, count)):
            prefetch(csr.indptr, asked.rows[_U(min(i + ROWS_AHEAD, count - 1))])
            _draw_row(csr, asked, i, weights, aside, starts[_U(i)], positions)
        stop = starts[_U(low)] if low < count else len(positions)
        for edge in range(read, stop):
            senders[_U(edge)] = csr.indices[_U(positions[_U(edge)])]
        read = stop


@inlined
def _draw_row(
    csr: Csr, asked: RowRequest, i: int, weights: Weights | None, aside: Any, begin: int, positions: Array
) -> None:
    """Draw from row ``i``, of each edge type that leads to it."""
    row, node, out = _U(asked.rows[_U(i)]), asked.nodes[_U(i)], begin
    first, last = csr.indptr[row], csr.indptr[row + _U(1)]
    while first < last:
        kind, stop = ZERO, last
        if len(asked.edge_type):
            kind, stop = np.int64(asked.edge_type[_U(first)]), end_of_piece(asked.edge_type, first, last)
        start, end = _seen(asked, i, kind, first, stop)
        fanout, degree = asked.fanouts[_U(kind)], end - start
        if is_whole(degree, fanout, asked.rule.replace):
            take_row(csr.indices, start, degree, positions, out)
            out += degree
        elif asked.latest:
            take_row(csr.indices, end - fanout, fanout, positions, out)
            out += fanout
        else:
            piece = Piece(start, degree, fanout, asked.keys[_U(asked.groups[_U(i)]), _U(kind)], node)
            draw_row(csr.indices, piece, asked.rule.replace, weights, aside, positions, out)
            out += fanout
        first = stop
    if len(asked.order.places):
        for edge in range(begin, out):
            positions[_U(edge)] = csr.indptr[row] + asked.order.places[_U(positions[_U(edge)])]


@inlined
def _seen(asked: RowRequest, i: int, kind: int, first: int, stop: int) -> Any:
    """Where the edges of a type into row ``i`` that are seen start and end, in the order of time."""
    start, end = first, stop
    if len(asked.after) and asked.order.has_time[_U(kind)]:
        group = _U(asked.groups[_U(i)])
        if asked.after[group] != BEFORE_ALL:
            start = first_later(asked.order.times, first, stop, asked.after[group])
        end = first_later(asked.order.times, start, stop, asked.upto[group])
    return start, end


# How answers come together.


Join = Callable[[list[Tensor]], Tensor]


class Route:
    """Sorts the rows of a request by the rank that they go to, and the answers back into order.

    Args:
        owners: The rank that each row goes to.
        num_ranks: The number of ranks.
    """

    def __init__(self, owners: Tensor, num_ranks: int) -> None:
        self.order = owners.argsort(stable=True)
        self.sizes: list[int] = torch.bincount(owners, minlength=num_ranks).tolist()

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the rows that each rank is sent, in order of rank."""
        return list(rows[self.order].split(self.sizes))

    def restore(self, answers: Sequence[Tensor]) -> Tensor:
        """Return one answer for each row of the request, in its order."""
        rows = torch.cat(list(answers))
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out

    def joined(self, counts: Sequence[Tensor], entries: Sequence[Tensor], starts: Tensor) -> Tensor:
        """Return the entries of all rows in the order of the request, each row's from its place in ``starts`` on."""
        out = entries[0].new_empty(sum(map(len, entries)))
        for rows, lengths, some in zip(self.order.split(self.sizes), counts, entries, strict=True):
            put_rows(rows.numpy(), lengths.numpy(), some.numpy(), starts.numpy(), out.numpy())
        return out

    def in_order(self, answers: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn, how many edges for each row and their senders, into the order of the request.

        Returns how many edges each row has, their senders, and what brings another number of each edge into order.
        """
        lengths = [answer[0].to(torch.int64) for answer in answers]
        counts = self.restore(lengths)
        join = partial(self.joined, lengths, starts=counts.cumsum(0) - counts)
        return counts, join([answer[1] for answer in answers]), join


@compiled
def put_rows(rows: Array, counts: Array, source: Array, starts: Array, out: Array) -> None:
    """Copy what lies row after row in ``source`` to the place of each of ``rows`` in ``out``.

    Args:
        rows: The rows, int64.
        counts: The length of each of them.
        source: Their entries.
        starts: Where every row begins in ``out``, int64.
        out: Receives the entries.
    """
    at = 0
    for i in range(len(rows)):
        start = starts[_U(rows[_U(i)])]
        for j in range(np.int64(counts[_U(i)])):
            out[_U(start + j)] = source[_U(at)]
            at += 1
