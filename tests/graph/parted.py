"""Small graphs with partitions of them, and the same graphs numbered part after part."""

import torch
from torch import Tensor

from lightning_gnn_dist import Graph, Partition
from lightning_gnn_dist.graph.graph import typed_graph
from lightning_gnn_dist.graph.typed.types import GraphTypes
from tests.graph.typed.graphs import small


def small_graph(num_nodes: int = 300, num_edges: int = 3000, *, edge_arrays: bool = False) -> Graph:
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    ends[0] = ends[0] * ends[0] // num_nodes  # some nodes are named more often than others
    nodes = {
        "x": torch.randn(num_nodes, 5, generator=generator),
        "y": torch.randint(0, 3, (num_nodes,), generator=generator),
        "train_mask": torch.rand(num_nodes, generator=generator) < 0.5,
        "n_id": torch.arange(num_nodes),
    }
    nodes |= {"val_mask": ~nodes["train_mask"], "test_mask": ~nodes["train_mask"]}
    edges = {}
    if edge_arrays:
        edges["edge_attr"] = torch.randn(num_edges, 2, generator=generator)
        edges["edge_weight"] = torch.rand(num_edges, generator=generator)
    return Graph.from_edge_index(ends, num_nodes, nodes, edges)


def some_partition(graph: Graph, num_parts: int) -> Partition:
    generator = torch.Generator().manual_seed(1)
    return Partition(torch.randint(0, num_parts, (graph.num_nodes,), generator=generator).int(), num_parts)


def in_order_of_parts(graph: Graph, partition: Partition) -> Graph:
    """The same graph with its nodes numbered part after part."""
    order = partition.assignment.argsort(stable=True)
    number = order.argsort()
    rows = [graph.indices[graph.indptr[v] : graph.indptr[v + 1]].long() for v in order.tolist()]
    at = [torch.arange(int(graph.indptr[v]), int(graph.indptr[v + 1])) for v in order.tolist()]
    counts = torch.tensor([len(row) for row in rows])
    nodes = {name: array[order] for name, array in graph.node_arrays.items()}
    edges = {name: array[torch.cat(at)] for name, array in graph.edge_arrays.items()}
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Graph(indptr, number[torch.cat(rows)].to(graph.indices.dtype), nodes, edges)


def typed_graph_of_widths(seed: int = 0) -> Graph:
    """Arrays of many widths and types, on nodes and edges; one type has no arrays, and one edge type no edges."""
    data = small(seed)
    del data["author"].train_mask
    data["paper"].val_mask = ~data["paper"].train_mask
    data["author"].age = torch.arange(7, dtype=torch.int16)
    data["author", "writes", "paper"].edge_weight = torch.rand(30, generator=torch.Generator().manual_seed(seed))
    return Graph.from_pyg(data)


def uneven_partition(graph: Graph, num_parts: int, seed: int = 1) -> Partition:
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


def as_shards_number_it(graph: Graph, partition: Partition) -> Graph:
    """The same graph with its nodes, those of each type, in the order of their shards."""
    return (in_order_of_shards if graph.types.have_names else in_order_of_parts)(graph, partition)
