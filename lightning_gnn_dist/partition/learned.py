"""What parts learn from: their training nodes, and how their labels differ."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import labels_of


def train_mask_of(graph: Graph) -> Tensor | None:
    """Which nodes are training nodes, of any type: one bool for each. ``None`` where no type has a ``train_mask``."""
    found = list(graph.types.splits("train").values())
    return torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill_(0, torch.cat(found), True) if found else None


def learned_from(part: Graph, seeds: str | None) -> Tensor:
    """Return which nodes of a part are training nodes: a boolean for each.

    All are where no mask tells, as in a graph whose edges are split.

    Args:
        part: The part.
        seeds: The node type that is learned from, if one was chosen.
    """
    types = part.types if seeds is None else part.types.with_seeds(seeds)
    is_marked = any("train_mask" in arrays for arrays in types.node_arrays.values())
    found = torch.full((part.num_nodes,), not is_marked)
    if is_marked:
        found[types.split("train")] = True
    return found


def train_nodes_of(graph: Graph, assignment: Tensor, num_parts: int) -> Tensor | None:
    """The training nodes of every part, shape ``(P,)``; ``None`` without a ``train_mask``."""
    train_mask = train_mask_of(graph)
    return None if train_mask is None else torch.bincount(assignment[train_mask], minlength=num_parts)


def label_skew(graph: Graph, assignment: Tensor, num_parts: int) -> Tensor | None:
    """The distance between the labels of every part and those of the graph; see :class:`PartitionReport`."""
    y, train_mask = labels_of(graph), train_mask_of(graph)
    if y is None:
        return None
    labelled = y >= 0 if train_mask is None else (y >= 0) & train_mask
    if not bool(labelled.any()):
        return None
    classes, label = y[labelled].unique(return_inverse=True)
    cell = assignment[labelled].to(torch.int64) * classes.numel() + label
    counts = torch.bincount(cell, minlength=num_parts * classes.numel()).view(num_parts, -1).double()
    whole = counts.sum(0) / counts.sum()
    return (counts / counts.sum(1, keepdim=True) - whole).abs().sum(1) / 2
