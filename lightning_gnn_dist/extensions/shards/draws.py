"""Draws by the ranks that own the rows, and the hops of a bulk that are made of them.

frontier -> its owners draw neighbours of each edge type -> senders -> the nodes among them that are new -> ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.kernels import BLOCK, REPEATED_SEED, ZERO, Array, Table, Work, place, slot_of
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample, refuse_repeated, scratch_of_thread
from lightning_gnn_dist.extensions.shards.owner import DRAW, Join, Message, OwnedTypes, Question, Route, letters_of
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, seen_by
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.turns import Steps

_U = np.uint64

_ALL_BITS = 62  # of a name, where it is an id


class DrawRule(NamedTuple):
    """How neighbours are drawn.

    Attributes:
        replace: Whether an edge may be drawn more than once.
        weight: The name of the edge array that says how likely an edge is. With None all are equally likely.
        weighs: Whether the weights of the edges are wanted, too.
        time: Where trees of batches by time are drawn, the name of the times of edges, or of the nodes that send.
        latest: Whether they take the latest edges, instead of any.
        trees: For each tree the number of its batch, the id of its seed, after which time it sees events, and up to
            which, as integers, int64, shape (4, trees). Without times there are none.
    """

    replace: bool = False
    weight: str | None = None
    weighs: bool = False
    time: str = ""
    latest: bool = False
    trees: Tensor = torch.empty(4, 0, dtype=torch.int64)  # never changed


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
    if have_names(graph.types):
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
    after, upto = map(torch.from_numpy, seen_by(sampler, torch.cat(list(times))))
    trees = torch.stack([torch.arange(len(seeds)).repeat_interleave(of_seeds), torch.cat(list(seeds)), after, upto])
    how = DrawRule(time=sampler.time, latest=sampler.pick == "latest", trees=trees)
    samples = yield from draw_hops(graph, growing, sampler.of_types(graph.types), keys, how)
    return [of._replace(extra={**of.extra, SEED_TIME: at}) for of, at in zip(samples, times, strict=True)]


def whole_rows(graph: OwnedGraph, nodes: Tensor, weight: str | None = None) -> Steps[Drawn]:
    """Return all edges of some nodes, in their order, and their weights of a name."""
    fanouts = torch.full((len(graph.types.edge_types),), -1)
    how = DrawRule(weight=weight, weighs=weight is not None)
    return (yield from draw(graph, nodes, torch.zeros_like(nodes), torch.zeros_like(fanouts)[None], fanouts, how))


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
