"""Holds edges with labels back, and the labels with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_arrays, shown
from lightning_gnn_dist.data.edges.dealing import SPLIT, held_pairs, numbers_of
from lightning_gnn_dist.data.edges.labels import (
    arrays_of_edges,
    check_classes,
    check_labels,
    checked_labels,
    no_label,
    with_edge_arrays,
    without_labels,
)
from lightning_gnn_dist.data.edges.rows import counts_of_rows, is_same
from lightning_gnn_dist.data.temporal.split import is_labelled
from lightning_gnn_dist.data.typed.links import ends_of, links_of, without_edges
from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key
from lightning_gnn_dist.graph.convert import EDGE_IDS
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of, edge_positions
from lightning_gnn_dist.graph.typed.types import EdgeType

Arrays = Mapping[str, Tensor]


class HeldBack(NamedTuple):
    """What a split of edges with labels is made of.

    Attributes:
        graph: The graph to train on.
        edges: The held edges, by the ids in their types.
        arrays: What each of them carries.
        undirected: Whether the graph has both directions of each edge.
    """

    graph: Graph
    edges: dict[str, Tensor]
    arrays: dict[str, Arrays]
    undirected: bool


@dataclass(frozen=True, eq=False)
class LabelledEdges:
    """The edges of a type, some of which have labels.

    Args:
        graph: The graph that has them.
        edge_type: Their type, if the graph has types.
        reverse: The edge type that has them turned round, if there is one.
        labels: The name of the array that holds their labels.
        undirected: Whether both directions of each are there and carry the same. None: find out.
    """

    graph: Graph
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str
    undirected: bool | None

    def held_back(self, shares: Mapping[str, float | Tensor], seed: int, *, hide: bool) -> HeldBack:
        """Hold shares of the pairs of nodes with a label back, or those of edges that are marked.

        Both directions of a pair of nodes, and all of its copies, are held back together.
        """
        labels = checked_labels(self.graph, self.edge_type, self.labels)
        check_classes(self.labels, labels)
        undirected, known = both_ways(self.graph, self.edge_type, self.undirected), is_labelled(labels)
        at, links = links_of(self.graph, self.edge_type)
        pairs, pair_of_edge = numbers_of(links, self.graph.num_nodes, undirected=True).unique(return_inverse=True)
        has_label = torch.zeros(pairs.numel(), dtype=torch.bool)
        has_label[pair_of_edge[known]] = True
        can_be_held = has_label.nonzero().view(-1)
        chosen = known & one_direction(links, pairs, pair_of_edge, seed) if undirected else known
        arrays, ends = arrays_of_edges(self.graph, self.edge_type), ends_of(self.graph, self.edge_type)
        edges, carried, is_held = dict[str, Tensor](), dict[str, Arrays](), torch.zeros_like(has_label)
        for name, which in held_pairs(shares, can_be_held, pair_of_edge, seed).items():
            of_name = torch.zeros_like(has_label)
            of_name[which] = True
            rows = (of_name[pair_of_edge] & chosen).nonzero().view(-1)
            edges[name], carried[name] = ends.in_types(links[:, rows]), {n: a[rows] for n, a in arrays.items()}
            is_held |= of_name
        graph = (self._left if hide else self._unlabelled)(at, pairs, pair_of_edge, is_held)
        return HeldBack(graph, edges, carried, undirected)

    def _left(self, at: Tensor, pairs: Tensor, pair_of_edge: Tensor, is_held: Tensor) -> Graph:
        """The graph without the held edges."""
        kept = torch.ones(self.graph.num_edges, dtype=torch.bool)
        kept[at] = ~is_held[pair_of_edge]
        if self.reverse is not None:
            back, turned = links_of(self.graph, self.reverse)
            kept[back] = ~torch.isin(numbers_of(turned, self.graph.num_nodes, undirected=True), pairs[is_held])
        return self._reverse_without_labels(without_edges(self.graph, kept))

    def _unlabelled(self, at: Tensor, pairs: Tensor, pair_of_edge: Tensor, is_held: Tensor) -> Graph:
        """The whole graph, in which held edges have no label."""
        whole = without_edges(self.graph, torch.ones(self.graph.num_edges, dtype=torch.bool))
        arrays = dict(arrays_of_edges(whole, self.edge_type))
        labels = arrays.pop(self.labels)
        mask = is_held[pair_of_edge].view(-1, *[1] * (labels.dim() - 1))
        arrays[self.labels] = labels.masked_fill(mask, no_label(labels))
        return self._reverse_without_labels(with_edge_arrays(whole, self.edge_type, arrays))

    def _reverse_without_labels(self, graph: Graph) -> Graph:
        return graph if self.reverse is None else without_labels(graph, self.reverse, self.labels)


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
    if graph.types is not None and edge_type is not None:
        is_of = graph.types.edge_type[at] == graph.types.edge_types.index(edge_type)
        at, receivers = at[is_of], receivers[is_of]
        places = torch.searchsorted(graph.types.edges_of(edge_type), at)
    else:
        places = at
    known = is_labelled(arrays_of_edges(graph, edge_type)[labels][places])
    there = graph.indices[at].to(torch.int64) * graph.num_nodes + receivers
    return torch.isin(edges[0] * graph.num_nodes + edges[1], there[known])


def both_ways(graph: Graph, edge_type: EdgeType | None, undirected: bool | None) -> bool:
    """Whether each edge is there as often in both directions, with the same rows; not if that was denied."""
    if undirected is False or (edge_type is not None and edge_type[0] != edge_type[2]):
        return False
    arrays = {name: array for name, array in arrays_of_edges(graph, edge_type).items() if name != EDGE_IDS}
    links = links_of(graph, edge_type)[1]
    there, back = (numbers_of(ends, graph.num_nodes, undirected=False) for ends in (links, links.flip(0)))
    if torch.equal(*counts_of_rows(there, back, [(array, array) for array in arrays.values()])):
        return True
    if undirected:
        differs = [name for name, array in arrays.items() if not is_same(there, back, array, array)]
        if not torch.equal(*counts_of_rows(there, back, [])):
            differs.append("how often they are there")
        raise ValueError(
            f"undirected=True, but the two directions of some edge differ in {shown(differs or sorted(arrays))}: add "
            "what is missing, or leave undirected out, and each direction is asked for by itself."
        )
    return False


def one_direction(links: Tensor, pairs: Tensor, pair_of_edge: Tensor, seed: int) -> Tensor:
    """Which edges lead in the direction that was drawn for their pair of nodes; loops do."""
    flips = draw_bits(key(seed + Purpose.LINKS, 0, 0, SPLIT), pairs)[pair_of_edge]
    return (links[0] == links[1]) | ((links[0] < links[1]) ^ flips)
