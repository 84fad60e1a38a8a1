"""The compiled loops of partitioning. Each reads the CSR row by row and holds arrays of one entry per node.

They follow edges without a check, so their Python callers check all edges first, which takes a few percent longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

PARTS_AT_ONCE = 64  # bits of the word that remembers in which parts' halos a node was counted
MAX_PRICE = 1024  # more cut edges than a move may cost; after that nodes go to the emptiest part


def compiled(function: Kernel) -> Kernel:
    """Compile with numba: kept on disk, and without the interpreter's lock."""
    return cast(Kernel, numba.njit(cache=True, nogil=True)(function))


@compiled
def tally(
    indptr: Array,
    indices: Array,
    assignment: Array,
    first: int,
    seen: Array,
    inside: Array,
    halo: Array,
    isolated: Array,
) -> None:
    """Count edges and nodes for ``PARTS_AT_ONCE`` parts from ``first`` on. All calls together read each row once."""
    seen[:] = 0
    for node in range(indptr.size - 1):
        part = assignment[node]
        if part < first or part >= first + PARTS_AT_ONCE:
            continue
        bit = np.uint64(1) << np.uint64(part - first)
        kept = cut = 0
        for edge in range(indptr[node], indptr[node + 1]):
            sender = indices[edge]
            if assignment[sender] != part:
                cut += 1
                if not seen[sender] & bit:
                    seen[sender] |= bit
                    halo[part] += 1
            else:
                inside[part] += 1
                kept += sender != node
        if cut and not kept:
            isolated[part] += 1


@compiled
def rows_are_sorted(indptr: Array, indices: Array) -> bool:
    """Whether the senders of every row are in increasing order."""
    for node in range(indptr.size - 1):
        for edge in range(indptr[node] + 1, indptr[node + 1]):
            if indices[edge] < indices[edge - 1]:
                return False
    return True


@compiled
def sort_rows(indptr: Array, indices: Array) -> None:
    """Sort the senders of every row, in place."""
    for node in range(indptr.size - 1):
        indices[indptr[node] : indptr[node + 1]].sort()


@compiled
def receives(indptr: Array, indices: Array, reader: Array, node: int, sender: int) -> bool:
    """Whether the sorted row of ``node`` lists ``sender``. Senders must not decrease from call to call.

    ``reader[node]`` is where the last call stopped in the row, so no row is read twice.
    """
    while reader[node] < indptr[node + 1] and indices[reader[node]] < sender:
        reader[node] += 1
    return bool(reader[node] < indptr[node + 1] and indices[reader[node]] == sender)


@compiled
def count_neighbors(indptr: Array, indices: Array, degree: Array) -> int:
    """Count degrees in the undirected graph without self loops and duplicates; rows must be sorted.

    Returns how many edges have no counterpart in the other direction.
    """
    reader = indptr[:-1].copy()
    one_way = 0
    for node in range(indptr.size - 1):
        for edge in range(indptr[node], indptr[node + 1]):
            sender = indices[edge]
            if sender == node or (edge > indptr[node] and sender == indices[edge - 1]):
                continue
            degree[node] += 1
            # An edge stored both ways is met twice and counts at one end each time.
            if not receives(indptr, indices, reader, sender, node):
                degree[sender] += 1
                one_way += 1
    return one_way


@compiled
def list_neighbors(indptr: Array, indices: Array, one_way: int, cursor: Array, neighbors: Array) -> None:
    """List the neighbours that :func:`count_neighbors` counted; ``cursor`` holds where each node's list starts."""
    reader = indptr[:-1].copy()
    for node in range(indptr.size - 1):
        for edge in range(indptr[node], indptr[node + 1]):
            sender = indices[edge]
            if sender == node or (edge > indptr[node] and sender == indices[edge - 1]):
                continue
            neighbors[cursor[node]] = sender
            cursor[node] += 1
            # Reading the other row is what takes time: skip it if all edges have their reverse.
            if one_way and not receives(indptr, indices, reader, sender, node):
                neighbors[cursor[sender]] = node
                cursor[sender] += 1


