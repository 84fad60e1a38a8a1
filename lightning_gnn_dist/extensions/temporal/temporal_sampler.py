"""Neighbour sampling by time: a seed sees what was there before its own time, at every hop.

    V(v, s) = edges e into v with t_s - last <= t_e < t_s,    N_h(s) = senders in sample(V(v, s), k_h), v in N_(h-1)(s)

The trees of two seeds of a batch share nothing, for what a node has received depends on who asks, and when. PyG's
``NeighborLoader`` calls this ``time_attr``, ``input_time`` and ``temporal_strategy``; there, events of the seed's own
time are seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    MAX_INTEGER,
    is_number,
    shown,
)
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.extensions.temporal.time_checks import (
    are_dates,
    check_units,
    check_units_of_shards,
    spans_of,
    tell,
)
from lightning_gnn_dist.extensions.temporal.times import sources_of
from lightning_gnn_dist.extensions.temporal.trees import View, check_span, checked_times, sample_by_time
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import TypeNames
from lightning_gnn_dist.rules import check_fields
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

Pick = Literal["uniform", "latest"]


@dataclass(frozen=True)
class TemporalSampler:
    """Draw up to ``num_neighbors[h]`` in-neighbours of every node at hop ``h``, of those before the time of the seed.

    Every hop sees what was there before the time of the **seed**. Each seed has a tree of its own, so a node may stand
    in a batch several times: ``batch.batch`` says for each node which seed's tree it is in, ``batch.seed_time`` has the
    time of each seed. What a tree draws depends on the batch's key, the seed and its time alone.

    Times are numbers of any unit, all integers or all floating point numbers. Edges of a type without times, whose
    senders have none either, are always seen.

    Args:
        num_neighbors: Neighbours to draw per node, as :class:`NeighborSampler` takes them; -1 takes all that are seen.
        time: Name of the array that says when an edge was there, or, where edges have none of that name, when the node
            that sends was.
        seed_time: Name of the node array that says at what time a node is a seed. Default: ``time``.
        equal: See events of the seed's own time, too. That shows a seed what happened with it or because of it, perhaps
            the answer; without it a seed does not see edges that came with it.
        pick: ``"uniform"`` draws any of the events that are seen, ``"latest"`` the latest; of those at one time, the
            last in their row. Nothing is left to chance in the latest, so evaluation sees as many of them as training.
        last: See events that are at most so long before the seed's time. Default: however long.
        replace: Draw with replacement: exactly so many edges for every node that sees any.
    """

    num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]]
    time: Annotated[str, "time"]
    seed_time: Annotated[str, "time"] | None = None
    equal: bool = False
    pick: Pick = "uniform"
    last: float | None = None
    replace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_neighbors", self._numbers.num_neighbors)
        check_fields(self)
        if self.last is not None and not (is_number(self.last) and 0 < self.last <= MAX_INTEGER):
            raise ValueError(
                "last must be a number above 0, in the unit of the times, such as 86_400 for a day of seconds, or None "
                f"for all, got {shown(self.last)}: of a tensor take int(...), of a timedelta its total_seconds()."
            )
        if self.replace and self.pick == "latest":
            raise ValueError('pick="latest" takes each event once: leave replace out, or draw with pick="uniform".')

    @property
    def _numbers(self) -> NeighborSampler:
        """What it has in common with the sampler of a graph without times."""
        return NeighborSampler(self.num_neighbors, replace=self.replace)

    @property
    def num_hops(self) -> int:
        return self._numbers.num_hops

    @property
    def sight(self) -> tuple[str, str, bool, float | None]:
        """What decides which events a seed must not see: the names of both times, ``equal`` and ``last``."""
        return self.time, self.time if self.seed_time is None else self.seed_time, self.equal, self.last

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk = check_bulk(graph, seeds, keys)
        if not bulk:
            return []
        fanouts, view = self.of_types(graph.types), self.view
        for ids, _ in bulk:
            refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
        timed = [(ids, checked_times(graph, ids, view), batch_key) for ids, batch_key in bulk]
        return [sample_by_time(graph, ids, times, fanouts, batch_key, view) for ids, times, batch_key in timed]

    def of_evaluation(self) -> TemporalSampler:
        """Return what evaluates a model: the latest are drawn without chance, so what was learned from them holds."""
        return self if self.pick == "latest" else self.of_all()

    def check_data(self, graph: Graph) -> None:
        """Refuse a graph without such times, or with times that do not fit together."""
        self.check_graph(graph)
        tell(graph, self.time)
        if graph.num_senders == graph.num_nodes:  # a shard may have few of the events
            check_units(self.view, *spans_of(graph, self.view), are_dates(graph))

    def check_shard(self, rows: Graph) -> None:
        """Refuse times of which no seed of any shard is later than any event. Collective."""
        check_units_of_shards(rows, self.view)

    def check_graph(self, graph: Graph) -> None:
        """Refuse a graph without such times, or with types that ``num_neighbors`` does not know."""
        self.of_types(graph.types)
        checked_times(graph, torch.empty(0, dtype=torch.int64), self.view)

    def of_types(self, types: TypeNames) -> Array:
        """The numbers of each hop and edge type, as :meth:`NeighborSampler.of_types` gives them."""
        return self._numbers.of_types(types)

    def of_all(self) -> TemporalSampler:
        """The sampler that takes all neighbours that are seen, of types that are not left out."""
        numbers: Any = [-1] * self.num_hops
        if isinstance(self.num_neighbors, Mapping):
            numbers = {kind: [-1 if n else 0 for n in of] for kind, of in self.num_neighbors.items()}
        return replace(self, num_neighbors=numbers, pick="uniform", replace=False)

    @property
    def view(self) -> View:
        """What a seed sees of the past."""
        return View(*self.sight, self.pick == "latest", self.replace)


def sample_at(sampler: TemporalSampler, graph: Graph, seeds: Tensor, times: Tensor, batch_key: BatchKey) -> Sample:
    """A batch around nodes at times of their own; a node may be a seed at several."""
    return sample_by_time(graph, seeds, times, sampler.of_types(graph.types), batch_key, sampler.view)


def check_event_graph(sampler: TemporalSampler, graph: Graph) -> None:
    """Do as :meth:`TemporalSampler.check_graph`, where edges are asked for, and nodes need no times."""
    sampler.of_types(graph.types)
    for source in sources_of(graph, sampler.time):
        if source is not None:
            check_span(source.times, sampler.view)
