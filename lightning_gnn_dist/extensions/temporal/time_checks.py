"""What a data module takes of a sampler that draws by time, and what it tells of its graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.temporal.times import (
    Span,
    node_times,
    sources_of,
    span_of,
    spans_of_types,
)
from lightning_gnn_dist.extensions.temporal.trees import View
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import folder_of
from lightning_gnn_dist.graph.typed.tables import ASKED, NEVER, as_told
from lightning_gnn_dist.wire.collectives import all_gather_rows

log = logging.getLogger(__name__)
_DIFFER = " If that cannot be, their units differ"


def spans_of(graph: Graph, view: View) -> tuple[Span | None, dict[str, Span | None]]:
    """Return the first and the last time of seeds, and of the events of each edge type; None where there are none."""
    seeds = node_times(graph, view.seed_time, graph.types.seed_type())
    return span_of(seeds), events_by_type(graph, view.time)


def are_dates(graph: Graph) -> bool:
    """Whether times are those of a database whose tables have dates, which are kept as seconds since 1970."""
    return graph.types.tables is not None and any(task.are_dates for task in graph.types.tables.tasks.values())


def check_units(view: View, seeds: Span | None, events: Mapping[str, Span | None], dates: bool = False) -> None:
    """Refuse times of which no seed is later than any event; say if all seeds are later than all events, or types."""
    spans = [span for span in events.values() if span is not None]
    if seeds is None or not spans:
        return
    earliest, latest = seeds
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    told = {time: as_told(time, dates) for time in (earliest, latest, first, last)}
    units = "Give both in one unit, such as seconds since 1970."
    if latest < first or (latest == first and not view.equal):
        raise ValueError(
            f"No seed sees an event: the latest seed is at {told[latest]} ({view.seed_time}), and "
            f"the earliest event at {told[first]} ({view.time}). {'Ask later questions.' if dates else units}"
        )
    if earliest > last:
        rank_zero_info(
            f"All seeds see all events: the earliest seed is at {told[earliest]} ({view.seed_time}"
            f"), and the last event at {told[last]} ({view.time}).{'' if dates else _DIFFER + '.'}"
        )
    else:
        tell_of_units(view, seeds, events, dates)


def check_units_of_shards(rows: Graph, view: View) -> None:
    """Refuse times of which no seed of any shard is later than any event. Collective."""
    of_seeds, of_types = spans_of(rows, view)
    row = [(*(span or (0, 0)), span is not None) for span in (of_seeds, *of_types.values())]
    sources = [source for source in sources_of(rows, view.time) if source is not None]
    floating = any(source.times.is_floating_point() for source in sources)
    of_ranks = all_gather_rows(torch.tensor(row, dtype=torch.float64 if floating else torch.int64))
    seeds, *events = (_span(ranks[ranks[:, 2] > 0]) for ranks in of_ranks.unbind(1))
    check_units(view, seeds, dict(zip(of_types, events, strict=True)), are_dates(rows))


def _span(ranks: Tensor) -> tuple[float, float] | None:
    return (ranks[:, 0].min().item(), ranks[:, 1].max().item()) if len(ranks) else None


def tell_of_units(view: View, seeds: Span | None, events: Mapping[str, Span | None], dates: bool) -> None:
    """Say of which edge types seeds see nothing, or all, beside others of which they see a part."""
    if seeds is None:
        return
    (earliest, latest) = seeds
    known = {kind: span for kind, span in events.items() if span is not None and span[0] < NEVER}
    never = {kind for kind, (first, _) in known.items() if latest < first or (latest == first and not view.equal)}
    always = {kind for kind, (_, last) in known.items() if earliest > last and f"__{ASKED}__" not in kind}
    for kinds, what in ((never, "No seed sees"), (always, "Every seed sees all")):
        if kinds:
            spans = ", ".join(f"{kind} ({_in_words(known[kind], dates)})" for kind in sorted(kinds))
            unit = "" if dates else f"{_DIFFER}: give all times in one unit, such as seconds since 1970."
            at = _in_words(seeds, dates)
            rank_zero_info(f"{what} edges of these types, by their {view.time}: {spans}. Seeds are at {at}.{unit}")


def _in_words(span: Span, dates: bool) -> str:
    return " to ".join(as_told(time, dates) for time in span)


def tell(graph: Graph, name: str) -> None:
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


def events_by_type(graph: Graph, name: str) -> dict[str, Span | None]:
    return dict(zip(_kinds(graph), spans_of_types(graph, name), strict=True))


def _kinds(graph: Graph) -> list[str]:
    return [folder_of(kind) or "all edges" for kind in graph.types.edge_types]


def rank_zero_info(text: str) -> None:
    """Tell it on rank 0."""
    from lightning.pytorch import utilities  # takes seconds, and whoever looks at a graph needs none

    utilities.rank_zero_info(text)
