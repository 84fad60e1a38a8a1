"""Draws by the ranks that own the rows, and the hops of a bulk that are made of them.

frontier -> its owners draw neighbours of each edge type -> senders -> the nodes among them that are new -> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import BLOCK, REPEATED_SEED, ZERO, Array, Table, Work, place, slot_of
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated, scratch_of_thread
from lightning_gnn_dist.extensions.shards.owner import DRAW, Join, Message, OwnedTypes, Question, Route, letters_of
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.turns import Steps

_U = np.uint64

_ALL_BITS = 62  # of a name, where it is an id


class Seen(NamedTuple):
    """What the trees of batches by time see.

    Attributes:
        time: The name of the times of edges, or of the nodes that send.
        latest: Whether the latest edges are drawn, instead of any.
        trees: For each tree the number of its batch, the id of its seed, after which time it sees events, and up to
            which, as integers, int64, shape (4, trees).
    """

    time: str
    latest: bool
    trees: Tensor


class DrawRule(NamedTuple):
    """How neighbours are drawn.

    Attributes:
        replace: Whether an edge may be drawn more than once.
        weight: The name of the edge array that says how likely an edge is. With None all are equally likely.
        seen: What the trees of batches by time see. With None all edges are seen.
    """

    replace: bool = False
    weight: str | None = None
    seen: Seen | None = None


class OwnedGraph(Protocol):
    """A graph whose rows have owners, who draw from them."""

    @property
    def types(self) -> OwnedTypes: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def has_edge_arrays(self) -> bool: ...

    def to_owners(self, nodes: Tensor, groups: Tensor, /) -> tuple[Route, list[Message]]:
        """Divide some nodes, and the group that each is for, among their owners: a question for each."""

    def in_order(self, route: Route, answers: list[Message]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn into the order of the request."""


class Drawn(NamedTuple):
    """The edges drawn for some nodes.

    Attributes:
        counts: The number of edges drawn for each node, int64.
        senders: The senders of these edges, node after node, by their ids in the whole graph.
        kinds: The number of each edge's type; None if the graph has no types.
        edge_ids: The edges' ids in their types; None if no type has edge arrays.
    """

    counts: Tensor
    senders: Tensor
    kinds: Tensor | None
    edge_ids: Tensor | None


class Names(NamedTuple):
    """The nodes of growing batches by name: with trees, a node that several trees reach has a name in each.

    Attributes:
        bits: The lowest bits of a name are the node's id, and those above them say which tree of its batch.
        first: The number of each batch's first tree among those of all batches; without trees its own number.
    """

    bits: int
    first: list[int]

    @classmethod
    def of_nodes(cls, num_batches: int) -> Names:
        """Names that are ids."""
        return cls(_ALL_BITS, list(range(num_batches)))

    def nodes(self, names: Tensor) -> Tensor:
        return names & ((1 << self.bits) - 1)

    def groups(self, frontiers: Sequence[Tensor]) -> Tensor:
        """The batch, or the tree among those of all batches, that each name is of."""
        return torch.cat([(of >> self.bits) + first for of, first in zip(frontiers, self.first, strict=False)])

    def of_senders(self, drawn: Drawn, frontier: Tensor) -> Tensor:
        """The names of what was drawn for a frontier: it stays in the trees of its receivers."""
        trees = (frontier >> self.bits) << self.bits
        if self.bits == _ALL_BITS:
            return drawn.senders
        return drawn.senders.to(torch.int64) | trees.repeat_interleave(drawn.counts)


def draw_hops(
    graph: OwnedGraph,
    batches: Sequence[GrowingBatch],
    names: Names,
    fanouts: Array,
    keys: Sequence[BatchKey],
    how: DrawRule,
) -> Steps[list[Sample]]:
    """Let batches grow by all hops, one turn each, and return them.

    Args:
        graph: The graph; where trees see times, its :func:`prepare_times` has run.
        batches: The batches, which have their seeds.
        names: What their nodes are called.
        fanouts: Neighbours to draw per hop and edge type, int64, shape (hops, types); -1 takes all.
        keys: The key of each batch.
        how: How they are drawn.
    """
    of_batches = [typed_keys(*key, *fanouts.shape).view(np.int64) for key in keys]
    words = torch.from_numpy(np.stack(of_batches))
    for hop, of_hop in enumerate(torch.from_numpy(fanouts)):
        frontiers = [batch.frontier for batch in batches]
        nodes, groups = names.nodes(torch.cat(frontiers)), names.groups(frontiers)
        drawn = yield from draw(graph, nodes, groups, words[:, hop].contiguous(), of_hop, how)
        for batch, frontier, own in zip(batches, frontiers, _divided(drawn, list(map(len, frontiers))), strict=True):
            batch.join(names.of_senders(own, frontier), own.counts, own.edge_ids, own.kinds)
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
    route, questions = graph.to_owners(nodes, groups)
    (answers,) = yield [Question(DRAW, [_question(question, keys, fanouts, how) for question in questions])]
    counts, senders, join = graph.in_order(route, answers)
    rest, kinds = [answer[2:] for answer in answers], [torch.zeros(1, dtype=torch.uint8)] * len(answers)
    if len(fanouts) > 1:
        kinds = [more.pop(0) for more in rest]
    edge_ids = None
    if graph.has_edge_arrays:
        firsts = [of_rank[kind.to(torch.int64)] for of_rank, kind in zip(graph.types.edges.T, kinds, strict=False)]
        edge_ids = join([of[0].to(torch.int64) + first for of, first in zip(rest, firsts, strict=True)])
    if not have_names(graph.types):
        return Drawn(counts, senders, None, edge_ids)
    return Drawn(counts, senders, join(kinds) if len(fanouts) > 1 else kinds[0].expand(len(senders)), edge_ids)


