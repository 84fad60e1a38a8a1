"""Graphs with other arrays of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph, typed_graph


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
