"""Labels of edges: the array that holds them, which edges have one, and what batches show of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.extensions.links.targets import LABEL, name_of_targets
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.graph.convert import EDGE_IDS
from lightning_gnn_dist.graph.graph import Graph, checked_graph, typed_graph
from lightning_gnn_dist.graph.typed.names import EdgeType

_GIVEN = "edge_given_labels"  # of labels that came as a tensor


def arrays_of_edges(graph: Graph, edge_type: EdgeType | None) -> Mapping[str, Tensor]:
    """What the edges of a type carry; without types what all carry."""
    return graph.types.edge_arrays[edge_type or graph.types.edge_types[0]]


def with_edge_arrays(graph: Graph, edge_type: EdgeType | None, arrays: Mapping[str, Tensor]) -> Graph:
    """The same graph, in RAM, whose edges of a type carry these arrays and no others."""
    if edge_type is None:
        return checked_graph(graph.indptr, graph.indices, graph.node_arrays, arrays, num_senders=graph.num_senders)
    types = replace(graph.types, edge_arrays={**graph.types.edge_arrays, edge_type: arrays})
    return typed_graph(graph.indptr, graph.indices, types, node_arrays=vars(graph).get("node_arrays"))


def without_labels(graph: Graph, edge_type: EdgeType | None, name: str) -> Graph:
    """The same graph, whose edges of a type do not carry the array ``name``."""
    left = {array: rows for array, rows in arrays_of_edges(graph, edge_type).items() if array != name}
    shown = with_edge_arrays(graph, edge_type, left)
    shown.path = graph.path
    return shown


def taken_masks(
    graph: Graph, edge_type: EdgeType | None, shares: Mapping[str, float | str]
) -> tuple[Graph, dict[str, Any]]:
    """The graph without the masks that ``shares`` names arrays of, and for each name of a split its share or mask."""
    named = {name: share for name, share in shares.items() if isinstance(share, str)}
    if not named:
        return graph, dict(shares)
    arrays, taken = arrays_of_edges(graph, edge_type), dict[str, Tensor]()
    for name, array in named.items():
        if array not in arrays:
            whose = "Edges" if edge_type is None else f"Edges of type {edge_type}"
            raise ValueError(
                f"{name} names {shown(array)}, and {whose[0].lower()}{whose[1:]} carry no array of that name (they "
                f"have: {shown(sorted(arrays))}): set it in the data, a boolean per edge, or give a share such as 0.1."
            )
        if arrays[array].dtype != torch.bool or arrays[array].dim() != 1:
            raise ValueError(f"{name}: {array} must hold one boolean for each edge, got {shown(arrays[array])}.")
        taken[name] = arrays[array]
    left = {name: rows for name, rows in arrays.items() if name not in named.values()}
    return with_edge_arrays(graph, edge_type, left), taken


def named_labels(graph: Graph, edge_type: EdgeType | None, labels: str | Tensor | None) -> tuple[Graph, str | None]:
    """The graph with the labels as an array of its edges, if there are any, and the name of that array."""
    if labels is None:
        return graph, None
    if not isinstance(labels, Tensor):
        check_word("labels", labels, "edge_rating")
        return graph, labels
    arrays = arrays_of_edges(graph, edge_type)
    if EDGE_IDS not in arrays:
        raise ValueError(
            "labels is a tensor in the order of data.edge_index, and edges of the graph are in another one, which it "
            "does not know: Graph.from_pyg(data, edge_ids=True) keeps it. Or let the edges carry the labels, "
            'data.edge_rating = labels, and name them, labels="edge_rating".'
        )
    places = arrays[EDGE_IDS]
    if labels.dim() == 0 or len(labels) <= int(places.max() if places.numel() else -1):
        raise ValueError(f"labels must have a row for each edge of data.edge_index, got {shown(labels)}.")
    return with_edge_arrays(graph, edge_type, {**arrays, _GIVEN: labels.detach()[places]}), _GIVEN


def array_of_edges(graph: Graph, edge_type: EdgeType | None, argument: str, name: str) -> Tensor:
    """The array of the edges of a type that an argument names; refused if they have none of that name."""
    arrays = arrays_of_edges(graph, edge_type)
    if name not in arrays:
        whose = "edges" if edge_type is None else f"edges of type {edge_type}"
        raise ValueError(
            f"{argument} names {shown(name)}, and {whose} carry no array of that name (they have: "
            f"{shown(sorted(arrays))}): set it in the data before Graph.from_pyg(data)."
        )
    return arrays[name]


def checked_labels(graph: Graph, edge_type: EdgeType | None, name: str) -> Tensor:
    """The array ``name`` of the edges of a type; one that holds no labels is refused."""
    labels = array_of_edges(graph, edge_type, "labels", name)
    check_labels(name, labels)
    return labels


def check_labels(name: str, labels: Tensor) -> None:
    """Refuse infinite labels, and negative classes other than -1."""
    if labels.is_floating_point():
        if bool(labels.isinf().any()):
            raise ValueError(f"labels ({name}) hold infinity: put NaN for an edge without a label.")
    elif labels.is_complex():
        raise ValueError(f"labels ({name}) are complex: store their parts as two columns of real numbers.")
    elif labels.numel() and int(labels.min()) < -1:
        raise ValueError(
            f"labels ({name}) hold {int(labels.min())}: integers are classes, counted from 0, and -1 is no label. "
            "Store numbers to be predicted as floating point numbers, with NaN for no label."
        )


def check_classes(name: str, labels: Tensor) -> None:
    """Refuse labels without which there is nothing to learn."""
    known = labels[is_labelled(labels)]
    if not known.numel():
        raise ValueError(f"labels ({name}): no edge has one. -1 and NaN stand for none.")
    if not known.is_floating_point() and known.dim() == 1 and bool((known == known[0]).all()):
        raise ValueError(
            f"labels ({name}): all edges that have one are of class {int(known[0])}. Number classes from 0; -1 stands "
            "for no label."
        )


def check_no_negatives(*, given: bool) -> None:
    """Refuse false edges beside labels."""
    if given:
        raise ValueError("negatives are for splits without labels: false edges have none. Leave negatives out.")


def targets_carry(name: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What batches say of the edges that they ask for, by the name there: their label, and what else they carry."""
    return {LABEL if array == name else name_of_targets(array): rows for array, rows in arrays.items()}


def no_label(labels: Tensor) -> float:
    """The value that stands for no label."""
    if labels.is_floating_point():
        return float("nan")
    if not labels.dtype.is_signed:  # bool as well
        raise ValueError(
            f"labels are {labels.dtype}, where no number stands for an edge without a label, as hide=False needs: "
            "store them as int64, or leave hide out."
        )
    return -1
