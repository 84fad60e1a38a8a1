"""Neighbour sampling by time: a seed sees what was there before its own time, at every hop.

    V(v, s) = edges e into v with t_e < t_s,    N_h(s) = senders in sample(V(v, s), k_h), v in N_(h-1)(s)

The trees of two seeds of a batch share nothing, for what a node has received depends on who asks, and when. PyG's
``NeighborLoader`` calls this ``time_attr``, ``input_time`` and ``temporal_strategy``; there, events of the seed's own
time are seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_fields, shown
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import SEED_TIME, BatchKey, Sample, edge_types_of, refuse_repeated, sample_hops
from lightning_gnn_dist.extensions.temporal.times import (
    Span,
    node_times,
    sources_of,
    span_of,
    spans_by_type,
    time_order,
    times_of_seeds,
    words_of_types,
)
from lightning_gnn_dist.extensions.temporal.trees import TimedDraws, Trees, sample_trees
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.tables import ASKED, NEVER, as_told
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.sampling.base import Sampler, check_bulk
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.collectives import all_gather_rows

log = logging.getLogger(__name__)
Pick = Literal["uniform", "latest"]


@dataclass(frozen=True)
class TemporalSampler:
    """Draw up to ``num_neighbors[h]`` in-neighbours of every node at hop ``h``, of those before the time of the seed.

    Every hop sees what was there before the time of the **seed**. Each seed has a tree of its own, so a node may stand
    in a batch several times: ``batch.batch`` says for each node which seed's tree it is in, ``batch.seed_time`` has the
    time of each seed. What a tree draws depends on the batch's key, the seed and its time alone.

    Times are integers of any unit. Edges of a type without times, whose senders have none either, are always seen.

    Args:
        num_neighbors: Neighbours to draw per node, as :class:`NeighborSampler` takes them; -1 takes all that are seen.
        time: Name of the array that says when an edge was there, or, where edges have none of that name, when the node
            that sends was.
        seed_time: Name of the node array that says at what time a node is a seed. Default: ``time``.
        equal: See events of the seed's own time, too. That shows a seed what happened with it or because of it, perhaps
            the answer; without it a seed does not see edges that came with it.
        pick: ``"uniform"`` draws any of the events that are seen, ``"latest"`` the latest; of those at one time, the
            last in their row. Nothing is left to chance in the latest, so evaluation sees as many of them as training.
    """

    num_neighbors: Sequence[int] | Mapping[Any, Sequence[int]]
    time: Annotated[str, "time"]
    seed_time: Annotated[str, "time"] | None = None
    equal: bool = False
    pick: Pick = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_neighbors", self._numbers.num_neighbors)
        check_fields(self)

    @property
    def _numbers(self) -> NeighborSampler:
        """What it has in common with the sampler of a graph without times."""
        return NeighborSampler(self.num_neighbors)

    @property
    def num_hops(self) -> int:
        return self._numbers.num_hops

    @property
    def sight(self) -> tuple[str, str, bool]:
        """What decides which events a seed must not see: the names of both times, and ``equal``."""
        return self.time, self.time if self.seed_time is None else self.seed_time, self.equal

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk = check_bulk(graph, seeds, keys)
        for ids, _ in bulk:
            refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
        timed = [(ids, checked_times(self, graph, ids), batch_key) for ids, batch_key in bulk]
        return [sample_at(self, graph, *of) for of in timed]

    def of_evaluation(self) -> TemporalSampler:
        """Return what evaluates a model: the latest are drawn without chance, so what was learned from them holds."""
        return self if self.pick == "latest" else self.of_all()

    def check_data(self, graph: Graph) -> None:
        """Refuse a graph without such times, or with times that do not fit together."""
        self.check_graph(graph)
        tell(graph, self.time)
        if graph.num_senders == graph.num_nodes:  # a shard may have few of the events
            seeds = span_of(node_times(graph, self.sight[1], graph.types.seed_type()))
            check_units(self, seeds, spans_by_type(graph, self.time), are_dates(graph))

    def check_shard(self, rows: Graph) -> None:
        """Refuse times of which no seed of any shard is later than any event. Collective."""
        times, of_types = node_times(rows, self.sight[1], rows.types.seed_type()), spans_by_type(rows, self.time)
        row = [(*(span or (0, 0)), span is not None) for span in (span_of(times), *of_types.values())]
        of_ranks = all_gather_rows(torch.tensor(row))
        seeds, *events = (_span(ranks[ranks[:, 2] > 0]) for ranks in of_ranks.unbind(1))
        check_units(self, seeds, dict(zip(of_types, events, strict=True)), are_dates(rows))

    def check_graph(self, graph: Graph) -> None:
        """Refuse a graph without such times, or with types that ``num_neighbors`` does not know."""
        self.of_types(graph.types)
        checked_times(self, graph, torch.empty(0, dtype=torch.int64))

    def of_types(self, types: TypeNames) -> Array:
        """The numbers of each hop and edge type, as :meth:`NeighborSampler.of_types` gives them."""
        return self._numbers.of_types(types)

    def of_all(self) -> TemporalSampler:
        """The sampler that takes all neighbours that are seen, of types that are not left out."""
        numbers: Any = [-1] * self.num_hops
        if isinstance(self.num_neighbors, Mapping):
            numbers = {kind: [-1 if n else 0 for n in of] for kind, of in self.num_neighbors.items()}
        return replace(self, num_neighbors=numbers, pick="uniform")


def sample_at(sampler: TemporalSampler, graph: Graph, seeds: Tensor, times: Tensor, batch_key: BatchKey) -> Sample:
    """A batch around nodes at times of their own; a node may be a seed at several."""
    bits, fanouts = max(1, (graph.num_nodes - 1).bit_length()), sampler.of_types(graph.types)
    trees = Trees(seeds.numpy(), seen_by(sampler, times).numpy(), bits)
    keys, order = typed_keys(*batch_key, *fanouts.shape), time_order(graph, sampler.time)
    draws = TimedDraws(edge_types_of(graph.types), order, fanouts, keys, sampler.pick == "latest")
    roots, num_names = (torch.arange(seeds.numel()) << bits) + seeds, max(1, seeds.numel()) << bits
    sample = sample_hops(graph, roots, len(fanouts), sample_trees, trees, draws, num_names=num_names)
    extra = {"batch": sample.nodes >> bits, SEED_TIME: times}
    return sample._replace(nodes=sample.nodes & ((1 << bits) - 1), extra=extra)


def seen_by(sampler: TemporalSampler, times: Tensor) -> Tensor:
    """Up to which time seeds of these times see events."""
    return times.long() - (0 if sampler.equal else 1)


def checked_times(sampler: TemporalSampler, graph: Graph, seeds: Tensor) -> Tensor:
    """The time of each seed; what is no time, of seeds or events, is refused."""
    sources_of(graph, sampler.time)
    return times_of_seeds(graph, sampler.sight[1], seeds)


def check_event_samplers(
    graph: Graph, samplers: Sequence[Sampler], time: str | None, edge_type: EdgeType | None
) -> None:
    """Refuse samplers, that of parts and others, that do not suit a graph of events; say what is always seen."""
    if time is None:
        return
    for sampler in samplers:
        if not isinstance(sampler, TemporalSampler):
            continue
        if sampler.seed_time is not None:
            raise ValueError(
                f"seed_time={shown(sampler.seed_time)} names times of nodes, and edges that are asked for bring their "
                "own: leave seed_time out of TemporalSampler."
            )
        sampler.of_types(graph.types)  # as check_graph() does, but nodes need no times
    tell(graph, time)
    ours, whole = samplers[0], graph.num_senders == graph.num_nodes
    if isinstance(ours, TemporalSampler) and whole and edge_type is not None:
        events = spans_by_type(graph, time)
        _tell_of_units(ours, events["__".join(edge_type)], events, are_dates(graph))


def are_dates(graph: Graph) -> bool:
    """Whether times are those of a database whose tables have dates, which are kept as seconds since 1970."""
    return graph.types.tables is not None and any(task.are_dates for task in graph.types.tables.tasks.values())


def check_units(sampler: TemporalSampler, seeds: Span | None, events: Mapping[str, Span | None], dates: bool) -> None:
    """Refuse times of which no seed is later than any event; say of which types seeds see all, or nothing."""
    first = min((span[0] for span in events.values() if span is not None), default=None)
    if seeds is None or first is None:
        return
    latest, (time, seed_time, equal) = seeds[1], sampler.sight
    if latest < first or (latest == first and not equal):
        way_out = "Ask later questions." if dates else "Give both in one unit, such as seconds since 1970."
        raise ValueError(
            f"No seed sees an event: the latest seed is at {as_told(latest, dates)} ({seed_time}), and "
            f"the earliest event at {as_told(first, dates)} ({time}). {way_out}"
        )
    _tell_of_units(sampler, seeds, events, dates)


def _span(ranks: Tensor) -> Span | None:
    return (ranks[:, 0].min().item(), ranks[:, 1].max().item()) if len(ranks) else None


def _tell_of_units(
    sampler: TemporalSampler, seeds: Span | None, events: Mapping[str, Span | None], dates: bool
) -> None:
    """Say of which edge types seeds see nothing, or all, beside others of which they see a part."""
    if seeds is None:
        return
    earliest, latest = seeds
    known = {kind: span for kind, span in events.items() if span is not None and span[0] < NEVER}
    never = [kind for kind, (first, _) in known.items() if latest < first or (latest == first and not sampler.equal)]
    always = [kind for kind, (_, last) in known.items() if earliest > last and f"__{ASKED}__" not in kind]
    for kinds, what in ((never, "No seed sees"), (always, "Every seed sees all")):
        if kinds:
            spans = ", ".join(f"{kind} ({_in_words(known[kind], dates)})" for kind in sorted(kinds))
            unit = " If that cannot be, their units differ: give all times in one unit, such as seconds since 1970."
            told = f"{what} edges of these types, by their {sampler.time}: {spans}. Seeds are at "
            rank_zero_info(f"{told}{_in_words(seeds, dates)}.{'' if dates else unit}")


def _in_words(span: Span, dates: bool) -> str:
    return " to ".join(as_told(time, dates) for time in span)


def tell(graph: Graph, name: str) -> None:
    """Say which edges are always seen; log which are seen by the time of their sender."""
    sources = dict(zip(words_of_types(graph), sources_of(graph, name), strict=True))
    by_sender = [kind for kind, source in sources.items() if source and source.first_sender is not None]
    always = [kind for kind, source in sources.items() if source is None]
    if by_sender:
        log.info("Edges of these types have no %s, and are seen by that of their sender: %s.", name, shown(by_sender))
    if always:
        rank_zero_info(
            f"Edges of these types are always seen, as neither they nor their senders have a {name}: {shown(always)}."
        )


def rank_zero_info(text: str) -> None:
    """Tell it on rank 0."""
    from lightning.pytorch import utilities  # takes seconds, and whoever looks at a graph needs none

    utilities.rank_zero_info(text)
