"""Splits of edges by time: the first events are learned, the last are tested on, and all stay in the graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.data.edges.dealing import numbers_of
from lightning_gnn_dist.data.edges.labels import array_of_edges, arrays_of_edges
from lightning_gnn_dist.data.edges.leaks import is_same
from lightning_gnn_dist.data.temporal.split import parted_by_time
from lightning_gnn_dist.data.typed.links import between, links_of
from lightning_gnn_dist.engine.temporal.times import check_times
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType


def check_times_of_edges(
    graph: Graph, edge_type: EdgeType | None, time: object, labels: str | None, *, hide: bool
) -> None:
    """Refuse edges without such times, and times that are to be predicted."""
    check_word("time", time, "edge_time")
    assert isinstance(time, str)
    if time == labels:
        raise ValueError(
            f"labels and time both name {shown(time)}, and a target shows its time: to predict when edges are there, "
            "give the labels an array of their own."
        )
    check_times(time, array_of_edges(graph, edge_type, "time", time), "edge")
    if not hide:
        raise ValueError(
            "hide=False is for splits without time: with time an event is not seen before it has happened, and "
            "afterwards it is."
        )


def check_reverse_times(
    graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, time: str, *, is_sure: bool
) -> None:
    """Refuse edges without times that turn events round: they would be seen always.

    These are those of the reverse type, and unless the user named it also of types most of whose edges do.
    """
    if edge_type is None:
        return
    others = [] if is_sure else between(graph.types, edge_type[0], edge_type[2], edge_type, reverse)
    timeless = [kind for kind in others if time not in arrays_of_edges(graph, kind)]
    alike = [kind for kind in timeless if _turns_round(graph, edge_type, kind)]
    if reverse is not None and time not in arrays_of_edges(graph, reverse):
        alike.insert(0, reverse)
    if alike:
        raise ValueError(
            f"Edges of {alike[0]} have no array {shown(time)}, so that events would be seen there before they happen: "
            "give them the times of the edges that they turn round, or leave the type out"
            + ("." if alike[0] == reverse else f". If they are others, say what the reverse is, reverse={reverse}.")
        )


def check_same_times(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType, time: str) -> None:
    """Refuse a reverse type that shows events at other times."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, reverse)[1].flip(0)
    numbers = [numbers_of(ends, graph.num_nodes) for ends in (links, turned)]
    times = [arrays_of_edges(graph, kind)[time] for kind in (edge_type, reverse)]
    if not is_same(*numbers, *times):
        raise ValueError(
            f"Edges of {reverse} are those of {edge_type} turned round, and have other times ({time}): an event would "
            "be seen before it is asked for. Give both the same times."
        )


def _turns_round(graph: Graph, edge_type: EdgeType, kind: EdgeType) -> bool:
    """Whether most edges of a type are those of another turned round."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, kind)[1].flip(0)
    there, back = (numbers_of(ends, graph.num_nodes) for ends in (links, turned))
    return 2 * int(torch.isin(back, there).sum()) > back.numel()


def by_time(when: Tensor, chosen: Tensor, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """The positions of the events of each split, of those that are chosen."""
    found = parted_by_time(when, chosen, shares["val"], shares["test"])
    count, is_left = int(chosen.sum()), bool(found.pop("train").any())
    for name, share in shares.items():
        if share and not bool(found[name].any()):
            raise ValueError(f"No event is left for {name}: {name}={share} of {count} is none, or all are of one time.")
    if not is_left:
        raise ValueError(f"val and test would hold all {count} events, and none is left to train on: give less.")
    return {name: mask.nonzero().view(-1) for name, mask in found.items() if bool(mask.any())}
