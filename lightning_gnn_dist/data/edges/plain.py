"""Holds links back, to be told from false ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.data.edges.dealing import FALSE_ENDS, decoded, held_pairs, numbers_of, pairs_of
from lightning_gnn_dist.data.typed.links import LinkEnds, ends_of, links_of, without_edges
from lightning_gnn_dist.engine.rng import Purpose, key
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.negatives import Candidates, draw_receivers

_FEW = 0.1  # of the links of a graph that was meant to be undirected


def split_links(
    graph: Graph,
    shares: Mapping[str, float | Tensor],
    seed: int,
    negatives: int,
    undirected: bool,
    edge_type: EdgeType | None,
    reverse: EdgeType | None,
) -> tuple[Graph, dict[str, Tensor], dict[str, Tensor]]:
    """Return the graph without held edges, these by the ids in their types, and false receivers for each."""
    (at, links), size = links_of(graph, edge_type), graph.num_nodes
    pairs, pair_of_edge = pairs_of(links, size, undirected)
    held = held_pairs(shares, torch.arange(pairs.numel()), pair_of_edge, seed)
    is_held = torch.zeros(pairs.numel() + 1, dtype=torch.bool)  # loops are pair -1
    is_held[torch.cat([*held.values(), pairs[:0]])] = True
    kept = torch.ones(graph.num_edges, dtype=torch.bool)
    kept[at] = ~is_held[pair_of_edge]
    if reverse is not None:
        back, turned = links_of(graph, reverse)
        kept[back] = ~torch.isin(numbers_of(turned.flip(0), size, undirected=undirected), pairs[is_held[:-1]])
    edges = {name: decoded(pairs[which], size, seed, undirected) for name, which in held.items()}
    ends = ends_of(graph, edge_type)
    false = {name: _false_ends(graph, some, held[name], negatives, seed, ends) for name, some in edges.items()}
    edges = {name: ends.in_types(some) for name, some in edges.items()}
    return without_edges(graph, kept), edges, false


def settled(graph: Graph, edge_type: EdgeType | None, undirected: bool | None) -> bool:
    """Whether pairs of nodes are held back, both directions together; found out where ``undirected`` is None."""
    alone, total = _without_reverse(graph, edge_type)
    if undirected and alone:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    if undirected is None and 0 < alone < _FEW * total:
        raise ValueError(
            f"{alone} of {total} edges have no reverse, and all others have one, so a model would mostly be shown what "
            "it is asked for: add the reverses that are missing (torch_geometric.utils.to_undirected), or give "
            "undirected=False, which takes both directions for edges of their own."
        )
    return alone == 0 if undirected is None else undirected


def is_undirected(graph: Graph, edge_type: EdgeType | None) -> bool:
    """Whether each link is there in both directions, among nodes of one type."""
    return _without_reverse(graph, edge_type)[0] == 0


def _without_reverse(graph: Graph, edge_type: EdgeType | None) -> tuple[int, int]:
    """How many links, each counted once and without loops, have a reverse that is none, and how many there are."""
    if edge_type is not None and edge_type[0] != edge_type[2]:
        return 1, 1
    links = links_of(graph, edge_type)[1]
    links = links[:, links[0] != links[1]]
    there, back = (numbers_of(ends, graph.num_nodes, undirected=False).unique() for ends in (links, links.flip(0)))
    return there.numel() - int(torch.isin(there, back, assume_unique=True).sum()), there.numel()


def _false_ends(graph: Graph, edges: Tensor, ids: Tensor, count: int, seed: int, ends: LinkEnds) -> Tensor:
    """False receivers for each edge, by their ids in their type."""
    false_key, kind = key(seed + Purpose.LINKS, 0, 0, FALSE_ENDS), ends.target_type
    asked = edges[:1], ids, count, false_key, Candidates(ends.receivers), kind and kind.number
    drawn, without = draw_receivers(graph, *asked)
    if without.numel():
        sender = int(edges[0][without[0]]) - ends.senders.start
        raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
    return drawn - ends.receivers.start
