"""What ranks ask each other about shards, several questions to each owner in one exchange, and what an owner answers.

Nodes travel as rows of the owner's shard, edges as places among the owner's edges of their type, and numbers in as few
bytes as the largest of them needs. A graph without types counts as one of one type.

Batches grow by what owners draw: frontier -> its owners draw neighbours of each edge type -> senders -> the nodes among
them that are new -> ...
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
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.kernels import REPEATED_SEED, ZERO, Array, Table, Work, place
from lightning_gnn_dist.engine.layer_kernels import LayerDraws, chances_of, choose, thin
from lightning_gnn_dist.engine.rng import first_words, typed_keys
from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample, edge_types_of, graph_is_damaged
from lightning_gnn_dist.engine.weighted import Rule, edge_weights, weights_of
from lightning_gnn_dist.extensions.asking.asking import Asking
from lightning_gnn_dist.extensions.asking.turns import Steps
from lightning_gnn_dist.extensions.links.negatives import Moments, has_edges
from lightning_gnn_dist.extensions.shards.index import OwnedTypes
from lightning_gnn_dist.extensions.temporal.row_draws import NO_ORDER, Drawn, GrowingBatch, RowRequest, draw_from_rows
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, seen_by
from lightning_gnn_dist.extensions.temporal.times import TimeOrder
from lightning_gnn_dist.graph.graph import Graph

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
        of_batch, seeds, upto = trees.numpy()
        order, name = NO_ORDER, name_of(weight) or None
        if len(time):  # what a tree draws does not depend on the other trees of its batch
            words, order = first_words(words[of_batch], seeds[:, None]), self._orders[name_of(time)]
        draws = bool((fanouts >= 0).any())
        rule = Rule(None if name is None else weights_of(self._rows, name, draws=draws), replace)
        nodes = self._types.to_whole(self._index, local)
        given = edge_types_of(self._rows.types), local.numpy(), nodes.numpy(), groups.numpy(), words, fanouts.numpy()
        drawn, positions, senders = draw_from_rows(self._rows, RowRequest(*given, rule, latest, upto, order))
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


class DrawRule(NamedTuple):
    """How neighbours are drawn.

    Attributes:
        replace: Whether an edge may be drawn more than once.
        weight: The name of the edge array that says how likely an edge is. With None all are equally likely.
        weighs: Whether the weights of the edges are wanted, too.
        time: Where trees of batches by time are drawn, the name of the times of edges, or of the nodes that send.
        latest: Whether they take the latest edges, instead of any.
        trees: For each tree the number of its batch, the id of its seed, and up to which time it sees events, as an
            integer, int64, shape (3, trees). Without times there are none.
    """

    replace: bool = False
    weight: str | None = None
    weighs: bool = False
    time: str = ""
    latest: bool = False
    trees: Tensor = torch.empty(3, 0, dtype=torch.int64)  # never changed


class OwnedGraph(Protocol):
    """A graph whose rows have owners, who draw from them."""

    @property
    def types(self) -> OwnedTypes: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def of_edges(self) -> Mapping[int, Any]: ...

    def to_owners(self, nodes: Tensor, groups: Tensor, /) -> tuple[Route, list[Message]]:
        """Divide some nodes, and the group that each is for, among their owners: a question for each."""

    def in_order(self, route: Route, answers: list[Message]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn into the order of the request."""


def draw_hops(
    graph: OwnedGraph, batches: Sequence[GrowingBatch], fanouts: Array, keys: Sequence[BatchKey], how: DrawRule
) -> Steps[list[Sample]]:
    """Let batches grow by all hops, one turn each, and return them.

    Args:
        graph: The graph; where trees see times, its edges are in their order.
        batches: The batches, which have their seeds.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all.
        keys: The key of each batch.
        how: How they are drawn.
    """
    of_batches = [typed_keys(*key, *fanouts.shape).view(np.int64) for key in keys]
    words = torch.from_numpy(np.stack(of_batches))
    for hop, of_hop in enumerate(torch.from_numpy(fanouts)):
        nodes, groups = (torch.cat(of) for of in zip(*(batch.asked for batch in batches), strict=True))
        drawn = yield from draw(graph, nodes, groups, words[:, hop].contiguous(), of_hop, how)
        for batch, own in zip(batches, drawn.divided([len(batch.frontier) for batch in batches]), strict=True):
            batch.join(own)
    return [batch.sample() for batch in batches]


