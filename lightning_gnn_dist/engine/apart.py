"""Takes a sampled batch apart into its types: a CSR for each edge type, between nodes that count from 0 in theirs.

Rows and nodes stay in the order of hops, so for each edge type, too, the CSR of a later layer is the first rows of the
first one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, part
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.sample import (
    NO_IDS,
    Apart,
    EdgesOfType,
    Sample,
    edge_types_of,
    graph_is_damaged,
    of_one_type,
)
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.typed.types import TypeNames

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
        is_last = hop == len(hops) - 3
        for edge in range(indptr[hops[hop]], indptr[len(indptr) - 1 if is_last else hops[hop + 1]]):
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


_LEAST_EDGES = 64  # between two marks of an edge's place
_EDGES_PER_TYPE = 16


def take_apart(graph: Graph, sample: Sample, *, with_ids: bool = True) -> Apart:
    """Return the batch of a sample of a graph by types; without ids, the edges are not told apart."""
    types = graph.types
    if len(types.node_types) == len(types.edge_types) == 1:
        return of_one_type(sample)
    if sample.edge_kinds is None:
        sample = sample._replace(edge_kinds=types.edge_type[sample.edge_ids])
    apart = by_types(types, sample if with_ids else sample._replace(edge_ids=None))
    if apart is None:
        raise graph_is_damaged(graph)
    return apart


def by_types(types: TypeNames, sample: Sample) -> Apart | None:
    """Return the batch of a sample that has ``edge_kinds`` by types; None if an edge has ends of other types."""
    assert sample.edge_kinds is not None
    layout = remembered(types, "layout", lambda: _layout(types))
    hops = np.array([0, *sample.num_sampled_nodes]).cumsum()
    ids, indptr, indices = (t.numpy() for t in (sample.nodes, sample.indptr, sample.indices))
    kinds, positions = sample.edge_kinds.numpy(), (NO_IDS if sample.edge_ids is None else sample.edge_ids).numpy()
    upto_nodes = np.zeros((len(hops), len(types.node_types)), np.int64)
    upto_edges = np.zeros((len(hops) - 1, len(types.edge_types)), np.int64)
    of_type, at = np.empty((2, len(ids)), np.int32)
    if not count(ids, indptr, kinds, hops, layout, of_type, at, upto_nodes[1:], upto_edges[1:]):
        return None
    first, edge_first = _starts(upto_nodes[-1]), _starts(upto_edges[-1])
    row_first = _starts(upto_nodes[-1 if len(indptr) > len(ids) else -2, layout.target] + 1)
    rows, columns = np.empty(row_first[-1], indptr.dtype), np.empty(edge_first[-1], indices.dtype)
    local, edge_ids = np.empty(len(ids), np.int64), np.empty(edge_first[-1], np.int64)
    starts = first, edge_first, row_first
    flat = ids, indptr, indices, positions, kinds
    if not fill(*flat, layout, of_type, at, *starts, local, rows, columns, edge_ids):
        return None
    pieces = [
        torch.from_numpy(array).split(np.diff(start).tolist())
        for array, start in ((rows, row_first), (columns, edge_first), (edge_ids, edge_first))
    ]
    nodes = list(torch.from_numpy(local).split(upto_nodes[-1].tolist()))
    num_nodes, num_edges = np.diff(upto_nodes, axis=0).T.tolist(), np.diff(upto_edges, axis=0).T.tolist()
    rows_of_types = [EdgesOfType(*of) for of in zip(*pieces, num_edges, strict=True)]
    return Apart(nodes, num_nodes, torch.from_numpy(of_type), rows_of_types)


def in_types(ends: Tensor, num_seeds: Sequence[int]) -> Tensor:
    """Positions of seeds, which are in order of their types, as positions among the seeds of their type."""
    if len(num_seeds) == 1:
        return ends
    starts = torch.tensor([0, *num_seeds[:-1]]).cumsum(0)
    return ends - starts[torch.searchsorted(starts, ends, right=True) - 1]


def places_of(graph: Graph, number: int, positions: Tensor) -> Tensor:
    """Where edges of type ``number``, given by their positions in the graph, stand among all edges of that type."""
    types = graph.types
    if len(types.edge_types) == 1:
        return positions
    edge_type, step = edge_types_of(types), max(_LEAST_EDGES, _EDGES_PER_TYPE * len(types.edge_types))

    def marks() -> Array:
        small = np.int32 if len(edge_type) < 2**31 else np.int64
        found: Array = np.zeros((len(edge_type) // step + 1, len(types.edge_types)), small)
        _mark(edge_type, step, found)
        return found

    places = np.empty(positions.numel(), np.int64)
    _find(edge_type, step, remembered(graph, "marks of places", marks), number, positions.numpy(), places)
    return torch.from_numpy(places)


def _layout(types: TypeNames) -> Layout:
    ends = np.array([[types.node_types.index(end) for end in kind[::2]] for kind in types.edge_types], np.int64)
    into = np.argsort(ends[:, 1], kind="stable")
    counts = np.bincount(ends[:, 1], minlength=len(types.node_types))
    return Layout(np.array(types.offsets, np.int64), ends[:, 0].copy(), ends[:, 1].copy(), into, _starts(counts))


def _starts(counts: Array) -> Array:
    starts: Array = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    return starts


@compiled
def _mark(edge_type: Array, step: int, marks: Array) -> None:
    """Count the edges of each type before every ``step``-th edge."""
    seen = np.zeros(marks.shape[1], marks.dtype)
    for edge in range(len(edge_type)):
        if edge % step == 0:
            marks[edge // step] = seen
        if _U(edge_type[_U(edge)]) < _U(len(seen)):
            seen[_U(edge_type[_U(edge)])] += 1
    if len(edge_type) % step == 0:
        marks[len(edge_type) // step] = seen


@compiled
def _find(edge_type: Array, step: int, marks: Array, kind: int, positions: Array, places: Array) -> None:
    """Count the edges of a type before each position, from the last mark on."""
    for i in range(len(positions)):
        mark = positions[_U(i)] // step
        count = np.int64(0)
        for edge in range(mark * step, positions[_U(i)]):
            count += edge_type[_U(edge)] == kind
        places[_U(i)] = marks[_U(mark), _U(kind)] + count
