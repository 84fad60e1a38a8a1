"""Holds edges back, at random or the last: to be told from false ones, or with their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_at_least_if_given,
    check_instance,
    check_seed,
    check_word,
    is_number,
    shown,
)
from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.extensions.links.edges import (
    Edges,
    Reverse,
    both_ways,
    check_directions,
    check_same_times,
    check_times_of_edges,
    labelled,
    numbers_of,
    settled,
)
from lightning_gnn_dist.extensions.links.link_split import LinkSplit, check_no_negatives
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers
from lightning_gnn_dist.extensions.temporal.time_split import parted_by_time
from lightning_gnn_dist.extensions.temporal.times import as_integers, time_order, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.names import EdgeType

SPLIT, FALSE_ENDS = range(2)  # what is drawn
Places = dict[str, Tensor]  # by "val" and "test"
Shares = Mapping[str, float | Tensor]  # by "val" and "test": of all, or which edges are marked


def split_edges(
    graph: Graph,
    val: float | str = 0.05,
    test: float | str = 0.1,
    seed: int = 0,
    *,
    negatives: int | None = None,
    undirected: bool | None = None,
    edge_type: EdgeType | None = None,
    reverse: Reverse = "auto",
    labels: str | None = None,
    time: str | None = None,
) -> LinkSplit:
    """Hold edges back for validation and testing: among false ones that they will be ranked with, or with their labels.

    An undirected graph is split by pairs of nodes: both directions and all copies are held back together, and one
    direction, drawn at random, is evaluated. The receiver of a held edge competes with ``negatives`` nodes that the
    sender has no edge to in the whole graph. Loops stay in the graph. Everything is done in RAM.

    With ``labels`` there are no false edges. Shares are of the pairs of nodes with a label between them: all edges
    between two nodes are held together, and each that has a label is evaluated. Those of -1 or NaN have none.

    Args:
        graph: All edges. The result leaves out its masks, which split nodes.
        val: Share of the edges (or pairs) for validation, or the name of a boolean edge array that marks them.
        test: The same for testing: a share if ``val`` is one, or a name or 0.
        seed: The same seed gives the same split.
        negatives: False edges for each true one. Default: 100.
        undirected: Whether the graph holds both directions of every edge, with the same arrays if there are labels, so
            that one of them is asked for. Default: it is found out.
        edge_type: Of a graph with types, the one whose edges are held back: ``("author", "writes", "paper")``. Edges of
            other types stay.
        reverse: The edge type that holds the same links turned round, from which held ones go, too: ``"auto"`` to find
            it by its name, ``rev_...``, None if there is none.
        labels: Name of the edge array with what is to be predicted. Default: there are none.
        time: Name of the edge array that says when each edge was there. The last are held, and stay in the graph, for a
            ``TemporalSampler`` shows each what was before it. Default: edges are held back at random.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    edges = Edges.named(graph, edge_type)
    if labels is not None:
        check_no_negatives(given=negatives is not None)
        check_word("labels", labels, "edge_rating")
    _check_numbers(val, test, seed, negatives, time)
    check_directions(edges, undirected)
    shares = {name: _share(edges, name, share) for name, share in (("val", val), ("test", test))}
    edges = Edges(edges.without([str(val), str(test)]), edges.kind).reversed_by(reverse)
    if time is not None:
        check_times_of_edges(edges, time, labels, is_sure=reverse != "auto")
    splitting = Splitting(edges, labels, time, undirected, int(seed))
    return splitting.split(shares, 100 if negatives is None else int(negatives))


def _check_numbers(val: float | str, test: float | str, seed: int, negatives: int | None, time: str | None) -> None:
    if isinstance(val, str) or isinstance(test, str):
        if not all(isinstance(share, str) or (is_number(share) and share == 0) for share in (val, test)):
            raise ValueError(
                f"val and test must be two shares, or two names of edge arrays that mark edges (or one, and 0 for the "
                f"other), got {shown(val)} and {shown(test)}."
            )
        if time is not None:
            raise ValueError(f"time={shown(time)} decides which edges are held: give val and test as shares.")
    elif not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(f"val and test are shares that leave edges to train on, got {shown(val)} and {shown(test)}.")
    check_seed(seed)
    check_at_least_if_given(1, **{"negatives, for each held edge,": negatives})


def _share(edges: Edges, name: str, share: float | str) -> float | Tensor:
    """A share, or a boolean for each edge from the array that is named."""
    if not isinstance(share, str):
        return float(share)
    marks = edges.array(name, share, ", a boolean per edge, or give a share such as 0.1")
    if marks.dtype != torch.bool or marks.dim() != 1:
        raise ValueError(f"{name}: {share} must hold one boolean for each edge, got {shown(marks)}.")
    return marks


