"""Refuses graphs that would show a model the labels that it is asked for: compares what edges carry, row by row."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.data.edges.dealing import numbers_of
from lightning_gnn_dist.data.edges.labels import arrays_of_edges
from lightning_gnn_dist.data.temporal.split import is_labelled
from lightning_gnn_dist.data.typed.links import between, links_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType


def numbered_rows(array: Tensor) -> Tensor:
    """A number for each row, the same for equal ones. NaN equals NaN."""
    rows = array.flatten(1) if array.dim() > 1 else array[:, None]
    if rows.is_floating_point():
        rows = torch.cat([rows.nan_to_num(0.0), rows.isnan().to(rows.dtype)], 1)
    numbers: Tensor = rows.unique(dim=0, return_inverse=True)[1]
    return numbers


def counts_of_rows(there: Tensor, back: Tensor, arrays: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """How often each edge occurs among some, and among others.

    Args:
        there: A number for each edge of the first.
        back: A number for each of the others.
        arrays: What the first carry and what the others carry. Edges are equal if their numbers and all of it are.

    Returns:
        A count for each distinct edge among the first, and one among the others.
    """
    kinds = torch.cat([there, back]).unique(return_inverse=True)[1]
    for array, other in arrays if kinds.numel() else ():
        kinds = (kinds * kinds.numel() + numbered_rows(torch.cat([array, other]))).unique(return_inverse=True)[1]
    first, others = kinds.split([there.numel(), back.numel()])
    count = int(kinds.max()) + 1 if kinds.numel() else 0
    return torch.bincount(first, minlength=count), torch.bincount(others, minlength=count)


def is_same(there: Tensor, back: Tensor, array: Tensor, other: Tensor) -> bool:
    """Whether edges with these numbers carry the same rows as those with other numbers, in any order and number."""
    first, others = counts_of_rows(there, back, [(array, other)])
    return torch.equal(first > 0, others > 0)


def check_other_types(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, name: str) -> None:
    """Refuse labels on edges of other types between the same types of nodes, which may be the same links."""
    if edge_type is None:
        return
    for kind in between(graph.types, edge_type[0], edge_type[2], edge_type, reverse):
        if name in arrays_of_edges(graph, kind):
            turned = reverse is None and (kind[0], kind[2]) == (edge_type[2], edge_type[0])
            raise ValueError(
                f"Edges of {kind} lead between the same types of nodes as those of {edge_type}, and have an array "
                f"{shown(name)}, too, in which batches could show the labels that are asked for: "
                + (f"if they are the same links turned round, say reverse={kind}; otherwise " if turned else "")
                + "give that array another name, or leave it out."
            )


def check_no_copies(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, name: str) -> None:
    """Refuse other arrays that hold the labels, where the edges that are asked for carry messages.

    Rows without a label may differ: held edges have none in the graph, and a copy may tell theirs.
    """
    labels = arrays_of_edges(graph, edge_type)[name]
    known = is_labelled(labels).nonzero().view(-1)
    if not known.numel():
        return
    ours = labels[known].reshape(len(known), -1)
    copies = [
        array
        for array, rows in arrays_of_edges(graph, edge_type).items()
        if array != name and _is_as_wide(rows, labels) and _same(rows[known].reshape(ours.shape), ours)
    ]
    if reverse is not None:
        links = links_of(graph, edge_type)[1][:, known]
        copies += [f"{array} of {reverse}" for array in _copies_turned_round(graph, reverse, name, links, ours)]
    if copies:
        raise ValueError(
            f"hide=False shows edges that are asked for, and their {shown(copies)} are their labels: leave these "
            "arrays out of the data."
        )


def _copies_turned_round(graph: Graph, reverse: EdgeType, name: str, links: Tensor, labels: Tensor) -> list[str]:
    """The arrays of the reverse type that have every label at an edge that turns its own round."""
    back, size = links_of(graph, reverse)[1].flip(0), graph.num_nodes
    pairs = numbers_of(torch.cat([links, back], 1), size).unique(return_inverse=True)[1]
    found = []
    for array, rows in arrays_of_edges(graph, reverse).items():
        if array == name or not _is_as_wide(rows, labels):  # batches leave out the one of that name
            continue
        values = numbered_rows(torch.cat([labels.double(), rows.reshape(len(rows), -1).double()]))
        keys = pairs * len(values) + values
        if bool(torch.isin(keys[: len(labels)], keys[len(labels) :]).all()):
            found.append(array)
    return found


def _is_as_wide(rows: Tensor, labels: Tensor) -> bool:
    """Whether rows have as many numbers each; ``(n,)`` and ``(n, 1)`` have."""
    return not rows.is_complex() and rows[:1].numel() == labels[:1].numel()


def _same(rows: Tensor, labels: Tensor) -> bool:
    return bool(((rows == labels) | (rows.isnan() & labels.isnan())).all())
