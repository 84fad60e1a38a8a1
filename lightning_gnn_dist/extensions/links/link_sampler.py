"""Batches of edges: some edges, negatives or labels for each, and the neighbourhoods of all ends.

seeds -> targets -> their ends -> neighbourhoods without the targets, or what each end had seen before

By time, each end of a target is the root of a tree, at the time of the target. The same node at the same time is one
root, however many targets it is an end of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample
from lightning_gnn_dist.extensions.asking.turns import Steps, answered, at_once
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, sample_at
from lightning_gnn_dist.extensions.temporal.times import time_order
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.sampling.base import Sampler

# They take the place of the hop in a key, so that these draws and those of a sampler never share one.
FALSE_ENDS, DIRECTION = -1, -2
Kinds = tuple[int, ...]  # the number of the edge type of targets, and that of its reverse, if there is one
_OF_EDGES = "indices", "edge_ids", "edge_weight", "edge_kinds"  # arrays of a sample with a row for each edge


def positions_of_links(
    graph: Graph,
    owner: Tensor,
    undirected: bool,
    kind: int = 0,
    *,
    loops: bool = False,
    across: bool = False,
) -> Tensor:
    """The positions in ``indices`` of the edges whose two ends have the same owner.

    Args:
        graph: The graph that has the edges.
        owner: A number for every node; nodes with a negative one have no owner.
        undirected: Whether the graph has every edge in both directions; then only one of them is returned.
        kind: The number of the type whose edges are returned.
        loops: Whether self-loops are returned, too.
        across: Whether edges are returned whose receiver alone has an owner, or another one than the sender.
    """

    def is_chosen(sender: Tensor, receiver: Tensor) -> Tensor:
        is_inside = ((owner[sender] == owner[receiver]) | across) & (owner[receiver] >= 0)
        return is_inside & are_links(sender, receiver, undirected, loops=loops)

    return positions_where(graph, is_chosen, kind)


def are_links(sender: Tensor, receiver: Tensor, undirected: bool, *, loops: bool) -> Tensor:
    """Which edges are asked for, by their ends: one direction of each, where there are both."""
    return (sender < receiver if undirected else sender != receiver) | ((sender == receiver) & loops)


def positions_where(graph: Graph, is_chosen: Callable[[Tensor, Tensor], Tensor], kind: int = 0) -> Tensor:
    """The positions in ``indices`` of edges that are chosen by their senders and receivers, a bool for each."""
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        positions = torch.arange(start, min(start + EDGES_AT_ONCE, graph.num_edges))
        if len(graph.types.edge_types) > 1:
            positions = positions[graph.types.edge_type[positions] == kind]
        found.append(positions[is_chosen(*edges_at(graph, positions))])
    return torch.cat(found)


def edges_at(graph: Graph, positions: Tensor) -> Tensor:
    """Senders and receivers of the edges at these positions, shape ``(2, n)``."""
    receivers = torch.searchsorted(graph.indptr, positions, right=True) - 1
    return torch.stack([graph.indices[positions].to(torch.int64), receivers])


def kinds_of(graph: Graph, sample: Sample) -> Tensor:
    """The type of each edge of a sample."""
    if len(graph.types.edge_types) == 1:
        return torch.zeros_like(sample.indices)
    if sample.edge_kinds is not None:
        return sample.edge_kinds
    assert sample.edge_ids is not None
    return graph.types.edge_type[sample.edge_ids]


def could_show(graph: Graph, sample: Sample, kinds: Kinds) -> Tensor:
    """Which edges of a sample could give a target away: a bool for each."""
    of_edges = kinds_of(graph, sample)
    return (of_edges == kinds[0]) | (of_edges == kinds[-1])


def without_targets(graph: Graph, sample: Sample, ends: Tensor, kinds: Kinds = (0,)) -> Sample:
    """The sample without the edges between these pairs of seeds, in either direction. ``ends`` are positions in it.

    Of a graph with types, edges of other types between them stay.
    """
    num_seeds, num_edges = sample.num_sampled_nodes[0], sample.num_sampled_edges[0]
    rows = torch.arange(num_seeds, device=ends.device)
    rows = rows.repeat_interleave(sample.indptr[: num_seeds + 1].diff(), output_size=num_edges)
    columns = sample.indices[:num_edges].to(torch.int64)
    number = torch.cat([ends[0] * num_seeds + ends[1], ends[1] * num_seeds + ends[0]])
    dropped = torch.zeros_like(sample.indices, dtype=torch.bool)
    dropped[:num_edges] = (columns < num_seeds) & torch.isin(rows * num_seeds + columns, number)
    return without(sample, dropped & could_show(graph, sample, kinds))


def without(sample: Sample, dropped: Tensor) -> Sample:
    """The sample without the edges that the mask ``dropped`` marks; all nodes stay."""
    kept = ~dropped
    upto = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # edges kept before each edge
    hops = upto[torch.tensor([0, *accumulate(sample.num_sampled_edges)], device=upto.device)].diff()
    left = kept.nonzero().view(-1)
    return sample._replace(
        indptr=upto[sample.indptr.to(torch.int64)].to(sample.indptr.dtype),
        num_sampled_edges=hops.tolist(),
        is_constant=False,
        **{name: array[left] for name in _OF_EDGES if (array := getattr(sample, name)) is not None},
    )


class FalseEnds(NamedTuple):
    """Which false receivers some edges need, of one batch after the other.

    Attributes:
        ends: The sender of each edge, and what other nodes it may not be, int64, shape (k, n).
        ids: A number for each edge, so that their draws differ.
        keys: The key of each batch.
        draws: Draws for each edge.
        candidates: The nodes to draw from.
        edge_type: Of a typed graph, the number of the edge type whose edges to avoid.
        times: If edges of other times are not avoided, the name of the times, and that of each edge.
    """

    ends: Sequence[Tensor]
    ids: Sequence[Tensor]
    keys: Sequence[BatchKey]
    draws: int
    candidates: Candidates
    edge_type: int | None = None
    times: tuple[str, Sequence[Tensor]] | None = None


class Home(NamedTuple):
    """What targets ask of the graph that they are edges of.

    Attributes:
        rows: The graph in RAM, or the shard of it, whose edges are learned.
        num_nodes: The number of nodes of the whole graph.
        ids_of_own: Returns the ids in the whole graph of some nodes of ``rows``.
        draw: Returns a sample around the seeds of each batch, of a sampler, seeds and keys.
        draw_at: The same at times that the seeds have here; a node may be a seed at several.
        false_ends: Returns the false receivers of each batch's edges, shape (n, draws).
        times_of_edges: Returns the times of some edges, of the number of their type, a name, and ids as samples have.
    """

    rows: Graph
    num_nodes: int
    ids_of_own: Callable[[Tensor], Tensor]
    draw: Callable[[Sampler, Sequence[Tensor], Sequence[BatchKey]], Steps[list[Sample]]]
    draw_at: Callable[[TemporalSampler, Sequence[Tensor], Sequence[Tensor], Sequence[BatchKey]], Steps[list[Sample]]]
    false_ends: Callable[[FalseEnds], Steps[list[Tensor]]]
    times_of_edges: Callable[[int, str, Tensor], Steps[Tensor]]


def home_of(graph: Graph, rows: Graph) -> Home:
    """A graph that this process has: what is sampled, and the same in RAM, if that is a copy on a device."""

    def draw_at(sampler: TemporalSampler, *of_batches: Sequence[Any]) -> Steps[list[Sample]]:
        return at_once([sample_at(sampler, graph, *of) for of in zip(*of_batches, strict=True)])

    def false_ends(wanted: FalseEnds) -> Steps[list[Tensor]]:
        found = []
        for batch, (ends, ids) in enumerate(zip(wanted.ends, wanted.ids, strict=True)):
            word, at = key(*wanted.keys[batch], FALSE_ENDS), None
            if wanted.times is not None:
                at = Moments(time_order(rows, wanted.times[0]), wanted.times[1][batch])
            how = wanted.draws, word, wanted.candidates, wanted.edge_type, at
            found.append(draw_receivers(rows, ends, ids, *how)[0])
        return at_once(found)

    def times_of_edges(number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        return at_once(list(rows.types.edge_arrays.values())[number][name][places_of(rows, number, ids)])

    def draw(sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return at_once(sampler.sample_bulk(graph, seeds, keys))

    return Home(rows, graph.num_nodes, lambda ids: ids, draw, draw_at, false_ends, times_of_edges)


LABEL, ENDS = "edge_label", "edge_label_index"  # as PyG's LinkNeighborLoader calls them


class Targets(NamedTuple):
    """What a batch asks for.

    Attributes:
        pairs: The ends of all targets, the edges first, shape (2, m).
        num_edges: How many are edges.
        said: What the batch says of them, ``edge_label`` among it: a row for each target.
    """

    pairs: Tensor
    num_edges: int
    said: dict[str, Tensor]

    @classmethod
    def of(cls, edges: Tensor, negatives: Tensor, carried: Mapping[str, Tensor]) -> Targets:
        """Some edges, shape (2, n), their false receivers, shape (n, K), and what edges carry, which these share.

        Edges that carry no label have ones, and false ones zeros.
        """
        num_edges, count = negatives.shape
        false = torch.stack([edges[0].repeat_interleave(count), negatives.reshape(-1)])
        said = {name: torch.cat([rows, rows.repeat_interleave(count, 0)]) for name, rows in carried.items()}
        if LABEL not in said:
            said[LABEL] = torch.zeros(num_edges * (1 + count), device=edges.device)
            said[LABEL][:num_edges] = 1.0
        return cls(torch.cat([edges, false], 1), num_edges, said)

    def seeds(self) -> tuple[Tensor, Tensor]:
        """The distinct ends, sorted, an order that every sampler keeps, and where the ends of targets are in them."""
        found: tuple[Tensor, Tensor] = self.pairs.unique(return_inverse=True)
        return found

    def in_batch(self, ends: Tensor) -> dict[str, Tensor]:
        """The arrays of a batch in which these are the places of all ends, shape (2, m)."""
        return {ENDS: ends} | {name: rows.to(ends.device) for name, rows in self.said.items()}


@dataclass(frozen=True, eq=False)
class OwnLinks:
    """Edges of the graph. A seed is the position of one in ``graph.indices``.

    Args:
        num_negatives: False receivers for each edge: nodes to which the sender has no edge, or none at that time.
        candidates: The nodes that these are drawn from.
        undirected: Draw at random which direction of each edge is the target.
        carried: What batches say of them: a row for each edge of the target type.
        first: The seed that stands for the edge at position 0 of a shard.
        time: The name of the times of edges, if false receivers are those to which there is no edge at that time.
    """

    num_negatives: int
    candidates: Candidates
    undirected: bool
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    first: int = 0
    time: str | None = None

    def targets(
        self, home: Home, seeds: Sequence[Tensor], keys: Sequence[BatchKey], number: int = 0
    ) -> Steps[list[Targets]]:
        """What each batch asks for.

        Args:
            home: The graph that has the edges.
            seeds: The seeds of each batch.
            keys: The key of each batch.
            number: That of the type of the edges.
        """
        places = [ids - self.first for ids in seeds]
        edges = [self._ends(home, *of) for of in zip(seeds, places, keys, strict=True)]
        carried = [rows_at(self.carried, places_of(home.rows, number, at)) if self.carried else {} for at in places]
        times = None
        if self.time is not None:
            times = self.time, [rows[name_of_targets(self.time)].long() for rows in carried]
        wanted = FalseEnds(edges, seeds, keys, self.num_negatives, self.candidates, number, times)
        false = yield from home.false_ends(wanted)
        return [Targets.of(*of) for of in zip(edges, false, carried, strict=True)]

    def _ends(self, home: Home, ids: Tensor, places: Tensor, batch_key: BatchKey) -> Tensor:
        senders, receivers = edges_at(home.rows, places)
        edges = torch.stack([senders, home.ids_of_own(receivers)])
        if not self.undirected:
            return edges
        return torch.where(draw_bits(key(*batch_key, DIRECTION), ids), edges.flip(0), edges)


@dataclass(frozen=True, eq=False)
class HeldLinks:
    """Edges that were held out, and their fixed false receivers. A seed is the column of one.

    Args:
        edges: Their ends, shape ``(2, n)``.
        negatives: The false receivers of each, shape ``(n, K)``.
        nodes: The ids in the graph of the nodes that count as 0 among senders, and among receivers.
        carried: What batches say of them: a row for each.
        first: The seed that stands for column 0, of a rank's share of all held edges.
    """

    edges: Tensor
    negatives: Tensor
    nodes: tuple[int, int] = (0, 0)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    first: int = 0

    def targets(self, home: Home, seeds: Sequence[Tensor], *_: object) -> Steps[list[Targets]]:
        """What each batch asks for, whatever its key."""
        return at_once([self.targets_of(ids) for ids in seeds])

    def targets_of(self, ids: Tensor) -> Targets:
        """What a batch of some edges asks for."""
        at, (sender, receiver) = ids - self.first, self.nodes
        edges = self.edges[:, at].to(torch.int64) + torch.tensor([[sender], [receiver]], device=self.edges.device)
        return Targets.of(edges, self.negatives[at].to(torch.int64) + receiver, rows_at(self.carried, at))


def rows_at(arrays: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Some rows of each array."""
    return {name: array[rows] for name, array in arrays.items()}


