"""Tables of edges that batches ask for, those of the graph and held ones, and where the graph of them lives.

seeds -> their edges, false receivers and what they carry -> targets: edges first, then the false ones of each

A model that is asked whether an edge exists must not receive messages along it, in either direction. Both ends of every
target are seeds, so the edges to remove are in the rows of seeds. A graph that this process has answers at once, and
shards ask their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.rng import draw_bits, key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, sample_at
from lightning_gnn_dist.extensions.temporal.times import as_integers, time_order
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.turns import Steps, at_once

# They take the place of the hop in a key, so that these draws and those of a sampler never share one.
FALSE_ENDS, DIRECTION = -1, -2


class TargetType(NamedTuple):
    """The edge type of the targets.

    Attributes:
        number: Its place among the edge types.
        reverse: The place of the edge type that has the same links turned round, if there is one.
    """

    number: int = 0
    reverse: int | None = None

    def shows(self, graph: Graph, sample: Sample) -> Tensor:
        """Which edges of a sample could give a target away: a bool for each."""
        kinds = kinds_of(graph, sample)
        is_shown = kinds == self.number
        return is_shown if self.reverse is None else is_shown | (kinds == self.reverse)

    @property
    def numbers(self) -> list[int]:
        """The places of both edge types."""
        return [self.number] if self.reverse is None else [self.number, self.reverse]


ONE_TYPE = TargetType()  # of a graph that has one


def positions_of_links(
    graph: Graph,
    owner: Tensor,
    undirected: bool,
    target_type: TargetType = ONE_TYPE,
    *,
    loops: bool = False,
    across: bool = False,
) -> Tensor:
    """The positions in ``indices`` of the edges whose two ends have the same owner.

    Args:
        graph: The graph that has the edges.
        owner: A number for every node; nodes with a negative one have no owner.
        undirected: Whether the graph has every edge in both directions; then only one of them is returned.
        target_type: The type whose edges are returned.
        loops: Whether self-loops are returned, too.
        across: Whether edges are returned whose receiver alone has an owner, or another one than the sender.
    """

    def is_chosen(sender: Tensor, receiver: Tensor) -> Tensor:
        is_inside = ((owner[sender] == owner[receiver]) | across) & (owner[receiver] >= 0)
        return is_inside & are_links(sender, receiver, undirected, loops=loops)

    return positions_where(graph, is_chosen, target_type)


def are_links(sender: Tensor, receiver: Tensor, undirected: bool, *, loops: bool) -> Tensor:
    """Which edges are asked for, by their ends: one direction of each, where there are both."""
    return (sender < receiver if undirected else sender != receiver) | ((sender == receiver) & loops)


def positions_where(
    graph: Graph, is_chosen: Callable[[Tensor, Tensor], Tensor], target_type: TargetType = ONE_TYPE
) -> Tensor:
    """The positions in ``indices`` of edges that are chosen by their senders and receivers, a bool for each."""
    found = [torch.empty(0, dtype=torch.int64)]
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        positions = torch.arange(start, min(start + EDGES_AT_ONCE, graph.num_edges))
        if len(graph.types.edge_types) > 1:
            positions = positions[graph.types.edge_type[positions] == target_type.number]
        found.append(positions[is_chosen(*edges_at(graph, positions))])
    return torch.cat(found)


def edges_at(graph: Graph, positions: Tensor) -> Tensor:
    """Senders and receivers of the edges at these positions, shape ``(2, n)``."""
    receivers = torch.searchsorted(graph.indptr, positions, right=True) - 1
    return torch.stack([graph.indices[positions].to(torch.int64), receivers])


def directed(edges: Tensor, ids: Tensor, batch_key: BatchKey, undirected: bool) -> Tensor:
    """The edges, shape ``(2, n)``; if ``undirected``, each has its ends swapped at random."""
    if not undirected:
        return edges
    return torch.where(draw_bits(key(*batch_key, DIRECTION), ids), edges.flip(0), edges)


def kinds_of(graph: Graph, sample: Sample) -> Tensor:
    """The type of each edge of a sample."""
    if len(graph.types.edge_types) == 1:
        return torch.zeros_like(sample.indices)
    if sample.edge_kinds is not None:
        return sample.edge_kinds
    assert sample.edge_ids is not None
    return graph.types.edge_type[sample.edge_ids]


def without_targets(graph: Graph, sample: Sample, ends: Tensor, target_type: TargetType = ONE_TYPE) -> Sample:
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
    return without(sample, dropped & target_type.shows(graph, sample))


def without(sample: Sample, dropped: Tensor) -> Sample:
    """The sample without the edges that the mask ``dropped`` marks; all nodes stay."""
    kept = ~dropped
    upto = torch.nn.functional.pad(kept.cumsum(0), (1, 0))  # edges kept before each edge
    hops = upto[torch.tensor([0, *accumulate(sample.num_sampled_edges)], device=upto.device)].diff()
    left = kept.nonzero().view(-1)
    return sample._replace(
        indptr=upto[sample.indptr.to(torch.int64)].to(sample.indptr.dtype),
        indices=sample.indices[left],
        num_sampled_edges=hops.tolist(),
        edge_ids=None if sample.edge_ids is None else sample.edge_ids[left],
        edge_weight=None if sample.edge_weight is None else sample.edge_weight[left],
        edge_kinds=None if sample.edge_kinds is None else sample.edge_kinds[left],
        is_constant=False,
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
        times: If edges of other times are not avoided, the name of the times, and that of each edge, as an integer that
            compares as times do.
    """

    ends: Sequence[Tensor]
    ids: Sequence[Tensor]
    keys: Sequence[BatchKey]
    draws: int
    candidates: Candidates
    edge_type: int | None = None
    times: tuple[str, Sequence[Tensor]] | None = None


