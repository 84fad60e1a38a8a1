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
from lightning_gnn_dist.extensions.shards.row_draws import NO_ORDER, RowRequest, draw_from_rows
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.graph.typed.names import TypeNames
from lightning_gnn_dist.wire.asking import Asking

_U = np.uint64

Message: TypeAlias = list[Tensor]

# Kinds of questions.
DRAW, ROWS, NODES, EDGES, LINKED, DEGREES = range(6)
_WIDTHS = (torch.uint8, torch.int16, torch.int32)


def narrow(numbers: Tensor, most: int) -> Tensor:
    """Numbers from 0 to ``most`` in as few bytes as ``most`` needs."""
    dtype = next((dtype for dtype in _WIDTHS if most <= torch.iinfo(dtype).max), torch.int64)
    return numbers.to(dtype)


def gathered(arrays: Mapping[str, Tensor], places: Tensor, pool: Pool) -> Message:
    """The rows of all arrays at some places, in the order of the arrays' names."""
    local = places.to(torch.int64)
    return [gather_rows(arrays[name], local, pool) for name in sorted(arrays)]


def letters_of(name: str | None) -> Tensor:
    """A name as it travels; None travels as no letters."""
    return torch.tensor(list((name or "").encode()), dtype=torch.uint8)


def name_of(letters: Tensor) -> str:
    return letters.numpy().tobytes().decode()


SEVERAL = 100  # the kind of several questions at once


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
    if not questions:
        return []
    ranks, is_alone = range(asking.size), len(questions) == 1
    sent = [[(kind, of[rank]) for kind, of in questions if len(of[rank][0])] for rank in ranks]
    own, kind = sent[asking.rank], questions[0].kind if is_alone else SEVERAL
    joint = [None if not of_rank else of_rank[0][1] if is_alone else _joint(of_rank) for of_rank in sent]
    came, mine = asking.ask(kind, joint, lambda: [owner.answer(*question) for question in own])
    said = [iter([] if answer is None else [answer] if is_alone else _unpacked(answer)) for answer in came]
    said[asking.rank] = iter(mine)
    return [
        [next(said[rank]) if len(of[rank][0]) else owner.answer(kind, of[rank]) for rank in ranks]
        for kind, of in questions
    ]


def answer_of(owner: Owner, kind: int, question: Message) -> Message:
    """Return what an owner answers to a question, or to several in one."""
    if kind != SEVERAL:
        return owner.answer(kind, question)
    kinds, *questions = question
    return _packed([owner.answer(*asked) for asked in zip(kinds.tolist(), _unpacked(questions), strict=True)])


def _joint(questions: list[tuple[int, Message]]) -> Message:
    kinds, messages = zip(*questions, strict=True)
    return [torch.tensor(kinds, dtype=torch.uint8), *_packed(messages)]


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
        of_kinds: dict[int, Callable[..., Message]]
        of_kinds = {DRAW: self._draw, ROWS: self._whole_rows, DEGREES: self._degrees, LINKED: self._linked}
        of_kinds |= {NODES: self._nodes, EDGES: self._edges}
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
        draws = bool((fanouts >= 0).any())
        rule = Rule(None if name is None else weights_of(self._rows, name, draws=draws), replace)
        nodes = self._types.to_whole(self._index, local)
        given = edge_types_of(self._rows.types), local.numpy(), nodes.numpy(), groups.numpy(), words, fanouts.numpy()
        drawn = draw_from_rows(self._rows, RowRequest(*given, rule, latest, after, upto, order))
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
        return narrow(places, int(self._types.edges.diff()[:, self._index].max()))

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

    def _nodes(self, places: Tensor, number: Tensor, name: Tensor | None = None) -> Message:
        """The rows of all arrays of a node type, or of one, by their places in it."""
        arrays = self._rows.types.node_arrays[self._types.node_types[int(number)]]
        return gathered(_named(arrays, name), places, self._pool)

    def _edges(self, places: Tensor, number: Tensor, name: Tensor | None = None) -> Message:
        arrays = self._rows.types.edge_arrays[self._types.edge_types[int(number)]]
        return gathered(_named(arrays, name), places, self._pool)

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

    def _lengths(self, local: Tensor) -> Tensor:
        """Return the lengths of own rows; refuse rows that reach beyond the shard."""
        rows = self._rows
        first, last = rows.indptr[local], rows.indptr[local + 1]
        if bool(((first < 0) | (last < first) | (last > rows.num_edges)).any()):
            raise graph_is_damaged(rows)
        return last - first


def _named(arrays: Mapping[str, Tensor], name: Tensor | None) -> Mapping[str, Tensor]:
    return arrays if name is None else {name_of(name): arrays[name_of(name)]}


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
