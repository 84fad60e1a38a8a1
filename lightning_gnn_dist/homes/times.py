"""What a data module takes of a sampler that draws by time, and what it tells of its graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from lightning.pytorch.utilities import rank_zero_info

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.temporal.times import (
    Span,
    node_times,
    sources_of,
    span_of,
    spans_of_types,
    times_of_receivers,
)
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType, folder_of
from lightning_gnn_dist.graph.typed.tables import ASKED, NEVER, as_told
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.temporal import TemporalSampler, check_event_graph

log = logging.getLogger(__name__)
_DIFFER = " If that cannot be, their units differ"


def check_temporal(graph: Graph, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse a graph without the times that all samplers draw by, and a boundary that does not know times."""
    ours = settings.of_parts()
    assert isinstance(ours, TemporalSampler)  # as the others, which have its times
    for sampler in settings.samplers:
        sampler.check_graph(graph)  # type: ignore[attr-defined]
    if boundary.keeps_rows:
        raise ValueError(
            "boundary=History() keeps one row of each node, whatever the time of the seed that reads it, and "
            f"{ours} draws by time: take Isolated(), Halo() or Fetch()."
        )
    _tell(graph, ours.time)
    if graph.num_senders == graph.num_nodes:  # a shard may have few of the events
        check_units(ours, *spans_of(graph, ours), are_dates(graph))


def sampler_of_events(sampler: Sampler | None, time: str | None) -> Sampler | None:
    """Return the sampler of a data module of edges, where none was named one that knows their times.

    Refuse one that shows later events, and one that draws by times where edges are not split by them.
    """
    if time is None:
        if isinstance(sampler, TemporalSampler):
            raise ValueError(
                "TemporalSampler draws around edges at their times, and this split holds them back at random: split "
                f"them by time, split_edges(graph, time={shown(sampler.time)}), or take NeighborSampler."
            )
        return sampler
    if sampler is None:
        return TemporalSampler([15, 10], time)
    if not isinstance(sampler, TemporalSampler) or sampler.time != time:
        raise ValueError(
            f"The graph of this split has the edges of all times ({time}), and {shown(sampler)} does not draw by "
            f"these: take TemporalSampler([15, 10], time={shown(time)})."
        )
    return sampler


def check_event_samplers(graph: Graph, settings: BatchSettings, time: str | None, edge_type: EdgeType | None) -> None:
    """Refuse samplers that do not suit a graph of events; say what is always seen."""
    if time is None:
        return
    for sampler in settings.samplers:
        if not isinstance(sampler, TemporalSampler):
            continue
        if sampler.seed_time is not None:
            raise ValueError(
                f"seed_time={shown(sampler.seed_time)} names times of nodes, and edges that are asked for bring their "
                "own: leave seed_time out of TemporalSampler."
            )
        check_event_graph(sampler, graph)
    _tell(graph, time)
    ours, whole = settings.of_parts(), graph.num_senders == graph.num_nodes
    if isinstance(ours, TemporalSampler) and whole and edge_type is not None:
        events = _by_type(graph, time)
        _tell_of_units(ours, events["__".join(edge_type)], events, are_dates(graph))


def spans_of(graph: Graph, sampler: TemporalSampler) -> tuple[Span | None, dict[str, Span | None]]:
    """Return the first and the last time of seeds, and of the events of each edge type; None where there are none."""
    seeds = node_times(graph, sampler.seed_time or sampler.time, graph.types.seed_type())
    return span_of(seeds), _by_type(graph, sampler.time)


def are_dates(graph: Graph) -> bool:
    """Whether times are those of a database whose tables have dates, which are kept as seconds since 1970."""
    return graph.types.tables is not None and any(task.are_dates for task in graph.types.tables.tasks.values())


def check_units(
    sampler: TemporalSampler, seeds: Span | None, events: Mapping[str, Span | None], dates: bool = False
) -> None:
    """Refuse times of which no seed is later than any event; say if all seeds are later than all events, or types."""
    spans = [span for span in events.values() if span is not None]
    if seeds is None or not spans:
        return
    earliest, latest = seeds
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    told = {time: as_told(time, dates) for time in (earliest, latest, first, last)}
    units = "Give both in one unit, such as seconds since 1970."
    if latest < first or (latest == first and not sampler.equal):
        raise ValueError(
            f"No seed sees an event: the latest seed is at {told[latest]} ({sampler.seed_time or sampler.time}), and "
            f"the earliest event at {told[first]} ({sampler.time}). {'Ask later questions.' if dates else units}"
        )
    if earliest > last:
        rank_zero_info(
            f"All seeds see all events: the earliest seed is at {told[earliest]} ({sampler.seed_time or sampler.time}"
            f"), and the last event at {told[last]} ({sampler.time}).{'' if dates else _DIFFER + '.'}"
        )
    else:
        _tell_of_units(sampler, seeds, events, dates)


def _tell_of_units(
    sampler: TemporalSampler, seeds: Span | None, events: Mapping[str, Span | None], dates: bool
) -> None:
    """Say of which edge types seeds see nothing, or all, beside others of which they see a part."""
    if seeds is None:
        return
    (earliest, latest) = seeds
    known = {kind: span for kind, span in events.items() if span is not None and span[0] < NEVER}
    never = {kind for kind, (first, _) in known.items() if latest < first or (latest == first and not sampler.equal)}
    always = {kind for kind, (_, last) in known.items() if earliest > last and f"__{ASKED}__" not in kind}
    for kinds, what in ((never, "No seed sees"), (always, "Every seed sees all")):
        if kinds:
            spans = ", ".join(f"{kind} ({_in_words(known[kind], dates)})" for kind in sorted(kinds))
            unit = "" if dates else f"{_DIFFER}: give all times in one unit, such as seconds since 1970."
            at = _in_words(seeds, dates)
            rank_zero_info(f"{what} edges of these types, by their {sampler.time}: {spans}. Seeds are at {at}.{unit}")


def _in_words(span: Span, dates: bool) -> str:
    return " to ".join(as_told(time, dates) for time in span)


def check_rows_of_nodes(graph: Graph, settings: BatchSettings, kind: str) -> None:
    """Refuse to predict rows of nodes at times that they do not have."""
    sampler = settings.of_evaluation()
    if isinstance(sampler, TemporalSampler) and times_of_receivers(graph, sampler.time, kind) is None:
        raise ValueError(
            f"Of a split by time ({sampler.time}) a node has rows at the times of its events, and no row of its own to "
            "predict: score events by trainer.test(...), or give nodes the times to predict them at, and take "
            f"PartitionedDataModule(graph, sampler=TemporalSampler(..., {shown(sampler.time)}, seed_time=...))."
        )


def _tell(graph: Graph, name: str) -> None:
    """Say which edges are always seen; log which are seen by the time of their sender."""
    sources = dict(zip(_kinds(graph), sources_of(graph, name), strict=True))
    by_sender = [kind for kind, source in sources.items() if source and source.first_sender is not None]
    always = [kind for kind, source in sources.items() if source is None]
    if by_sender:
        log.info("Edges of these types have no %s, and are seen by that of their sender: %s.", name, shown(by_sender))
    if always:
        rank_zero_info(
            f"Edges of these types are always seen, as neither they nor their senders have a {name}: {shown(always)}."
        )


def _by_type(graph: Graph, name: str) -> dict[str, Span | None]:
    return dict(zip(_kinds(graph), spans_of_types(graph, name), strict=True))


def _kinds(graph: Graph) -> list[str]:
    return [folder_of(kind) or "all edges" for kind in graph.types.edge_types]
