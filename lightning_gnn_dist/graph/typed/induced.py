"""The subgraph of some nodes of a graph, with types or without."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, Lookup, induced_rows, starts_of, take_rows
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of


def induced(
    indptr: Tensor, indices: Tensor, types: GraphTypes, nodes: Tensor, receives: Tensor | None = None
) -> tuple[Tensor, Tensor, GraphTypes]:
    """The graph of ``nodes`` and the edges among them, in RAM. Each type's ``n_id`` holds the nodes' ids in it.

    Args:
        indptr: Where each row starts.
        indices: The in-neighbours, row after row.
        types: The types of the graph.
        nodes: Ids, those of the first node type first, and so on.
        receives: Which of them keep their rows. Default: all.
    """
    number, _ = types.to_local(nodes)
    if bool((number[1:] < number[:-1]).any()):
        raise ValueError("nodes must be in the order of their types, where ids increase: give nodes.sort().values.")
    kept, receivers = [nodes[:0]], nodes if receives is None else nodes[receives]
    starts, senders, _ = induced_rows(
        indptr, indices, {}, receivers, Lookup(nodes), index_dtype(nodes.numel()), kept.append
    )
    if receives is not None:
        starts = starts_of(torch.zeros_like(nodes).masked_scatter_(receives, starts.diff()))
    return starts, senders, types_of(types, nodes, torch.cat(kept))


def types_of(
    types: GraphTypes, nodes: Tensor, edges: Tensor, sender_offsets: tuple[int, ...] | None = None
) -> GraphTypes:
    """The types of some nodes and edges of a typed graph, with their arrays. Each type's ``n_id`` holds the nodes' ids.

    Args:
        types: The types of the graph.
        nodes: Ids, those of the first node type first, and so on.
        edges: The edges into them, row after row, by their positions in the graph.
        sender_offsets: That of the new types.
    """
    number, local = types.to_local(nodes)
    if len(types.edge_types) > 1:
        kinds, place = types.edge_type[edges], places(types.edge_type, edges, len(types.edge_types))
    else:  # no byte for each
        kinds, place = torch.zeros(1, dtype=types.edge_type.dtype).expand(edges.numel()), edges
    counts = torch.bincount(number, minlength=len(types.node_types)).tolist()
    node_arrays = {}
    for kind, ids in zip(types.node_types, local.split(counts), strict=True):
        node_arrays[kind] = {name: take_rows(array, ids) for name, array in types.node_arrays[kind].items()}
        node_arrays[kind].setdefault("n_id", ids)
    edge_arrays = {}
    for index, edge_type in enumerate(types.edge_types):
        of_type = place[kinds == index] if types.edge_arrays[edge_type] else place[:0]
        edge_arrays[edge_type] = {name: take_rows(a, of_type) for name, a in types.edge_arrays[edge_type].items()}
    num_edges = tuple(torch.bincount(kinds, minlength=len(types.edge_types)).tolist())
    made = (types.node_types, offsets_of(counts), types.edge_types, num_edges, kinds, node_arrays, edge_arrays)
    return GraphTypes(*made, types.time, sender_offsets=sender_offsets)


def places(edge_type: Tensor, positions: Tensor, num_types: int) -> Tensor:
    """Where each edge, given by its position in the graph, stands among the edges of its type.

    It reads all of ``edge_type`` once, in pieces.
    """
    order = positions.argsort()
    out, before = torch.empty_like(positions), torch.zeros(num_types, dtype=torch.int64)
    reach = max(edge_type.numel(), 1) + EDGES_PER_PIECE  # no edges are one piece, too
    ends = torch.searchsorted(positions[order], torch.arange(0, reach, EDGES_PER_PIECE))
    for number, piece in enumerate(edge_type.split(EDGES_PER_PIECE)):
        kinds = piece.to(torch.int64)
        counts = torch.bincount(kinds, minlength=num_types)
        by_type = torch.argsort(kinds, stable=True)
        rank = torch.empty_like(by_type)
        rank[by_type] = torch.arange(kinds.numel()) + (before - counts.cumsum(0) + counts).repeat_interleave(counts)
        some = order[ends[number] : ends[number + 1]]
        out[some] = rank[positions[some] - number * EDGES_PER_PIECE]
        before += counts
    return out
