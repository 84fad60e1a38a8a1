"""The compiled loops that take a batch apart into its types: count nodes and edges of each, then write them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import Array

_U = np.uint64
_NODES_AT_ONCE = 1024  # whose ids and types stay in the fastest cache


class Layout(NamedTuple):
    """What kernels know of the types.

    Attributes:
        offsets: The first id of each node type, and the number of all nodes.
        source: The node type of the senders of each edge type.
        target: The node type of its receivers.
        into: The edge types by the node type of their receivers.
        starts: Where the edge types into each node type start in ``into``.
    """

    offsets: Array
    source: Array
    target: Array
    into: Array
    starts: Array


@compiled
def count(
    ids: Array,
    indptr: Array,
    kinds: Array,
    hops: Array,
    layout: Layout,
    of_type: Array,
    at: Array,
    upto_nodes: Array,
    upto_edges: Array,
) -> Any:
    """Number the nodes in their types, and count nodes and edges up to each hop; return whether all edge types are
    known."""
    _find_types(ids, layout.offsets, of_type)
    seen, counts = np.zeros(upto_nodes.shape[1], np.int64), np.zeros(upto_edges.shape[1], np.int64)
    for hop in range(len(hops) - 1):
        for i in range(hops[hop], hops[hop + 1]):
            kind = _U(of_type[_U(i)])
            at[_U(i)] = seen[kind]
            seen[kind] += 1
        upto_nodes[hop] = seen
    for hop in range(len(hops) - 2):
        for edge in range(indptr[hops[hop]], indptr[hops[hop + 1]]):
            number = _U(kinds[_U(edge)])
            if number >= _U(len(counts)):
                return False
            counts[number] += 1
        upto_edges[hop] = counts
    return True


@part
def _find_types(ids: Array, offsets: Array, of_type: Array) -> None:
    """Find the type of each node: so many types begin at its id or before, apart from the first.

    Vectors compare many nodes with one type. A search for each node would mispredict every second of its branches.
    """
    for low in range(0, len(ids), _NODES_AT_ONCE):
        high = min(low + _NODES_AT_ONCE, len(ids))
        for i in range(low, high):
            of_type[_U(i)] = 0
        for kind in range(1, len(offsets) - 1):
            begin = offsets[_U(kind)]
            for i in range(low, high):
                of_type[_U(i)] += np.int32(ids[_U(i)] >= begin)


@compiled
def fill(
    ids: Array,
    indptr: Array,
    indices: Array,
    positions: Array,
    kinds: Array,
    layout: Layout,
    of_type: Array,
    at: Array,
    first: Array,
    edge_first: Array,
    row_first: Array,
    local: Array,
    rows: Array,
    columns: Array,
    edge_ids: Array,
) -> Any:
    """Write each type's nodes and rows; return whether all edges have ends of the right types."""
    for i in range(len(ids)):
        kind = of_type[_U(i)]
        at[_U(i)] += first[_U(kind)]
        local[_U(at[_U(i)])] = ids[_U(i)] - layout.offsets[_U(kind)]
    first_sender, has_ids, is_right = first[layout.source], len(positions) > 0, True
    num_senders = first[layout.source + 1] - first_sender
    done = edge_first.copy()
    for i in range(len(indptr) - 1):
        receiver = of_type[_U(i)]
        row = at[_U(i)] - first[_U(receiver)]
        for place in range(layout.starts[_U(receiver)], layout.starts[_U(receiver + 1)]):
            kind = _U(layout.into[_U(place)])
            rows[_U(row_first[kind] + row)] = done[kind] - edge_first[kind]
        for edge in range(indptr[_U(i)], indptr[_U(i + 1)]):
            kind = _U(kinds[_U(edge)])
            column = at[_U(indices[_U(edge)])] - first_sender[kind]
            is_right &= (_U(column) < _U(num_senders[kind])) & (layout.target[kind] == receiver)
            out = _U(done[kind])
            columns[out] = column
            if has_ids:
                edge_ids[out] = positions[_U(edge)]
            done[kind] = out + _U(1)
    for kind in range(len(done) - 1):
        rows[_U(row_first[_U(kind + 1)] - 1)] = done[_U(kind)] - edge_first[_U(kind)]
    return is_right
