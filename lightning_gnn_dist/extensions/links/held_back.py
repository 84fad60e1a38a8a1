"""Holds edges back, at random or the last: to be told from false ones, or with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.extensions.links.ends import ends_of, links_of, numbers_of, without_edges
from lightning_gnn_dist.extensions.links.labels import (
    arrays_of_edges,
    check_classes,
    checked_labels,
    no_label,
    with_edge_arrays,
    without_labels,
)
from lightning_gnn_dist.extensions.links.leaks import both_ways, by_time, check_same_times, settled
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import as_integers, time_order, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType

SPLIT, FALSE_ENDS = range(2)  # what is drawn


def dealt(total: int, shares: Mapping[str, float], seed: int) -> dict[str, Tensor]:
    """Return which of all pairs are held back under each name, if any are."""
    counts = {name: round(share * total) for name, share in shares.items()}
    if not total and any(shares.values()):
        raise ValueError(
            "There are no edges to hold back (or pairs, without loops): choose an edge type that has some."
        )
    for name, share in shares.items():
        if share and not counts[name]:
            raise ValueError(
                f"{name}={share} of {total} edges (or pairs, without loops) is none: give a larger share, or {name}=0."
            )
    if any(counts.values()) and sum(counts.values()) == total:
        raise ValueError(
            f"val and test would hold all {total} edges (or pairs, without loops), and none is left to train on: give "
            "smaller shares."
        )
    order = permutation(total, seed + Purpose.LINKS, SPLIT)[: sum(counts.values())]
    held = dict(zip(counts, order.split(list(counts.values())), strict=True))
    return {name: which for name, which in held.items() if len(which)}


def held_pairs(
    shares: Mapping[str, float | Tensor], can_be_held: Tensor, pair_of_edge: Tensor, seed: int
) -> dict[str, Tensor]:
    """Return which pairs of nodes are held back under each name: a share of them, or those of edges that are marked.

    Args:
        shares: For each name the share, or a boolean for each edge.
        can_be_held: The pairs that shares are of.
        pair_of_edge: The pair of each edge.
        seed: Decides which pairs a share is.
    """
    marked = {name: share for name, share in shares.items() if isinstance(share, Tensor)}
    if not marked:
        dealt_out = dealt(can_be_held.numel(), {name: float(share) for name, share in shares.items()}, seed)
        return {name: can_be_held[which] for name, which in dealt_out.items()}
    held = {name: pair_of_edge[mask].unique() for name, mask in marked.items()}
    held = {name: pairs[torch.isin(pairs, can_be_held)] for name, pairs in held.items()}
    if empty := [name for name, pairs in held.items() if not pairs.numel()]:
        raise ValueError(f"{empty[0]} marks no edge that can be held back (loops, and edges without a label, cannot).")
    together, counts = torch.cat(list(held.values())).unique(return_counts=True)
    if bool((counts > 1).any()):
        raise ValueError(
            f"val and test both mark edges between the same two nodes ({int((counts > 1).sum())} such pairs): both "
            "directions and all copies are held back together, so mark a pair in one of them."
        )
    if together.numel() == can_be_held.numel():
        raise ValueError("val and test mark all edges, and none is left to train on: mark fewer.")
    return held


class Pairs(NamedTuple):
    """The pairs of nodes that edges are between, each direction by itself or both together.

    Attributes:
        numbers: A number for each, increasing.
        of_edge: The place of each edge's among them.
        undirected: Whether both directions are together.
    """

    numbers: Tensor
    of_edge: Tensor
    undirected: bool

    @classmethod
    def of(cls, links: Tensor, num_nodes: int, undirected: bool) -> Pairs:
        numbers, of_edge = numbers_of(links, num_nodes, undirected=undirected).unique(return_inverse=True)
        return cls(numbers, of_edge, undirected)

    def one_direction(self, links: Tensor, seed: int) -> Tensor:
        """Which edges lead in the direction that was drawn for their pair of nodes; loops do."""
        flips = draw_bits(key(seed + Purpose.LINKS, 0, 0, SPLIT), self.numbers)[self.of_edge]
        return (links[0] == links[1]) | ((links[0] < links[1]) ^ flips)


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
            edges[name] = ends_of(self.graph.types, self.edge_type).in_types(links[:, rows_of])
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
        ends, kind = ends_of(self.graph.types, self.edge_type), "" if self.edge_type is None else self.edge_type[2]
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
