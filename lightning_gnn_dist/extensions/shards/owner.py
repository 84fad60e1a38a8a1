"""What ranks ask each other about shards, several questions to each owner in one exchange, and what an owner answers.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type, and numbers in as few
bytes as the largest of them needs. A graph without types counts as one of one type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import first_words
from lightning_gnn_dist.engine.sample import edge_types_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import Rule, edge_weights, weights_of
from lightning_gnn_dist.extensions.links.negatives import Moments, has_edges
from lightning_gnn_dist.extensions.temporal.row_draws import NO_ORDER, RowRequest, draw_from_rows
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
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
