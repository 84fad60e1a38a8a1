"""Draws by the ranks that own the rows, and the hops of a bulk that are made of them.

frontier -> its owners draw neighbours of each edge type -> senders -> the nodes among them that are new -> ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample
from lightning_gnn_dist.extensions.shards.owner import DRAW, Join, Message, OwnedTypes, Question, Route, letters_of
from lightning_gnn_dist.extensions.temporal.row_draws import Drawn, GrowingBatch
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, seen_by
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.turns import Steps


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
