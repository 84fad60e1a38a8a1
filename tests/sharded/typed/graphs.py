"""A small typed graph in shards, and the same graph whole, numbered by hand as the shards number it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist import Graph, GraphTypes, Partition
from lightning_gnn_dist.graph.graph import typed_graph
from tests.graph.typed.graphs import small


def some_graph(seed: int = 0) -> Graph:
    """Arrays of many widths and types, on nodes and edges; one type has no arrays, and one edge type no edges."""
    data = small(seed)
    del data["author"].train_mask
    data["paper"].val_mask = ~data["paper"].train_mask
    data["author"].age = torch.arange(7, dtype=torch.int16)
    data["author", "writes", "paper"].edge_weight = torch.rand(30, generator=torch.Generator().manual_seed(seed))
    return Graph.from_pyg(data)


def some_partition(graph: Graph, num_parts: int, seed: int = 1) -> Partition:
    """Parts of unequal sizes. The last one has a single node, so nodes of one type alone."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.rand(graph.num_nodes, generator=generator).mul(num_parts**2 - 1).sqrt().int()
    owner.clamp_(max=max(num_parts - 2, 0))
    owner[torch.arange(num_parts - 1) * 2] = torch.arange(num_parts - 1).int()
    owner[-1] = num_parts - 1
    return Partition(owner, num_parts)


def in_order_of_shards(graph: Graph, partition: Partition) -> Graph:
    """The same graph: its nodes of each type are in the order of their shards, and its rows as they were."""
    types = graph.types
    assert types is not None
    owner, kinds = partition.assignment.tolist(), types.type_of(torch.arange(graph.num_nodes)).tolist()
    order = sorted(range(graph.num_nodes), key=lambda node: (kinds[node], owner[node], node))
    number = {old: new for new, old in enumerate(order)}
    bounds = graph.indptr.tolist()
    edges = [edge for node in order for edge in range(bounds[node], bounds[node + 1])]
    starts = torch.tensor([0, *(bounds[node + 1] - bounds[node] for node in order)]).cumsum(0)
    senders = torch.tensor([number[sender] for sender in graph.indices[edges].tolist()], dtype=graph.indices.dtype)
    nodes: dict[str, dict[str, Tensor]] = {}
    for i, kind in enumerate(types.node_types):
        ids = torch.tensor([node - types.offsets[i] for node in order if kinds[node] == i], dtype=torch.int64)
        nodes[kind] = {name: array[ids] for name, array in types.node_arrays[kind].items()} | {"n_id": ids}
    of_edges = {}
    for i, edge_type in enumerate(types.edge_types):
        place = {edge: row for row, edge in enumerate(types.edges_of(edge_type).tolist())}
        rows = [place[edge] for edge in edges if int(types.edge_type[edge]) == i]
        of_edges[edge_type] = {name: array[rows] for name, array in types.edge_arrays[edge_type].items()}
    same = types.node_types, types.offsets, types.edge_types, types.num_edges
    made = GraphTypes(*same, types.edge_type[edges], nodes, of_edges, types.time, types.seeds)
    return typed_graph(starts, senders, made)
