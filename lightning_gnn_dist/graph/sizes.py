"""How many bytes the arrays of a node and of an edge take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names


def bytes_per_node(graph: Graph) -> int:
    """Bytes of a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.nbytes for array in _all(graph.types.node_arrays)), graph.num_nodes)


def bytes_per_edge(graph: Graph) -> int:
    """Bytes of a row of all edge arrays; of a typed graph the mean over all edges, and the number of its type."""
    number = graph.types.edge_type.element_size() if have_names(graph.types) else 0
    return _mean((array.nbytes for array in _all(graph.types.edge_arrays)), graph.num_edges) + number


def numbers_per_node(graph: Graph) -> int:
    """Numbers in a row of all node arrays; of a typed graph the mean over all nodes."""
    return _mean((array.numel() for array in _all(graph.types.node_arrays)), graph.num_nodes)


def _all(kinds: Mapping[Any, Mapping[str, Tensor]]) -> list[Tensor]:
    return [array for arrays in kinds.values() for array in arrays.values()]


def _mean(sizes: Iterable[int], count: int) -> int:
    return -(-sum(sizes) // max(count, 1))
