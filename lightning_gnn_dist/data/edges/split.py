"""Holds edges back, at random or the last: to be told from false ones, or with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_arrays, shown
from lightning_gnn_dist.data.edges.dealing import FALSE_ENDS, Pairs, held_pairs, numbers_of
from lightning_gnn_dist.data.edges.directions import both_ways, settled
from lightning_gnn_dist.data.edges.labels import (
    arrays_of_edges,
    check_classes,
    check_labels,
    checked_labels,
    no_label,
    with_edge_arrays,
    without_labels,
)
from lightning_gnn_dist.data.temporal.events import by_time, check_same_times
from lightning_gnn_dist.data.temporal.split import is_labelled
from lightning_gnn_dist.data.typed.links import ends_of, links_of, without_edges
from lightning_gnn_dist.engine.rng import Purpose, key
from lightning_gnn_dist.engine.temporal.times import as_integers, time_order, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of, edge_positions
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.sampling.negatives import Candidates, Moments, draw_receivers

Arrays = Mapping[str, Tensor]


class HeldBack(NamedTuple):
    """What a split of edges is made of.

    Attributes:
        graph: The graph to train on.
        edges: The held edges, by the ids in their types.
        negatives: False receivers of each, where there are no labels.
        undirected: Whether the graph has both directions of each edge.
        arrays: What each of them carries: with labels all that edges do, otherwise their times, if they have some.
    """

    graph: Graph
    edges: dict[str, Tensor]
    negatives: dict[str, Tensor]
    undirected: bool
    arrays: dict[str, Arrays]


class _Chosen(NamedTuple):
    """Which edges are held under each name.

    Attributes:
        graph: The graph without them, or without their labels.
        rows: Their places among the edges of their type.
        ids: A number for each, by which false receivers are drawn.
    """

    graph: Graph
    rows: dict[str, Tensor]
    ids: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class EdgesToSplit:
    """The edges of a type, some of which are to be held back.

    Args:
        graph: The graph that has them.
        edge_type: Their type, if the graph has types.
        reverse: The edge type that has them turned round, if there is one.
        labels: The name of the array of their labels, if they are held back with these.
        time: The name of the array of their times, if the last of them are held back.
        undirected: Whether both directions of each are there, and carry the same. None: find out.
    """

    graph: Graph
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
    time: str | None
    undirected: bool | None

    def held_back(self, shares: Mapping[str, float | Tensor], seed: int, negatives: int, *, hide: bool) -> HeldBack:
        """Hold shares of the edges back, or those that are marked: at random, or the last ones.

        At random, both directions of a pair of nodes, and with labels all edges between them, are held together, and
        of an undirected graph one direction is asked for. By time those of one time stay together, in the later split.
        """
        arrays, (at, links) = arrays_of_edges(self.graph, self.edge_type), links_of(self.graph, self.edge_type)
        can_be_held = links[0] != links[1] if self.labels is None else self._labelled()
        if self.time is not None and self.reverse is not None:
            check_same_times(self.graph, self.edge_type, self.reverse, self.time)
        undirected = self._is_undirected()
        pairs = Pairs.of(links, self.graph.num_nodes, undirected or self.labels is not None)
        is_asked = can_be_held & pairs.one_direction(links, seed) if undirected else can_be_held
        if self.time is None:
            chosen = self._at_random(shares, at, pairs, can_be_held, is_asked, seed, hide=hide)
        else:
            rows = by_time(as_integers(arrays[self.time]), is_asked, {name: float(of) for name, of in shares.items()})
            chosen = _Chosen(without_edges(self.graph, torch.ones(self.graph.num_edges, dtype=torch.bool)), rows, rows)
        carried = arrays if self.labels is not None else {} if self.time is None else {self.time: arrays[self.time]}
        edges, false, held = dict[str, Tensor](), dict[str, Tensor](), dict[str, Arrays]()
        for name, rows_of in chosen.rows.items():
            edges[name] = ends_of(self.graph, self.edge_type).in_types(links[:, rows_of])
            if carried:
                held[name] = {array: of[rows_of] for array, of in carried.items()}
            if self.labels is None:
                times = None if self.time is None else arrays[self.time][rows_of]
                false[name] = self._false_ends(links[:, rows_of], chosen.ids[name], times, negatives, seed)
        return HeldBack(chosen.graph, edges, false, undirected, held)

    def _labelled(self) -> Tensor:
        assert self.labels is not None
        labels = checked_labels(self.graph, self.edge_type, self.labels)
        check_classes(self.labels, labels)
        return is_labelled(labels)

    def _is_undirected(self) -> bool:
        if self.labels is None and self.time is None:
            return settled(self.graph, self.edge_type, self.undirected)
        return both_ways(self.graph, self.edge_type, self.undirected)

    def _at_random(
        self,
        shares: Mapping[str, float | Tensor],
        at: Tensor,
        pairs: Pairs,
        can_be_held: Tensor,
        is_asked: Tensor,
        seed: int,
        *,
        hide: bool,
    ) -> _Chosen:
        """Choose pairs of nodes: with labels all edges between them that are asked for, otherwise one of each."""
        choice = pairs.of_edge[can_be_held].unique()
        held = held_pairs(shares, choice, pairs.of_edge, seed)
        is_held, rows = torch.zeros_like(pairs.numbers, dtype=torch.bool), dict[str, Tensor]()
        asked = is_asked.nonzero().view(-1)
        first = torch.full_like(pairs.numbers, at.numel()).scatter_reduce(0, pairs.of_edge[asked], asked, "amin")
        for name, which in held.items():
            of_name = torch.zeros_like(is_held)
            of_name[which] = True
            is_held |= of_name
            rows[name] = first[which] if self.labels is None else asked[of_name[pairs.of_edge[asked]]]
        graph = (self._left if hide else self._unlabelled)(at, pairs, is_held)
        if self.reverse is not None and self.labels is not None:
            graph = without_labels(graph, self.reverse, self.labels)
        return _Chosen(graph, rows, {name: torch.searchsorted(choice, which) for name, which in held.items()})

    def _left(self, at: Tensor, pairs: Pairs, is_held: Tensor) -> Graph:
        """The graph without the held edges."""
        kept = torch.ones(self.graph.num_edges, dtype=torch.bool)
        kept[at] = ~is_held[pairs.of_edge]
        if self.reverse is not None:
            back, turned = links_of(self.graph, self.reverse)
            numbers = numbers_of(turned.flip(0), self.graph.num_nodes, undirected=pairs.undirected)
            kept[back] = ~torch.isin(numbers, pairs.numbers[is_held])
        return without_edges(self.graph, kept)

    def _unlabelled(self, at: Tensor, pairs: Pairs, is_held: Tensor) -> Graph:
        """The whole graph, in which held edges have no label."""
        assert self.labels is not None
        whole = without_edges(self.graph, torch.ones(self.graph.num_edges, dtype=torch.bool))
        arrays = dict(arrays_of_edges(whole, self.edge_type))
        labels = arrays.pop(self.labels)
        mask = is_held[pairs.of_edge].view(-1, *[1] * (labels.dim() - 1))
        arrays[self.labels] = labels.masked_fill(mask, no_label(labels))
        return with_edge_arrays(whole, self.edge_type, arrays)

    def _false_ends(self, edges: Tensor, ids: Tensor, times: Tensor | None, count: int, seed: int) -> Tensor:
        """False receivers for each edge, by their ids in their type."""
        ends, kind = ends_of(self.graph, self.edge_type), "" if self.edge_type is None else self.edge_type[2]
        number, false_key = ends.target_type and ends.target_type.number, key(seed + Purpose.LINKS, 0, 0, FALSE_ENDS)
        avoided, candidates, at = edges[:1], Candidates(ends.receivers), None
        if self.time is not None and times is not None:
            there = times_of_receivers(self.graph, self.time, kind)
            avoided, candidates = edges, Candidates.of(ends.receivers, there, ends.receivers.start)
            at = Moments(time_order(self.graph, self.time), as_integers(times))
        drawn, without = draw_receivers(self.graph, avoided, ids, count, false_key, candidates, number, at)
        if without.numel():
            sender = int(edges[0][without[0]]) - ends.senders.start
            if times is None:
                raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
            raise ValueError(
                f"At time {times[without[0]].item()} node {sender} sent to all nodes that were there, or there was no "
                "other: there is no false receiver to draw. Leave that event out."
            )
        return drawn - ends.receivers.start


def check_each_mapping(**held: object) -> None:
    """Refuse what does not hold arrays by name, for each name of a split."""
    for name, of_splits in held.items():
        if not isinstance(of_splits, Mapping) or not all(isinstance(arrays, Mapping) for arrays in of_splits.values()):
            raise TypeError(
                f'{name} must hold the arrays of each split by name, as {{"val": {{"edge_rating": ...}}}}, got '
                f"{shown(of_splits)}."
            )
        for arrays in of_splits.values():
            check_arrays(**{name: arrays})


def check_held_arrays(
    graph: Graph,
    edge_type: EdgeType | None,
    labels: str | None,
    time: str | None,
    edges: Arrays,
    held: Mapping[str, Arrays],
) -> None:
    """Refuse arrays of held edges that are not those of the graph's edges, and held edges without labels."""
    ours = arrays_of_edges(graph, edge_type)
    if labels is not None:
        checked_labels(graph, edge_type, labels)
    elif time is not None:
        ours = {time: ours[time]}
    if edges.keys() != held.keys():
        raise ValueError(f"There are edges for {list(edges)} and held_arrays for {list(held)}.")
    for name, arrays in held.items():
        if arrays.keys() != ours.keys():
            raise ValueError(
                f"held_arrays of {name} are {shown(sorted(arrays))}, and edges of the graph carry "
                f"{shown(sorted(ours))}: batches of both must have the same."
            )
        for array, rows in arrays.items():
            like, count = ours[array], edges[name].shape[1]
            if rows.shape != (count, *like.shape[1:]) or rows.dtype != like.dtype:
                raise ValueError(
                    f"held_arrays: {array} of {name} must be {like.dtype} of shape {(count, *like.shape[1:])}, as the "
                    f"graph's is, got {shown(rows)}."
                )
        if labels is not None:
            check_labels(labels, arrays[labels])
            if not bool(is_labelled(arrays[labels]).all()):
                raise ValueError(f"held_arrays: some edges of {name} have no label to be judged by: leave them out.")


def labelled_in_graph(graph: Graph, edge_type: EdgeType | None, labels: str, edges: Tensor) -> Tensor:
    """Which of some edges, by ids in the graph, have a copy there that has a label."""
    rows = edges[1].unique()
    at = edge_positions(graph.indptr, rows)
    receivers = rows.repeat_interleave(degrees_of(graph.indptr, rows))
    if edge_type is not None:
        is_of = graph.types.edge_type[at] == graph.types.edge_types.index(edge_type)
        at, receivers = at[is_of], receivers[is_of]
        places = torch.searchsorted(graph.types.edges_of(edge_type), at)
    else:
        places = at
    known = is_labelled(arrays_of_edges(graph, edge_type)[labels][places])
    there = graph.indices[at].to(torch.int64) * graph.num_nodes + receivers
    return torch.isin(edges[0] * graph.num_nodes + edges[1], there[known])
