"""Whether edges are there in both directions, and carry the same in both."""

from __future__ import annotations

import torch

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.data.edges.dealing import numbers_of
from lightning_gnn_dist.data.edges.labels import arrays_of_edges
from lightning_gnn_dist.data.edges.leaks import counts_of_rows, is_same
from lightning_gnn_dist.data.typed.links import links_of
from lightning_gnn_dist.graph.convert import EDGE_IDS
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType

_FEW = 0.1  # of the links of a graph that was meant to be undirected


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


def both_ways(graph: Graph, edge_type: EdgeType | None, undirected: bool | None) -> bool:
    """Whether each edge is there as often in both directions, with the same rows; not if that was denied."""
    if undirected is False or (edge_type is not None and edge_type[0] != edge_type[2]):
        return False
    arrays = {name: array for name, array in arrays_of_edges(graph, edge_type).items() if name != EDGE_IDS}
    links = links_of(graph, edge_type)[1]
    there, back = (numbers_of(ends, graph.num_nodes) for ends in (links, links.flip(0)))
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


def _without_reverse(graph: Graph, edge_type: EdgeType | None) -> tuple[int, int]:
    """How many links, each counted once and without loops, have a reverse that is none, and how many there are."""
    if edge_type is not None and edge_type[0] != edge_type[2]:
        return 1, 1
    links = links_of(graph, edge_type)[1]
    links = links[:, links[0] != links[1]]
    there, back = (numbers_of(ends, graph.num_nodes).unique() for ends in (links, links.flip(0)))
    return there.numel() - int(torch.isin(there, back, assume_unique=True).sum()), there.numel()