def name_of_targets(array: str) -> str:
    """What batches call the rows of an edge array for the edges that they ask for."""
    return f"{LABEL}_{array.removeprefix('edge_')}"


Found = list[tuple[Sample, Tensor]]  # for each batch a sample, and the places of the ends of its targets, shape (2, m)


class Roots(NamedTuple):
    """The ends of targets at their times.

    Attributes:
        nodes: The nodes of all roots, in order.
        times: Their times.
        ends: For each target the roots that its ends are, shape (2, m).
    """

    nodes: Tensor
    times: Tensor
    ends: Tensor

    @classmethod
    def of(cls, pairs: Tensor, times: Tensor) -> Roots:
        """The roots of targets, given by their ends, shape (2, m), and their times."""
        nodes, of_node = pairs.unique(return_inverse=True)
        at, of_time = times.unique(return_inverse=True)
        count = max(1, at.numel())
        numbers, ends = (of_node * count + of_time).unique(return_inverse=True)
        return cls(nodes[numbers // count], at[numbers % count], ends)


def trees_around(
    home: Home,
    sampler: TemporalSampler,
    targets: Sequence[Targets],
    keys: Sequence[BatchKey],
    kinds: Kinds,
) -> Steps[Found]:
    """The trees of the ends of each batch's targets, and the places of these roots.

    Where trees see events of their own time, they do not see those between the ends of a target of theirs.
    """
    time = sampler.time
    roots = [Roots.of(of.pairs, of.said[name_of_targets(time)]) for of in targets]
    samples = yield from home.draw_at(sampler, [of.nodes for of in roots], [of.times for of in roots], keys)
    if sampler.equal and samples:
        between = [_between_ends(home, *of, kinds) for of in zip(samples, roots, targets, strict=True)]
        samples = yield from _without_now(home, time, samples, between, kinds)
    return [(sample, of.ends) for sample, of in zip(samples, roots, strict=True)]


def _between_ends(home: Home, sample: Sample, roots: Roots, asked: Targets, kinds: Kinds) -> Tensor:
    """The places of a sample's edges between the ends of a target, in a tree of that target."""
    row = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff().to(torch.int64))
    sent = torch.stack([sample.nodes[sample.indices], sample.nodes[row]])
    numbers = [of.amin(0) * home.num_nodes + of.amax(0) for of in (sent, asked.pairs.repeat(1, 2))]
    known, place = torch.cat(numbers).unique(return_inverse=True)
    of_edges, of_targets = place.split([len(of) for of in numbers])
    tree, count = sample.extra["batch"][row], known.numel()
    is_between = torch.isin(tree * count + of_edges, roots.ends.view(-1) * count + of_targets)
    return (is_between & could_show(home.rows, sample, kinds)).nonzero().view(-1)


def _without_now(
    home: Home, time: str, samples: Sequence[Sample], places: Sequence[Tensor], kinds: Kinds
) -> Steps[list[Sample]]:
    """The samples without those of some edges of each whose times are those of their trees."""
    some = list(zip(samples, places, strict=True))
    ids = torch.cat([sample.edge_ids[at].to(torch.int64) for sample, at in some if sample.edge_ids is not None])
    of_edges = torch.cat([kinds_of(home.rows, sample)[at] for sample, at in some])
    times = torch.empty_like(ids)
    for number in kinds:
        of_kind = yield from home.times_of_edges(number, time, ids[of_edges == number])
        times[of_edges == number] = of_kind
    left = []
    for (sample, at), when in zip(some, times.split(list(map(len, places))), strict=True):
        row = torch.searchsorted(sample.indptr, at.to(sample.indptr.dtype), right=True) - 1
        now = sample.extra[SEED_TIME][sample.extra["batch"][row]]
        dropped = torch.zeros(sample.indices.numel(), dtype=torch.bool)
        dropped[at] = when == now
        left.append(without(sample, dropped))
    return left


@dataclass(frozen=True, eq=False)
class LinkSampler:
    """Samples around edges. Its seeds are those of a table of edges.

    A batch's targets are its edges, then their negatives; ``edge_label_index`` holds the positions of both ends in the
    batch, ``edge_label`` ones and zeros, or the label of each edge. A :class:`TemporalSampler` draws a tree for each
    end at the time of the target; others draw one neighbourhood of all ends.

    Args:
        sampler: Draws the neighbourhoods of the ends.
        links: The edges: those of the graph, or held ones.
        kinds: The number of the edge type of the targets, and of the one that has them turned round, if there is one.
        rows: The graph in RAM to look up edges and draw negatives in, if the sampled graph is a copy on a device.
    """

    sampler: Sampler
    links: OwnLinks | HeldLinks
    kinds: Kinds = (0,)
    rows: Graph | None = None

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        home = home_of(graph, graph if self.rows is None else self.rows)
        return answered(self.sample_across(home, seeds, keys), list)

    def drawn_by(self, sampler: Sampler, rows: Graph) -> LinkSampler:
        """The same, around which another sampler draws, on a copy of ``rows``."""
        return replace(self, sampler=sampler, rows=rows)

    def sample_across(self, home: Home, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        """A sample for each batch, wherever the graph lives.

        Of shards that takes one turn for negatives, seldom two, one for each hop, and one for equal times.
        """
        targets = yield from self.links.targets(home, seeds, keys, self.kinds[0])
        if isinstance(self.sampler, TemporalSampler):
            found = yield from trees_around(home, self.sampler, targets, keys, self.kinds)
        else:
            found = yield from self._around(home, targets, keys)
        number = self.kinds[0] if home.rows.types.have_names else None
        return [
            sample._replace(extra={**sample.extra, **of.in_batch(ends)}, is_constant=False, target_type=number)
            for (sample, ends), of in zip(found, targets, strict=True)
        ]

    def _around(self, home: Home, targets: Sequence[Targets], keys: Sequence[BatchKey]) -> Steps[Found]:
        """The neighbourhoods of the ends, without the targets that are edges of the graph."""
        seeds = [of.seeds() for of in targets]
        samples = yield from home.draw(self.sampler, [nodes for nodes, _ in seeds], keys)
        found = []
        for sample, (_, places), of in zip(samples, seeds, targets, strict=True):
            ends = places.to(sample.nodes.device)
            if isinstance(self.links, OwnLinks):
                sample = without_targets(home.rows, sample, ends[:, : of.num_edges], self.kinds)
            found.append((sample, ends))
        return found
