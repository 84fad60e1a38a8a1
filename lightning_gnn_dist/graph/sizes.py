"""How many bytes the arrays of a node and of an edge take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row


def bytes_per_node(graph: Graph) -> int:
    """Bytes of a row of all node arrays; of a typed graph the mean over all nodes."""
    if graph.types is None:
        return bytes_per_row(graph.node_arrays)
    return _mean(graph.types.node_arrays.values(), graph.num_nodes)


def bytes_per_edge(graph: Graph) -> int:
    """Bytes of a row of all edge arrays; of a typed graph the mean over all edges, and the number of its type."""
    if graph.types is None:
        return bytes_per_row(graph.edge_arrays)
    return _mean(graph.types.edge_arrays.values(), graph.num_edges) + graph.types.edge_type.element_size()


def numbers_per_node(graph: Graph) -> int:
    """Numbers in a row of all node arrays; of a typed graph the mean over all nodes."""
    if graph.types is None:
        return sum(array[:1].numel() for array in graph.node_arrays.values())
    count = sum(array.numel() for arrays in graph.types.node_arrays.values() for array in arrays.values())
    return -(-count // max(graph.num_nodes, 1))


def _mean(kinds: Iterable[Mapping[str, Tensor]], count: int) -> int:
    return -(-sum(array.nbytes for arrays in kinds for array in arrays.values()) // max(count, 1))