class Home(Protocol):
    """What targets ask of the graph that they are edges of."""

    @property
    def rows(self) -> Graph:
        """The graph, or the shard of it, whose edges are learned."""
        ...

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph."""
        ...

    def ids_of_own(self, rows: Tensor) -> Tensor:
        """The ids in the whole graph of some nodes of ``rows``."""
        ...

    def draw(self, sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        """A sample around the seeds of each batch."""
        ...

    def draw_at(
        self, sampler: TemporalSampler, seeds: Sequence[Tensor], times: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        """The same at times that the seeds have here; a node may be a seed at several."""
        ...

    def false_ends(self, wanted: FalseEnds) -> Steps[list[Tensor]]:
        """The false receivers of each batch's edges, shape (n, draws)."""
        ...

    def times_of_edges(self, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        """The times of some edges of a type, by the ids that samples give them."""
        ...


@dataclass(frozen=True)
class WholeGraph:
    """A graph that this process has.

    Args:
        graph: What is sampled.
        rows: The same in RAM, to look up edges and draw false receivers, if the sampled graph is a copy on a device.
    """

    graph: Graph
    rows: Graph

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    def ids_of_own(self, rows: Tensor) -> Tensor:
        return rows

    def draw(self, sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return at_once(sampler.sample_bulk(self.graph, seeds, keys))

    def draw_at(
        self, sampler: TemporalSampler, seeds: Sequence[Tensor], times: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        return at_once([sample_at(sampler, self.graph, *of) for of in zip(seeds, times, keys, strict=True)])

    def false_ends(self, wanted: FalseEnds) -> Steps[list[Tensor]]:
        return at_once([self._drawn(wanted, batch) for batch in range(len(wanted.keys))])

    def times_of_edges(self, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        times = list(self.rows.types.edge_arrays.values())[number][name]
        return at_once(times[places_of(self.rows, number, ids)])

    def _drawn(self, wanted: FalseEnds, batch: int) -> Tensor:
        """The false receivers of the edges of a batch."""
        at = None
        if wanted.times is not None:
            name, times = wanted.times
            at = Moments(time_order(self.rows, name), times[batch])
        asked = wanted.ends[batch], wanted.ids[batch], wanted.draws, key(*wanted.keys[batch], FALSE_ENDS)
        return draw_receivers(self.rows, *asked, wanted.candidates, wanted.edge_type, at)[0]


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
        nodes, places = self.pairs.unique(return_inverse=True)
        return nodes, places

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
        self, home: Home, seeds: Sequence[Tensor], keys: Sequence[BatchKey], kind: TargetType = ONE_TYPE
    ) -> Steps[list[Targets]]:
        """What each batch asks for.

        Args:
            home: The graph that has the edges.
            seeds: The seeds of each batch.
            keys: The key of each batch.
            kind: The type of the edges.
        """
        places, number = [ids - self.first for ids in seeds], kind.number
        edges = [self._ends(home, *of) for of in zip(seeds, places, keys, strict=True)]
        carried = [self._carried_at(home.rows, at, number) for at in places]
        wanted = FalseEnds([ends[:1] for ends in edges], seeds, keys, self.num_negatives, self.candidates, number)
        if self.time is not None:
            times = [as_integers(rows[name_of_targets(self.time)]) for rows in carried]
            wanted = wanted._replace(ends=edges, times=(self.time, times))
        false = yield from home.false_ends(wanted)
        return [Targets.of(*of) for of in zip(edges, false, carried, strict=True)]

    def _ends(self, home: Home, ids: Tensor, places: Tensor, batch_key: BatchKey) -> Tensor:
        senders, receivers = edges_at(home.rows, places)
        return directed(torch.stack([senders, home.ids_of_own(receivers)]), ids, batch_key, self.undirected)

    def _carried_at(self, graph: Graph, places: Tensor, number: int) -> dict[str, Tensor]:
        return rows_at(self.carried, places_of(graph, number, places)) if self.carried else {}


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
