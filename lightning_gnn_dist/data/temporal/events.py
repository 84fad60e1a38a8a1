"""Splits of edges by time: the first events are learned, the last are tested on, and all stay in the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.data.edges.dealing import FALSE_ENDS, numbers_of
from lightning_gnn_dist.data.edges.labels import arrays_of_edges, check_classes, checked_labels
from lightning_gnn_dist.data.edges.rows import is_same
from lightning_gnn_dist.data.edges.split import both_ways, one_direction
from lightning_gnn_dist.data.temporal.split import is_labelled
from lightning_gnn_dist.data.typed.links import between, ends_of, links_of, without_edges
from lightning_gnn_dist.engine.rng import Purpose, key
from lightning_gnn_dist.engine.temporal.order import time_order
from lightning_gnn_dist.engine.temporal.times import as_integers, check_times, node_times
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.negatives import Candidates, Moments, draw_receivers


class Held(NamedTuple):
    """What a split of events is made of.

    Attributes:
        graph: The graph of all events.
        edges: The held ones, by the ids in their types.
        negatives: False receivers of each, where there are no labels.
        undirected: Whether the graph has both directions of each event.
        arrays: The time of each held event, and with labels what else it carries.
    """

    graph: Graph
    edges: dict[str, Tensor]
    negatives: dict[str, Tensor]
    undirected: bool
    arrays: dict[str, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class TimedEdges:
    """The edges of a type, each with its time.

    Args:
        graph: The graph that has them.
        edge_type: Their type, if the graph has types.
        reverse: The edge type that has them turned round, if there is one.
        labels: The name of the array of their labels, if there are any.
        undirected: Whether both directions of each are there. None: find out.
        time: The name of the array of their times.
    """

    graph: Graph
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
    undirected: bool | None
    time: str

    def held_back(self, shares: Mapping[str, float], seed: int, negatives: int) -> Held:
        """Hold the last events back. Those of one time stay together, in the later split of the two."""
        arrays, links = arrays_of_edges(self.graph, self.edge_type), links_of(self.graph, self.edge_type)[1]
        self._check_reverse(links, arrays[self.time])
        undirected = both_ways(self.graph, self.edge_type, self.undirected)
        chosen = links[0] != links[1] if self.labels is None else self._labelled()
        if undirected:
            pairs, which = numbers_of(links, self.graph.num_nodes, undirected=True).unique(return_inverse=True)
            chosen &= one_direction(links, pairs, which, seed)
        when, ends = as_integers(arrays[self.time]), ends_of(self.graph, self.edge_type)
        carried = arrays if self.labels is not None else {self.time: arrays[self.time]}
        edges, false, held = dict[str, Tensor](), dict[str, Tensor](), dict[str, Mapping[str, Tensor]]()
        for name, rows in _by_time(when, chosen, shares).items():
            edges[name], held[name] = ends.in_types(links[:, rows]), {n: a[rows] for n, a in carried.items()}
            if self.labels is None:
                false[name] = self._false_ends(links[:, rows], arrays[self.time][rows], rows, negatives, seed)
        # A graph in RAM without the masks of its nodes.
        graph = without_edges(self.graph, torch.ones(self.graph.num_edges, dtype=torch.bool))
        return Held(graph, edges, false, undirected, held)

    def _labelled(self) -> Tensor:
        assert self.labels is not None
        labels = checked_labels(self.graph, self.edge_type, self.labels)
        check_classes(self.labels, labels)
        return is_labelled(labels)

    def _check_reverse(self, links: Tensor, times: Tensor) -> None:
        """Refuse a reverse type that shows events at other times."""
        if self.reverse is None:
            return
        turned = links_of(self.graph, self.reverse)[1].flip(0)
        numbers = [numbers_of(ends, self.graph.num_nodes, undirected=False) for ends in (links, turned)]
        theirs = arrays_of_edges(self.graph, self.reverse)[self.time]
        if not is_same(numbers[0], numbers[1], times, theirs):
            raise ValueError(
                f"Edges of {self.reverse} are those of {self.edge_type} turned round, and have other times "
                f"({self.time}): an event would be seen before it is asked for. Give both the same times."
            )

    def _false_ends(self, links: Tensor, times: Tensor, rows: Tensor, count: int, seed: int) -> Tensor:
        """False receivers of each event, by their ids in their type."""
        ends, kind = ends_of(self.graph, self.edge_type), None if self.edge_type is None else self.edge_type[2]
        number = None if ends.target_type is None else ends.target_type.number
        times_there = times_of_receivers(self.graph, self.time, kind)
        candidates = Candidates.of(ends.receivers, times_there, ends.receivers.start)
        false_key = key(seed + Purpose.LINKS, 0, 0, FALSE_ENDS)
        at = Moments(time_order(self.graph, self.time), as_integers(times))
        drawn, without = draw_receivers(self.graph, links, rows, count, false_key, candidates, number, at)
        if without.numel():
            sender = int(links[0][without[0]]) - ends.senders.start
            raise ValueError(
                f"At time {times[without[0]].item()} node {sender} sent to all nodes that were there, or "
                "there was no other: there is no false receiver to draw. Leave that event out."
            )
        return drawn - ends.receivers.start


def times_of_receivers(graph: Graph, time: str, kind: str | None) -> Tensor | None:
    """Since when each node that may receive is there, if nodes have an array of that name."""
    arrays = graph.node_arrays if graph.types is None or kind is None else graph.types.node_arrays[kind]
    return node_times(graph, time, kind, "time") if time in arrays else None


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
    arrays, whose = arrays_of_edges(graph, edge_type), "edges" if edge_type is None else f"edges of type {edge_type}"
    if time not in arrays:
        raise ValueError(
            f"time names {shown(time)}, and {whose} carry no array of that name (they have: {shown(sorted(arrays))}): "
            "set it in the data before Graph.from_pyg(data)."
        )
    check_times(time, arrays[time], "edge")
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
    if graph.types is None or edge_type is None:
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


def _turns_round(graph: Graph, edge_type: EdgeType, kind: EdgeType) -> bool:
    """Whether most edges of a type are those of another turned round."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, kind)[1].flip(0)
    there, back = (numbers_of(ends, graph.num_nodes, undirected=False) for ends in (links, turned))
    return 2 * int(torch.isin(back, there).sum()) > back.numel()


def _by_time(when: Tensor, chosen: Tensor, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """The positions of the events of each split, of those that are chosen."""
    in_order = when[chosen].sort().values
    count = in_order.numel()
    begins = [in_order[count - round(share * count) :][:1] for share in (sum(shares.values()), shares["test"])]
    later = [when >= begin if begin.numel() else torch.zeros_like(chosen) for begin in begins]
    found = {"val": chosen & later[0] & ~later[1], "test": chosen & later[1]}
    for name, share in shares.items():
        if share and not bool(found[name].any()):
            raise ValueError(f"No event is left for {name}: {name}={share} of {count} is none, or all are of one time.")
    if not bool((chosen & ~later[0]).any()):
        raise ValueError(f"val and test would hold all {count} events, and none is left to train on: give less.")
    return {name: mask.nonzero().view(-1) for name, mask in found.items() if bool(mask.any())}
