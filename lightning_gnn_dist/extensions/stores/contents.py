"""What a pair of PyG's ``FeatureStore`` and ``GraphStore`` holds of each type, read in bounded pieces."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import holds_integers, shown
from lightning_gnn_dist.graph.convert import is_of_edges
from lightning_gnn_dist.graph.typed.names import EdgeType, OneType

if TYPE_CHECKING:
    from torch_geometric.data import FeatureStore, GraphStore

BYTES_AT_ONCE = 1 << 26  # of features that are asked of a store at once, if a number takes 8 bytes
_LAYOUTS = ("coo", "csc", "csr")  # which one is read where a store has several of one type

# By type, or None in its place if there are none.
Features = dict[Any, dict[str, Tensor]]
Edges = dict[Any, tuple[Tensor, tuple[int, int] | None]]


def contents_of(data: tuple[Any, ...]) -> tuple[dict[str, dict[str, Any]], dict[EdgeType, dict[str, Any]]]:
    """What a pair of stores holds of each node type and each edge type; without types, of one type of each."""
    from torch_geometric.data import FeatureStore, GraphStore  # two seconds

    if len(data) != 2 or not (isinstance(data[0], FeatureStore) and isinstance(data[1], GraphStore)):
        raise TypeError(f"data must be (feature_store, graph_store) where it is a tuple, got {shown(data)}.")
    features, edges, whose = _tensors_of(data[0]), _edges_of(data[1]), _named(data[0])
    if None in edges:
        features, edges = _as_one_type(features, edges, whose)
    elif None in features:
        raise ValueError(f"{whose} has features {list(features[None])} of no type, but the edges have types.")
    if unknown := [group for group in features if isinstance(group, tuple) and group not in edges]:
        raise ValueError(f"{whose} has features of edges {unknown}, but there are no such edges.")
    ends = [end for source, _, target in edges for end in (source, target)]
    nodes = {}
    for kind in dict.fromkeys([*(group for group in features if isinstance(group, str)), *ends]):
        arrays = features.get(kind, {})
        nodes[kind] = {"num_nodes": _count(kind, arrays, edges)} | arrays
    return nodes, {kind: {"edge_index": pairs} | features.get(kind, {}) for kind, (pairs, _) in edges.items()}


def _as_one_type(features: Features, edges: Edges, whose: str) -> tuple[Features, Edges]:
    """Features and edges without types, by the names of one type."""
    if typed := [group for group in features if group is not None]:
        raise ValueError(f"{whose} has features of the types {typed}, but the edges have no types.")
    _, size = edges[None]
    if size is not None and size[0] != size[1]:
        raise ValueError(f"The edges have size {size}, but a graph without types has as many senders as receivers.")
    arrays, (node_type,), (edge_type,) = features.get(None, {}), OneType.node_types, OneType.edge_types
    of_edges = {name: value for name, value in arrays.items() if is_of_edges(name)}
    of_nodes = {name: value for name, value in arrays.items() if name not in of_edges}
    return {node_type: of_nodes, edge_type: of_edges}, {edge_type: edges[None]}


def _edges_of(store: GraphStore) -> Edges:
    """The edges of every type, in the order in which the store has them."""
    chosen: dict[Any, Any] = {}
    for attr in store.get_all_edge_attrs():
        known = chosen.get(attr.edge_type)
        if known is None or _LAYOUTS.index(attr.layout.value) < _LAYOUTS.index(known.layout.value):
            chosen[attr.edge_type] = attr
    if not chosen:
        raise ValueError(f"{_named(store)} has no edges: get_all_edge_attrs() is empty.")
    if None in chosen and len(chosen) > 1:
        kinds = [kind for kind in chosen if kind is not None]
        raise ValueError(f"{_named(store)} has edges of the types {kinds} and others of no type: give all of them one.")
    return {kind: _pairs(store, attr) for kind, attr in chosen.items()}


def _pairs(store: GraphStore, attr: Any) -> tuple[Tensor, tuple[int, int] | None]:
    """The senders and the receivers of one type, shape (2, E), and the numbers of nodes if they are known."""
    attr = copy.copy(attr)  # a Data writes into it
    sides = [torch.as_tensor(side).cpu() for side in store.get_edge_index(attr)]
    for side in sides:
        if side.dim() != 1 or not holds_integers(side):
            raise ValueError(f"{_named(store)} gives edges of {attr.edge_type} as {shown(side)}: ids are integers.")
    pointers = {"coo": None, "csr": 0, "csc": 1}[attr.layout.value]
    if pointers is not None:
        sides[pointers] = _spread(store, attr, sides[pointers], len(sides[1 - pointers]))
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{_named(store)} gives {len(sides[0]):,} senders and {len(sides[1]):,} receivers of {attr.edge_type}: an "
            "edge needs both."
        )
    size = None if attr.size is None or None in attr.size else (int(attr.size[0]), int(attr.size[1]))
    return torch.stack([side.to(torch.int64) for side in sides]), size


def _spread(store: GraphStore, attr: Any, pointers: Tensor, num_edges: int) -> Tensor:
    """The node of each edge, where a store has pointers to where the edges of each node begin."""
    counts = pointers.diff()
    if not len(pointers) or int(pointers[0]) != 0 or int(pointers[-1]) != num_edges or bool((counts < 0).any()):
        raise ValueError(
            f"{_named(store)} gives pointers of {attr.edge_type} ({attr.layout.value}) that do not begin at 0, fall, "
            f"or do not end at {num_edges:,}, the number of edges."
        )
    return torch.arange(len(counts)).repeat_interleave(counts)


def _count(kind: str, arrays: dict[str, Tensor], edges: Edges) -> int:
    """How many nodes a type has, as the sizes of its edges say, or its features show."""
    for (source, _, target), (_, size) in edges.items():
        if size is not None and kind in (source, target):
            return size[0] if kind == source else size[1]
    if arrays:
        return len(next(iter(arrays.values())))
    of_type = f" of type {kind!r}" if kind else ""
    raise ValueError(
        f"How many nodes{of_type} there are is not known: give a feature, or put_edge_index(..., size=...)."
    )


def _tensors_of(store: FeatureStore) -> Features:
    """All features, by group and name."""
    found: Features = {}
    for attr in store.get_all_tensor_attrs():
        group = attr.group_name if attr.is_set("group_name") else None
        found.setdefault(group, {})[attr.attr_name] = _tensor(store, attr)
    return found


def _tensor(store: FeatureStore, attr: Any) -> Tensor:
    """One feature, asked for by ids in increasing order, as a loader of PyG asks."""
    group = attr.group_name if attr.is_set("group_name") else None
    what = attr.attr_name if group is None else (group, attr.attr_name)
    attr = copy.copy(attr)
    attr.group_name, attr.index = group, None
    size = store.get_tensor_size(attr)
    if size is None or not len(size):
        raise ValueError(f"{_named(store)} tells no size of {what!r}: it must have a row for each node or edge.")
    at_once = max(1, BYTES_AT_ONCE // (8 * max(1, torch.Size(size[1:]).numel())))
    whole: Tensor | None = None
    for start in range(0, size[0], at_once):
        attr.index = torch.arange(start, min(start + at_once, size[0]))
        rows = store.get_tensor(attr)
        if not isinstance(rows, Tensor | np.ndarray) or rows.shape != (len(attr.index), *size[1:]):
            raise ValueError(
                f"{_named(store)} gives {shown(rows)} for {len(attr.index):,} rows of {what!r}, whose size it says is "
                f"{tuple(size)}."
            )
        rows = torch.as_tensor(rows).detach().cpu()
        whole = rows.new_empty(tuple(size)) if whole is None else whole
        whole[start : start + len(rows)] = rows
    return torch.empty(tuple(size)) if whole is None else whole


def _named(store: object) -> str:
    return type(store).__name__