class Splitting:
    """The edges of a type, some of which are to be held back: at random, those that are marked, or the last ones.

    At random, both directions of a pair of nodes, and with labels all edges between them, are held together, and of an
    undirected graph one direction is asked for. By time those of one time stay together, in the later split.

    Args:
        edges: The edges.
        labels: The name of the array of their labels, if they are held back with these.
        time: The name of the array of their times, if the last of them are held back.
        undirected: Whether both directions of each are there, and carry the same. None: find out.
        seed: Decides what is random.
    """

    def __init__(self, edges: Edges, labels: str | None, time: str | None, undirected: bool | None, seed: int) -> None:
        self._edges, self._labels, self._time, self._seed = edges, labels, time, seed + Purpose.LINKS
        links = edges.links
        self._can_be_held = links[0] != links[1] if labels is None else labelled(edges, labels)
        if time is not None:
            check_same_times(edges, time)
        find_out = settled if labels is None and time is None else both_ways
        self._undirected = find_out(edges, undirected)
        self._are_pairs = self._undirected or labels is not None  # both directions together
        numbers = numbers_of(links, edges.graph.num_nodes, undirected=self._are_pairs)
        self._numbers, self._pair = numbers.unique(return_inverse=True)  # of all pairs of nodes, and that of each edge
        self._asked = self._can_be_held
        if self._undirected:  # one direction, drawn for each pair; loops lead there
            flips = draw_bits(key(self._seed, 0, 0, SPLIT), self._numbers)[self._pair]
            self._asked = self._asked & ((links[0] == links[1]) | ((links[0] < links[1]) ^ flips))

    def split(self, shares: Shares, negatives: int) -> LinkSplit:
        """Hold shares of the edges back, each with so many false receivers, where there are no labels."""
        edges, time, ends = self._edges, self._time, self._edges.ends
        graph, rows, ids = self._at_random(shares) if time is None else self._last(shares, time)
        carried = edges.arrays if self._labels is not None else {} if time is None else {time: edges.arrays[time]}
        arrays = {name: {array: of[at] for array, of in carried.items()} for name, at in rows.items() if carried}
        false = dict[str, Tensor]()
        if self._labels is None:
            false = {name: self._false_ends(at, ids[name], negatives) for name, at in rows.items()}
        held = {name: ends.in_types(edges.links[:, at]) for name, at in rows.items()}
        of_types = self._undirected, edges.edge_type, edges.reverse
        return LinkSplit(graph, held, false, *of_types, self._labels, arrays, time)

    def _at_random(self, shares: Shares) -> tuple[Graph, Places, Places]:
        """Choose pairs of nodes: with labels all edges between them that are asked for, otherwise one of each.

        Return the graph without them, for each name their places among the edges of their
        type, and a number for each, by which false receivers are drawn.
        """
        edges, choice = self._edges, self._pair[self._can_be_held].unique()
        held = self._marked(shares, choice) or self._dealt(shares, choice)
        is_held, asked = torch.zeros_like(self._numbers, dtype=torch.bool), self._asked.nonzero().view(-1)
        is_held[torch.cat([choice[:0], *held.values()])] = True
        of_asked, rows = self._pair[asked], Places()
        first = torch.full_like(self._numbers, len(self._pair)).scatter_reduce(0, of_asked, asked, "amin")
        for name, pairs in held.items():
            rows[name] = first[pairs] if self._labels is None else asked[torch.isin(of_asked, pairs)]
        kept = torch.ones(edges.graph.num_edges, dtype=torch.bool)
        kept[edges.at] = ~is_held[self._pair]
        if (back := edges.back) is not None:
            numbers = numbers_of(back.links.flip(0), edges.graph.num_nodes, undirected=self._are_pairs)
            kept[back.at] = ~torch.isin(numbers, self._numbers[is_held])
        graph = _with_edges(edges.graph, kept)
        if edges.reverse is not None and self._labels is not None:
            graph = Edges(graph, edges.reverse).without([self._labels])
        return graph, rows, {name: torch.searchsorted(choice, pairs) for name, pairs in held.items()}

    def _dealt(self, shares: Shares, choice: Tensor) -> dict[str, Tensor]:
        """Which pairs are held back under each name, as a share of them, if any are."""
        total = len(choice)
        counts = {name: round(float(share) * total) for name, share in shares.items()}
        if not total and any(shares.values()):
            raise ValueError(
                "There are no edges to hold back (or pairs, without loops): choose an edge type that has some."
            )
        for name, share in shares.items():
            if share and not counts[name]:
                raise ValueError(
                    f"{name}={share} of {total} edges (or pairs, without loops) is none: give a larger share, or "
                    f"{name}=0."
                )
        if any(counts.values()) and sum(counts.values()) == total:
            raise ValueError(
                f"val and test would hold all {total} edges (or pairs, without loops), and none is left to train on: "
                "give smaller shares."
            )
        order = permutation(total, self._seed, SPLIT)[: sum(counts.values())]
        held = dict(zip(counts, order.split(list(counts.values())), strict=True))
        return {name: choice[which] for name, which in held.items() if len(which)}

    def _marked(self, shares: Shares, choice: Tensor) -> dict[str, Tensor]:
        """Which pairs are held back under each name because one of their edges is marked, if some are."""
        marked = {name: self._pair[mask].unique() for name, mask in shares.items() if isinstance(mask, Tensor)}
        held = {name: pairs[torch.isin(pairs, choice)] for name, pairs in marked.items()}
        if empty := [name for name, pairs in held.items() if not pairs.numel()]:
            raise ValueError(
                f"{empty[0]} marks no edge that can be held back (loops, and edges without a label, cannot)."
            )
        together, counts = torch.cat([choice[:0], *held.values()]).unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(
                f"val and test both mark edges between the same two nodes ({int((counts > 1).sum())} such pairs): both "
                "directions and all copies are held back together, so mark a pair in one of them."
            )
        if held and together.numel() == choice.numel():
            raise ValueError("val and test mark all edges, and none is left to train on: mark fewer.")
        return held

    def _last(self, shares: Shares, time: str) -> tuple[Graph, Places, Places]:
        """Choose the last events of those that are asked for, as :meth:`_at_random` does; all stay in the graph."""
        arrays, val, test = self._edges.arrays, float(shares["val"]), float(shares["test"])
        found, count = parted_by_time(as_integers(arrays[time]), self._asked, val, test), int(self._asked.sum())
        is_left = bool(found.pop("train").any())
        for name, share in shares.items():
            if share and not bool(found[name].any()):
                raise ValueError(
                    f"No event is left for {name}: {name}={share} of {count} is none, or all are of one time."
                )
        if not is_left:
            raise ValueError(f"val and test would hold all {count} events, and none is left to train on: give less.")
        rows = {name: mask.nonzero().view(-1) for name, mask in found.items() if bool(mask.any())}
        graph = self._edges.graph
        return _with_edges(graph, torch.ones(graph.num_edges, dtype=torch.bool)), rows, rows

    def _false_ends(self, rows: Tensor, ids: Tensor, count: int) -> Tensor:
        """False receivers for some edges, by their ids in their type."""
        graph, ends, edges, name = self._edges.graph, self._edges.ends, self._edges.links[:, rows], self._time
        since, times, at = None, None, None
        if name is not None:
            since, times = times_of_receivers(graph, name, self._edges.kind[2]), self._edges.arrays[name][rows]
            at = Moments(time_order(graph, name), as_integers(times))
        candidates = Candidates.of(ends.receivers, since, ends.receivers.start)
        word = key(self._seed, 0, 0, FALSE_ENDS)
        drawn, without = draw_receivers(graph, edges, ids, count, word, candidates, ends.kinds[0], at)
        if without.numel():
            sender = int(edges[0][without[0]]) - ends.senders.start
            if times is None:
                raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
            raise ValueError(
                f"At time {times[without[0]].item()} node {sender} sent to all nodes that were there, or there was no "
                "other: there is no false receiver to draw. Leave that event out."
            )
        return drawn - ends.receivers.start


def _with_edges(graph: Graph, kept: Tensor) -> Graph:
    """The graph of the edges that ``kept`` marks, a boolean for each, without the masks of its nodes."""
    upto, types = torch.cat([graph.indptr[:1], kept.cumsum(0)]), graph.types
    at = {kind: kept[types.edges_of(kind)] for kind in types.edge_types}
    left = replace(
        types,
        num_edges=tuple(int(of_type.sum()) for of_type in at.values()),
        edge_type=types.edge_type[kept],
        node_arrays={
            kind: {name: array for name, array in arrays.items() if not name.endswith("_mask")}
            for kind, arrays in types.node_arrays.items()
        },
        edge_arrays={k: {name: a[at[k]] for name, a in arrays.items()} for k, arrays in types.edge_arrays.items()},
    )
    return typed_graph(upto[graph.indptr], graph.indices[kept], left)
