"""A smallest set of ends that covers all edges of a bipartite graph (Koenig, 1931; Hopcroft and Karp, 1973).

M  a largest matching: layers by breadth from left ends without a partner, then paths along these by depth
Z  what alternating paths reach from left ends without a partner
the cover is (left ends not in Z) and (right ends in Z), as many as M has edges
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.partition.kernels import compiled

Array = npt.NDArray[Any]


def rows_and_sums(senders: Tensor, receivers: Tensor, is_known: Tensor) -> tuple[Tensor, Tensor]:
    """Return which senders travel as rows, increasing, and for each edge whether its receiver gets a sum for it.

    Args:
        senders: The sender of each edge from one rank to another.
        receivers: Its receiver.
        is_known: Whether a sum can stand for it.
    """
    lefts, _ = smallest_cover(senders[is_known], receivers[is_known])
    rows = torch.cat([lefts, senders[~is_known]]).unique()
    return rows, ~torch.isin(senders, rows)


def smallest_cover(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the left ends and the right ends of a smallest cover, both increasing, with as few right ones as can be.

    Args:
        left: The left end of each edge.
        right: The right end of each edge.
    """
    lefts, of_edge = left.unique(return_inverse=True)
    rights, other = right.unique(return_inverse=True)
    order = of_edge.argsort(stable=True)
    starts = starts_of(torch.bincount(of_edge, minlength=len(lefts)))
    is_left, is_right = _cover(starts.numpy(), other[order].numpy(), len(rights))
    return lefts[torch.from_numpy(is_left)], rights[torch.from_numpy(is_right)]


@compiled
def _cover(starts: Array, ends: Array, num_right: int) -> tuple[Array, Array]:
    num_left = starts.size - 1
    partner, partner_of_right = np.full(num_left, -1), np.full(num_right, -1)
    for node in range(num_left):  # most of the matching
        for edge in range(starts[node], starts[node + 1]):
            if partner_of_right[ends[edge]] < 0:
                partner[node], partner_of_right[ends[edge]] = ends[edge], node
                break
    depth = np.empty(num_left, np.int64)
    while _measure(starts, ends, partner, partner_of_right, depth):
        _lengthen(starts, ends, partner, partner_of_right, depth)
    is_right = np.zeros(num_right, np.bool_)
    for node in range(num_left):
        if depth[node] >= 0:
            is_right[ends[starts[node] : starts[node + 1]]] = True
    return depth < 0, is_right


@compiled
def _measure(starts: Array, ends: Array, partner: Array, partner_of_right: Array, depth: Array) -> bool:
    """Set how far each left end is from those without a partner, -1 where none leads; True if a path can be added."""
    queue, last, found = np.empty(depth.size, np.int64), 0, False
    for node in range(depth.size):
        depth[node] = -1
        if partner[node] < 0:
            depth[node], queue[last] = 0, node
            last += 1
    first = 0
    while first < last:
        node = queue[first]
        first += 1
        for edge in range(starts[node], starts[node + 1]):
            behind = partner_of_right[ends[edge]]
            if behind < 0:
                found = True
            elif depth[behind] < 0:
                depth[behind], queue[last] = depth[node] + 1, behind
                last += 1
    return found


@compiled
def _lengthen(starts: Array, ends: Array, partner: Array, partner_of_right: Array, depth: Array) -> None:
    """Add paths that lead from layer to layer and share no end."""
    following, path = starts[:-1].copy(), np.empty(depth.size, np.int64)
    for root in range(depth.size):
        if partner[root] >= 0:
            continue
        length, path[0] = 1, root
        while length:
            node = path[length - 1]
            if following[node] == starts[node + 1]:
                length -= 1
                continue
            behind = partner_of_right[ends[following[node]]]
            following[node] += 1
            if behind < 0:
                for step in range(length):  # each takes the end that it has looked at last
                    end = ends[following[path[step]] - 1]
                    partner[path[step]], partner_of_right[end] = end, path[step]
                length = 0
            elif depth[behind] == depth[node] + 1:
                path[length] = behind
                length += 1
