"""What a data module of edges takes of samplers that draw by time, and what it tells of a graph of events."""

from __future__ import annotations

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, check_event_graph
from lightning_gnn_dist.extensions.temporal.time_checks import are_dates, events_by_type, tell, tell_of_units
from lightning_gnn_dist.extensions.temporal.times import times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.base import Sampler


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
    tell(graph, time)
    ours, whole = settings.of_parts(), graph.num_senders == graph.num_nodes
    if isinstance(ours, TemporalSampler) and whole and edge_type is not None:
        events = events_by_type(graph, time)
        tell_of_units(ours.view, events["__".join(edge_type)], events, are_dates(graph))


def check_rows_of_nodes(graph: Graph, settings: BatchSettings, kind: str) -> None:
    """Refuse to predict rows of nodes at times that they do not have."""
    sampler = settings.of_evaluation()
    if isinstance(sampler, TemporalSampler) and times_of_receivers(graph, sampler.time, kind) is None:
        raise ValueError(
            f"Of a split by time ({sampler.time}) a node has rows at the times of its events, and no row of its own to "
            "predict: score events by trainer.test(...), or give nodes the times to predict them at, and take "
            f"PartitionedDataModule(graph, sampler=TemporalSampler(..., {shown(sampler.time)}, seed_time=...))."
        )
