"""Holds edges back, at random or the last: to be told from false ones, or with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.extensions.links.edges import Edges, check_classes, numbers_of, without_edges
from lightning_gnn_dist.extensions.links.leaks import both_ways, by_time, check_same_times, settled
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import as_integers, time_order, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph

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


@dataclass(frozen=True, eq=False)
class EdgesToSplit:
    """The edges of a type, some of which are to be held back.

    Args:
        all: The edges.
        labels: The name of the array of their labels, if they are held back with these.
        time: The name of the array of their times, if the last of them are held back.
        undirected: Whether both directions of each are there, and carry the same. None: find out.
    """

    all: Edges
    labels: str | None
    time: str | None
    undirected: bool | None

    def held_back(self, shares: Mapping[str, float | Tensor], seed: int, negatives: int) -> HeldBack:
        """Hold shares of the edges back, or those that are marked: at random, or the last ones.

        At random, both directions of a pair of nodes, and with labels all edges between them, are held together, and
        of an undirected graph one direction is asked for. By time those of one time stay together, in the later split.
        """
        arrays, links = self.all.arrays, self.all.links
        can_be_held = links[0] != links[1] if self.labels is None else self._labelled(self.labels)
        if self.time is not None:
            check_same_times(self.all, self.time)
        find_out = settled if self.labels is None and self.time is None else both_ways
        undirected = find_out(self.all, self.undirected)
        pairs = Pairs.of(links, self.all.graph.num_nodes, undirected or self.labels is not None)
        is_asked = can_be_held & pairs.one_direction(links, seed) if undirected else can_be_held
        if self.time is None:
            graph, rows, ids = self._at_random(shares, pairs, can_be_held, is_asked, seed)
        else:
            graph = without_edges(self.all.graph)
            rows = by_time(as_integers(arrays[self.time]), is_asked, {name: float(of) for name, of in shares.items()})
            ids = rows
        carried = arrays if self.labels is not None else {} if self.time is None else {self.time: arrays[self.time]}
        edges, false, held = dict[str, Tensor](), dict[str, Tensor](), dict[str, Arrays]()
        for name, rows_of in rows.items():
            edges[name] = self.all.ends.in_types(links[:, rows_of])
            if carried:
                held[name] = {array: of[rows_of] for array, of in carried.items()}
            if self.labels is None:
                times = None if self.time is None else arrays[self.time][rows_of]
                false[name] = self._false_ends(links[:, rows_of], ids[name], times, negatives, seed)
        return HeldBack(graph, edges, false, undirected, held)

    def _labelled(self, name: str) -> Tensor:
        labels = self.all.labels(name)
        check_classes(name, labels)
        return is_labelled(labels)

    def _at_random(
        self,
        shares: Mapping[str, float | Tensor],
        pairs: Pairs,
        can_be_held: Tensor,
        is_asked: Tensor,
        seed: int,
    ) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
        """Choose pairs of nodes: with labels all edges between them that are asked for, otherwise one of each.

        Return the graph without them, for each name their places among the edges of their
        type, and a number for each, by which false receivers are drawn.
        """
        choice = pairs.of_edge[can_be_held].unique()
        held = held_pairs(shares, choice, pairs.of_edge, seed)
        is_held, rows = torch.zeros_like(pairs.numbers, dtype=torch.bool), dict[str, Tensor]()
        asked = is_asked.nonzero().view(-1)
        first = torch.full_like(pairs.numbers, len(is_asked)).scatter_reduce(0, pairs.of_edge[asked], asked, "amin")
        for name, which in held.items():
            of_name = torch.zeros_like(is_held)
            of_name[which] = True
            is_held |= of_name
            rows[name] = first[which] if self.labels is None else asked[of_name[pairs.of_edge[asked]]]
        graph = self._left(pairs, is_held)
        if self.all.reverse is not None and self.labels is not None:
            graph = Edges(graph, self.all.reverse).without_array(self.labels)
        return graph, rows, {name: torch.searchsorted(choice, which) for name, which in held.items()}

    def _left(self, pairs: Pairs, is_held: Tensor) -> Graph:
        """The graph without the held edges."""
        kept = torch.ones(self.all.graph.num_edges, dtype=torch.bool)
        kept[self.all.at] = ~is_held[pairs.of_edge]
        if (back := self.all.back) is not None:
            numbers = numbers_of(back.links.flip(0), self.all.graph.num_nodes, undirected=pairs.undirected)
            kept[back.at] = ~torch.isin(numbers, pairs.numbers[is_held])
        return without_edges(self.all.graph, kept)

    def _false_ends(self, edges: Tensor, ids: Tensor, times: Tensor | None, count: int, seed: int) -> Tensor:
        """False receivers for each edge, by their ids in their type."""
        graph, ends = self.all.graph, self.all.ends
        avoided, candidates, at = edges[:1], Candidates(ends.receivers), None
        if self.time is not None and times is not None:
            there = times_of_receivers(graph, self.time, self.all.kind[2])
            avoided, candidates = edges, Candidates.of(ends.receivers, there, ends.receivers.start)
            at = Moments(time_order(graph, self.time), as_integers(times))
        drawn_by = key(seed + Purpose.LINKS, 0, 0, FALSE_ENDS), candidates, ends.target_type.number, at
        drawn, without = draw_receivers(graph, avoided, ids, count, *drawn_by)
        if without.numel():
            sender = int(edges[0][without[0]]) - ends.senders.start
            if times is None:
                raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
            raise ValueError(
                f"At time {times[without[0]].item()} node {sender} sent to all nodes that were there, or there was no "
                "other: there is no false receiver to draw. Leave that event out."
            )
        return drawn - ends.receivers.start