def draw(
    graph: OwnedGraph, nodes: Tensor, groups: Tensor, keys: Tensor, fanouts: Tensor, how: DrawRule
) -> Steps[Drawn]:
    """Let the ranks that own the rows draw neighbours of some nodes, of each edge type so many.

    Args:
        graph: The graph.
        nodes: The nodes, by their ids in the whole graph.
        groups: The number of the batch that each node is for, in increasing order; with trees that of the tree.
        keys: The random key of this hop in each batch, for each edge type, shape (batches, types).
        fanouts: Neighbours to draw of each edge type; -1 takes all.
        how: How they are drawn.
    """
    num_groups, flags = how.trees.shape[1] if how.time else len(keys), [how.replace, how.latest, how.weighs]
    more = [keys, fanouts, torch.tensor(flags), letters_of(how.weight), how.trees, letters_of(how.time)]
    route, questions = graph.to_owners(nodes, groups)
    asked = [[rows, torch.bincount(of, minlength=num_groups), *more] for rows, of in questions]
    (answers,) = yield [Question(DRAW, asked)]
    counts, senders, join = graph.in_order(route, answers)
    columns, edge_ids, weights = [iter(answer[2:]) for answer in answers], None, None
    kinds = [torch.zeros(1, dtype=torch.uint8) if len(fanouts) == 1 else next(of) for of in columns]
    if graph.of_edges:
        firsts = [of_rank[kind.to(torch.int64)] for of_rank, kind in zip(graph.types.edges.T, kinds, strict=False)]
        edge_ids = join([next(of).to(torch.int64) + first for of, first in zip(columns, firsts, strict=True)])
    if how.weighs:
        weights = join([next(of) for of in columns])
    of_edges = None
    if graph.types.have_names:
        of_edges = join(kinds) if len(fanouts) > 1 else kinds[0].expand(len(senders))
    return Drawn(counts, senders, of_edges, edge_ids, weights)


def sample_at_times(
    graph: OwnedGraph,
    sampler: TemporalSampler,
    seeds: Sequence[Tensor],
    times: Sequence[Tensor],
    keys: Sequence[BatchKey],
) -> Steps[list[Sample]]:
    """Draw batches around nodes at times of their own; a node may be a seed at several. One turn a hop.

    The graph's edges are in the order of these times.
    """
    bits, first = max(1, (graph.num_nodes - 1).bit_length()), torch.tensor([0, *map(len, seeds)]).cumsum(0).tolist()
    growing = [GrowingBatch(ids, graph.num_nodes, at, bits) for ids, at in zip(seeds, first, strict=False)]
    of_seeds = torch.tensor(list(map(len, seeds)))
    upto = seen_by(sampler, torch.cat(list(times)))
    trees = torch.stack([torch.arange(len(seeds)).repeat_interleave(of_seeds), torch.cat(list(seeds)), upto])
    how = DrawRule(time=sampler.time, latest=sampler.pick == "latest", trees=trees)
    samples = yield from draw_hops(graph, growing, sampler.of_types(graph.types), keys, how)
    return [of._replace(extra={**of.extra, SEED_TIME: at}) for of, at in zip(samples, times, strict=True)]


def whole_rows(graph: OwnedGraph, nodes: Tensor, weight: str | None = None) -> Steps[Drawn]:
    """Return all edges of some nodes, in their order, and their weights of a name."""
    fanouts = torch.full((len(graph.types.edge_types),), -1)
    how = DrawRule(weight=weight, weighs=weight is not None)
    return (yield from draw(graph, nodes, torch.zeros_like(nodes), torch.zeros_like(fanouts)[None], fanouts, how))


@compiled
def sample_layer(
    starts: Array,
    senders: Array,
    rows: Array,
    known: Array,
    begin: int,
    key: np.uint64,
    hop: int,
    layers: LayerDraws,
    work: Work,
    table: Table,
) -> Any:
    """One hop of :func:`sample_layers`, on rows of the frontier that came from other ranks; return the batch's nodes.

    ``work`` receives the hop's edges from its start on, and ``known`` followed by the new nodes.

    Args:
        starts: Where each row starts in ``senders``, int64.
        senders: The rows' entries.
        rows: The row of each node of the frontier, int64.
        known: The batch's nodes so far, int64.
        begin: The position in ``known`` at which the frontier begins.
        key: The hop's key.
        hop: The hop's number.
        layers: The same for all hops, except that ``values`` are in the order of ``senders``.
        work: Must have room for all nodes and edges.
        table: A table without valid entries.
    """
    for at in range(len(known)):
        work.columns[_U(at)] = known[_U(at)]
    end = place(ZERO, len(known), work, table, ZERO)
    if end != len(known):
        return REPEATED_SEED
    out = ZERO
    work.starts[_U(begin)] = out
    for i in range(begin, end):
        row = _U(rows[_U(i - begin)])
        for edge in range(starts[row], starts[row + _U(1)]):
            work.positions[_U(out)] = edge
            work.columns[_U(out)] = senders[_U(edge)]
            out += 1
        work.degree[_U(i - begin)] = starts[row + _U(1)] - starts[row]
        work.starts[_U(i + 1)] = out
    met = place(ZERO, out, work, table, end)
    inverse = chances_of(begin, end, met, hop, layers, work)
    choose(met, key, inverse, work)
    return thin(begin, end, met, layers, inverse, work)