@compiled
def relieve(start: Array, neighbors: Array, assignment: Array, movable: Array, load: Array, capacity: int) -> None:
    """Move nodes from parts whose ``load`` exceeds ``capacity`` to parts with room, cutting few edges."""
    links = np.zeros(load.size, np.int64)
    price = 0
    while load.max() > capacity:
        moved = sweep(start, neighbors, assignment, movable, load, capacity, price, links)
        # Keep the price while nodes move: a node that left makes the next one cheaper.
        if moved * 1000 <= assignment.size:
            price = price + 1 if price < 16 else 2 * price


@compiled
def sweep(
    start: Array,
    neighbors: Array,
    assignment: Array,
    movable: Array,
    load: Array,
    capacity: int,
    price: int,
    links: Array,
) -> int:
    """Move nodes whose move cuts at most ``price`` more edges; above ``MAX_PRICE``, any node to any part with room."""
    moved = 0
    for node in range(start.size - 1):
        part = assignment[node]
        if not movable[node] or load[part] <= capacity:
            continue
        around = neighbors[start[node] : start[node + 1]]
        for other in around:
            links[assignment[other]] += 1
        target = np.argmin(load) if price > MAX_PRICE else part
        for other in around:
            candidate = assignment[other]
            if load[candidate] < capacity and (target == part or links[candidate] > links[target]):
                target = candidate
        worth_it = links[part] - links[target] <= price or price > MAX_PRICE
        for other in around:
            links[assignment[other]] = 0
        if target != part and worth_it:
            assignment[node] = target
            load[part] -= 1
            load[target] += 1
            moved += 1
    return moved


@compiled
def occupy(assignment: Array, movable: Array, load: Array) -> None:
    """Give every part without a movable node one from a part that has more than one."""
    empty = 0
    for node in range(assignment.size):
        while empty < load.size and load[empty] > 0:
            empty += 1
        if empty == load.size:
            return
        part = assignment[node]
        if movable[node] and load[part] > 1:
            assignment[node] = empty
            load[part] -= 1
            load[empty] += 1


@compiled
def stream(
    indptr: Array,
    indices: Array,
    order: Array,
    assignment: Array,
    size: Array,
    capacity: int,
    least: int,
) -> None:
    """One pass of LDG (formula in streaming.py) over the nodes in ``order``, or 0, 1, 2, ..."""
    num_nodes, num_parts = indptr.size - 1, size.size
    links = np.zeros(num_parts, np.int64)
    owed = np.maximum(least - size, 0).sum()  # nodes that parts below their least size must still get
    level = size.min()  # sizes only grow, so the search for the emptiest part continues where it stopped
    emptiest = 0
    for turn in range(num_nodes):
        node = order[turn] if order.size else turn
        while size[emptiest] > level:
            emptiest += 1
            if emptiest == num_parts:
                level, emptiest = level + 1, 0
        limit = capacity if num_nodes - turn > owed else least
        for edge in range(indptr[node], indptr[node + 1]):
            sender = indices[edge]
            if sender != node and assignment[sender] >= 0:
                links[assignment[sender]] += 1
        best = emptiest
        best_score = score(links[best], size[best], capacity)
        for edge in range(indptr[node], indptr[node + 1]):
            part = assignment[indices[edge]]
            if part < 0 or size[part] >= limit:
                continue
            value = score(links[part], size[part], capacity)
            if value > best_score or (value == best_score and (size[part], part) < (size[best], best)):
                best, best_score = part, value
        for edge in range(indptr[node], indptr[node + 1]):
            part = assignment[indices[edge]]
            if part >= 0:
                links[part] = 0
        assignment[node] = best
        owed -= size[best] < least
        size[best] += 1


@compiled
def score(links: int, size: int, capacity: int) -> float:
    """The score of a part for a node that has ``links`` in-neighbours there."""
    return float(links * (1.0 - size / capacity))