def whole_rows(graph: ShardedGraph, nodes: Tensor) -> Drawn:
    """Return all edges of some nodes, in their order."""
    fanouts = torch.full((len(graph.types.edge_types),), -1)
    return graph.answered(
        draw(graph, nodes, torch.zeros_like(nodes), torch.zeros_like(fanouts)[None], fanouts, DrawRule())
    )


def _question(rows_and_groups: Message, keys: Tensor, fanouts: Tensor, how: DrawRule) -> Message:
    """The question for neighbours of some rows of a shard."""
    rows, groups = rows_and_groups
    seen = how.seen or Seen("", False, keys.new_empty(4, 0))
    counts = torch.bincount(groups, minlength=seen.trees.shape[1] if how.seen else len(keys))
    flags = torch.tensor([how.replace, seen.latest])
    return [rows, counts, keys, fanouts, flags, letters_of(how.weight), seen.trees, letters_of(seen.time)]


def _divided(drawn: Drawn, sizes: list[int]) -> list[Drawn]:
    """Return what was drawn for each batch, given how many nodes it asked for."""
    counts, *columns = drawn
    parts = counts.split(sizes)
    lengths = [int(some.sum()) for some in parts]
    split = [[None] * len(sizes) if column is None else column.split(lengths) for column in columns]
    return [Drawn(*found) for found in zip(parts, *split, strict=True)]


class GrowingBatch:
    """A batch that grows by one hop at a time.

    Args:
        seeds: Its first nodes, by their ids in the whole graph.
        num_nodes: The number of nodes of the whole graph.
    """

    def __init__(self, seeds: Tensor, num_nodes: int) -> None:
        self._hops, self._num_nodes = [check_seeds(seeds, num_nodes)], num_nodes
        # Of each hop the edges of each node of the frontier, and of each edge its sender, id, weight and type.
        self._edges: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]] = []

    @property
    def frontier(self) -> Tensor:
        """The nodes that were found last."""
        return self._hops[-1]

    def open(self, senders: Tensor, num_edges: int) -> tuple[Array, Work, Table]:
        """Return the batch's nodes, and what a kernel writes the next hop into, with room for so many edges."""
        known = torch.cat(self._hops)
        scratch = scratch_of_thread(senders.numpy().dtype)
        scratch.reserve(len(known) + num_edges)
        return known.numpy(), scratch.work, scratch.open_table(self._num_nodes, 1)

    def checked(self, found: int) -> int:
        """Refuse seeds of which a kernel has said that one is there twice; return what it has said otherwise."""
        if found == REPEATED_SEED:
            refuse_repeated(self._hops[0])
        return found

    def join(self, senders: Tensor, counts: Tensor, edge_ids: Tensor | None, kinds: Tensor | None = None) -> None:
        """Add a hop: the senders that were drawn for the frontier, and what :meth:`add` is told of them."""
        known, work, table = self.open(senders, len(senders))
        found = self.checked(join_hop(known, senders.numpy(), work, table))
        self.add(found, work, counts, edge_ids, kinds=kinds)

    def add(
        self,
        found: int,
        work: Work,
        counts: Tensor,
        edge_ids: Tensor | None,
        weights: Tensor | None = None,
        kinds: Tensor | None = None,
    ) -> None:
        """Add the hop that a kernel has written.

        Args:
            found: How many nodes there are now.
            work: What it has written into.
            counts: The edges of each node of the frontier.
            edge_ids: The edges' ids in the whole graph, if anybody needs them.
            weights: The edges' weights, if the sampler gives them some.
            kinds: The edges' types, if the graph has types.
        """
        known = sum(map(len, self._hops))
        self._hops.append(torch.from_numpy(work.nodes[known:found].astype(np.int64)))
        columns = torch.from_numpy(work.columns[: int(counts.sum())].astype(np.int32))
        self._edges.append((counts, columns, edge_ids, weights, kinds))

    def sample(self) -> Sample:
        counts, columns, *more = zip(*self._edges, strict=True)
        edge_ids, weights, kinds = (None if of_hops[0] is None else torch.cat(of_hops) for of_hops in more)
        return Sample(
            nodes=torch.cat(self._hops),
            indptr=starts_of(torch.cat(counts)).to(torch.int32),
            indices=torch.cat(columns),
            num_sampled_nodes=list(map(len, self._hops)),
            num_sampled_edges=list(map(len, columns)),
            edge_ids=edge_ids,
            edge_weight=weights,
            edge_kinds=kinds,
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
