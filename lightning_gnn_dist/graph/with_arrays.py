"""A graph with other arrays, and how much rows of its arrays take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.names import have_names


def with_arrays(graph: Graph, arrays: Mapping[str, Tensor]) -> Graph:
    """The graph with more node arrays, or others, each with a row for every node."""
    if not arrays:
        return graph
    types, of_types = graph.types, dict[str, dict[str, Tensor]]()
    for kind, known in types.node_arrays.items():
        nodes = types.nodes_of(kind)
        of_types[kind] = {**known, **{name: array[nodes.start : nodes.stop] for name, array in arrays.items()}}
    return with_arrays_of_types(graph, of_types)


def with_arrays_of_types(graph: Graph, of_types: Mapping[str, Mapping[str, Tensor]]) -> Graph:
    """The graph with these node arrays of each type."""
    types, of_all = replace(graph.types, node_arrays=of_types), vars(graph).get("node_arrays")
    return typed_graph(graph.indptr, graph.indices, types, node_arrays=of_all)


def bytes_per_node(graph: Graph) -> int:
    """Bytes of a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.nbytes for array in _all(graph.types.node_arrays)), graph.num_nodes)


def bytes_per_edge(graph: Graph) -> int:
    """Bytes of a row of all edge arrays; of a typed graph the mean over all edges, and the number of its type."""
    number = graph.types.edge_type.element_size() if have_names(graph.types) else 0
    return _mean((array.nbytes for array in _all(graph.types.edge_arrays)), graph.num_edges) + number


def bytes_of_part(graph: Graph, num_nodes: Tensor, num_edges: Tensor) -> Tensor:
    """Bytes that parts with so many nodes and edges take in RAM, the same shape."""
    per_node = bytes_per_node(graph)
    per_node += 8 if have_names(graph.types) or "n_id" not in graph.node_arrays else 0  # a part knows its nodes' ids,
    per_node += 4  # and how much of their neighbourhoods it covers
    per_edge = 4 + bytes_per_edge(graph)
    return num_nodes * (per_node + 8) + 8 + num_edges * per_edge


def numbers_per_node(graph: Graph) -> int:
    """Numbers in a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.numel() for array in _all(graph.types.node_arrays)), graph.num_nodes)


def _all(kinds: Mapping[Any, Mapping[str, Tensor]]) -> list[Tensor]:
    return [array for arrays in kinds.values() for array in arrays.values()]


def _mean(sizes: Iterable[int], count: int) -> int:
    return -(-sum(sizes) // max(count, 1))
