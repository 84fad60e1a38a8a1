"""Where the graph of some targets lives: a graph that this process has answers at once, and shards ask their owners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.order import time_order
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.links import FALSE_ENDS
from lightning_gnn_dist.sampling.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler, sample_at
from lightning_gnn_dist.sampling.turns import Steps, at_once


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
