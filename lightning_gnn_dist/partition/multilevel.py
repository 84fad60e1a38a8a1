"""What METIS and KaMinPar share: the graph as they see it, and a last pass after which the bounds of parts hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition import kernels
from lightning_gnn_dist.partition.base import part_capacity
from lightning_gnn_dist.partition.kernels import Array

Balance = Literal["nodes", "train"]


def undirected(graph: Graph, room: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The CSR that a partitioner takes, row starts and neighbours: every edge both ways, no self loops, no duplicates.

    It counts before it allocates, so it takes no more memory than the result (and a sorted copy of the edges,
    if the graph's rows are not sorted).

    Args:
        graph: The graph.
        room: Returns the array to fill with neighbours, given the row starts.
    """
    graph.check_edges()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    if not kernels.rows_are_sorted(indptr, indices):
        indices = indices.copy()
        kernels.sort_rows(indptr, indices)
    start = np.zeros(graph.num_nodes + 1, np.int64)
    one_way = kernels.count_neighbors(indptr, indices, start[1:])
    np.cumsum(start, out=start)
    neighbors = room(start)
    kernels.list_neighbors(indptr, indices, one_way, start[:-1].copy(), neighbors)
    return start, neighbors


def groups(graph: Graph, num_parts: int, balance: str) -> list[Array]:
    """The groups of nodes of which each part gets its share, each as a mask: all, or the training nodes by type."""
    if balance != "train":
        return [np.ones(graph.num_nodes, np.bool_)]
    train_nodes = graph.split("train")
    if train_nodes.numel() < num_parts:
        raise ValueError(
            f"num_parts ({num_parts}) must not exceed the training nodes ({train_nodes.numel()}) with "
            'balance="train": every part needs one. Ask for fewer parts or use balance="nodes".'
        )
    found = graph.types.splits("train").values()
    masks = [np.zeros(graph.num_nodes, np.bool_) for _ in found]
    for mask, nodes in zip(masks, found, strict=True):
        mask[nodes.numpy()] = True
    return masks


def repair(
    start: Array, neighbors: Array, shared: list[Array], assignment: Array, num_parts: int, imbalance: float
) -> None:
    """Move nodes out of parts that have too many of a group, or too many at all, and into parts that are empty."""
    placed = np.zeros(assignment.size, np.bool_)
    for group in shared:
        load = np.bincount(assignment[group], minlength=num_parts)
        capacity = part_capacity(int(group.sum()), num_parts, imbalance)
        kernels.relieve(start, neighbors, assignment, group, load, capacity)
        if group.sum() >= num_parts:
            kernels.occupy(assignment, group, load)
        placed |= group
    kernels.occupy(assignment, placed, np.bincount(assignment[placed], minlength=num_parts))
    # These nodes stay where they are now; the others are moved to balance the node counts.
    load = np.bincount(assignment, minlength=num_parts)
    most_placed = int(np.bincount(assignment[placed], minlength=num_parts).max())
    capacity = max(part_capacity(assignment.size, num_parts, imbalance), most_placed)
    kernels.relieve(start, neighbors, assignment, ~placed, load, capacity)


def refuse_beyond(limit: int, count: int, what: str, name: str) -> None:
    """Refuse a count that a partitioner's integers cannot hold: it would wrap around and crash."""
    if count > limit:
        raise ValueError(
            f"The graph has {count} {what} but this build of {name} counts up to {limit}: "
            "use StreamingPartitioner, which has no such limit."
        )
