"""Weights of edges, checked once for each graph."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.weighted import Array, Weights, fill_table
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.storage.mapped import MappedRows

T = TypeVar("T")

NONE: Array = np.empty(0, np.float32)  # tells a kernel that edges have no weights

Weight = Annotated[str, "edge_weight"] | None  # the name of an edge array


def edge_weights(graph: Graph, name: str) -> Array:
    """The edge array ``name`` as float32, one finite number of at least 0 for each edge.

    A float32 array is used as it is, also if it is mapped. Others are copied once: to compile kernels for another type
    would take every user some seconds.
    """
    weights: Array = checked_weights(graph, name).numpy()
    return weights


def checked_weights(graph: Graph, name: str) -> Tensor:
    """The same as :func:`edge_weights`, as a tensor on the graph's device."""
    return _kept(graph, name, "weights", lambda: _checked(graph, name))


def weights_of(graph: Graph, name: str | None, *, draws: bool) -> Weights | None:
    """What compiled draws need of the edge array ``name``.

    Args:
        graph: The graph.
        name: The edge array, or None if all edges are equally likely.
        draws: Whether any row is drawn from by its table, and not all taken whole.
    """
    if name is None:
        return None
    values = edge_weights(graph, name)
    # A graph in files may be larger than memory, so the table of a row is made whenever the row is drawn from.
    weights = checked_weights(graph, name)
    keeps = draws and not _kept(graph, name, "weights in a file", lambda: MappedRows(weights).is_read_from_file)
    return Weights(values, alias_table(graph, name).numpy() if keeps else np.empty(0, np.int64))


def alias_table(graph: Graph, name: str) -> Tensor:
    """The alias tables of all rows on the graph's device, 8 bytes for each edge."""
    return _kept(graph, name, "alias table", lambda: table_of(graph.indptr, checked_weights(graph, name)))


def table_of(indptr: Tensor, weights: Tensor) -> Tensor:
    """The alias tables of all rows, on the device of the weights; made by as many threads as torch uses."""
    starts, values = indptr.cpu().numpy(), weights.cpu().numpy()
    table = np.empty(len(values), np.int64)  # of a large array numpy asks for large pages
    pieces = max(1, torch.get_num_threads())
    bounds = np.searchsorted(starts, np.arange(1, pieces) * len(values) // pieces).tolist()
    with ThreadPoolExecutor(pieces) as threads:
        for made in [
            threads.submit(fill_table, starts, values, low, high, table)
            for low, high in pairwise([0, *bounds, len(starts) - 1])
        ]:
            made.result()
    return torch.from_numpy(table).to(weights.device)


def _kept(graph: Graph, name: str, what: str, find: Callable[[], T]) -> T:
    """Return ``find()``, called once per graph and edge array, and again after the array has changed."""
    return remembered(graph, (what, name), find, [graph.edge_arrays.get(name)])


def _checked(graph: Graph, name: str) -> Tensor:
    if name not in graph.edge_arrays:
        raise ValueError(
            f"The graph has no edge array {name!r} to weigh edges by (it has: {sorted(graph.edge_arrays)}). "
            f"Set data.{name}, one number per edge, before Graph.from_pyg(data)."
        )
    weights = graph.edge_arrays[name]
    if weights.numel() != graph.num_edges or weights.dtype == torch.bool or weights.is_complex():
        raise ValueError(
            f"Edges are weighed by one number each, but {name} has shape {tuple(weights.shape)} of {weights.dtype}."
        )
    weights = weights.to(torch.float32).contiguous().view(-1)
    for piece in weights.split(EDGES_AT_ONCE):
        _check_range(piece, name)
    return weights


def _check_range(weights: Tensor, name: str) -> None:
    wrong = ~torch.isfinite(weights) | (weights < 0)
    if bool(wrong.any()):
        raise ValueError(
            f"Weights of edges must be finite and at least 0, but {name} holds {float(weights[wrong][0])}. "
            f"For instance: data.{name} = data.{name}.nan_to_num().clamp(min=0)."
        )
