"""Whole rows of some nodes of a graph, and the nodes of a graph with types in the order of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph, typed_graph
from lightning_gnn_dist.graph.rows import edge_positions, starts_of
from lightning_gnn_dist.graph.typed.build import types_of
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.partition.base import Partition


def whole_rows(graph: Graph, nodes: Tensor, number: Tensor | None = None) -> Graph:
    """The whole rows of some nodes with their arrays, in RAM.

    Args:
        graph: Has them.
        nodes: Ids, those of the first node type first, and so on.
        number: The new id of each node, by which senders are called. Default: the old ones.
    """
    indptr = starts_of(graph.indptr[nodes + 1] - graph.indptr[nodes])
    positions = edge_positions(graph.indptr, nodes)
    pieces = [graph.indices[at] for at in positions.split(EDGES_AT_ONCE)]
    if number is not None:
        pieces = [number[senders.to(torch.int64)] for senders in pieces]
    senders = torch.cat([graph.indices[:0] if number is None else number[:0], *pieces])
    types = graph.types
    return typed_graph(indptr, senders, types_of(types, nodes, positions, types.sender_offsets or types.offsets))


def order_of_types(types: GraphTypes, partition: Partition) -> Tensor:
    """The nodes of a typed graph in the order of their ids in the whole that shards make: by type, then by shard."""
    kinds = torch.arange(len(types.node_types)).repeat_interleave(torch.tensor(list(types.num_nodes.values())))
    return (kinds * partition.num_parts + partition.assignment).argsort(stable=True)
