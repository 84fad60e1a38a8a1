"""The rows of a graph that has changed: new edges are woven into them, and others go.

Edges keep the order of a graph that is made at once: in the row of a node by type, by time where there is one, and by
sender; of equal ones those come first that were there first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.changing.change import PAIRS, Arrays, Change, Form
from lightning_gnn_dist.graph.changing.checking import check_change, check_labels
from lightning_gnn_dist.graph.changing.edges import EdgeChanges, Rows
from lightning_gnn_dist.graph.changing.nodes import Room, changed_nodes
from lightning_gnn_dist.graph.changing.weaving import Places, ranks_of_type, woven
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.rows import row_pieces, starts_of
from lightning_gnn_dist.graph.typed.build import places
from lightning_gnn_dist.graph.typed.names import EdgeType, below_edges
from lightning_gnn_dist.graph.typed.types import GraphTypes, edge_type_dtype, offsets_of


class _Placed(NamedTuple):
    """New edges of one type in their order, before which edges of the graph they come, and their ends there."""

    arrays: Arrays
    before: Tensor
    senders: Tensor
    receivers: Tensor


def changed(rows: Rows, changes: Sequence[Change], room: Room) -> Rows:
    """The graph after some changes, which are checked. Arrays that no change touches are the graph's own.

    Args:
        rows: The graph.
        changes: What becomes of it, one after the other.
        room: Makes room for more rows in an array.
    """
    after, history = Form.of(rows.types), list(rows.types.history)
    for change in changes:
        check_change(after, change)
        history.append(dict(after.counts))
        after = after.after(change)
    nodes = changed_nodes(rows.types, after, changes, room)
    check_labels(changes, Form.of(rows.types), nodes)
    return _with_edges(rows, EdgeChanges(rows, changes), after, nodes, tuple(history), room)


def _with_edges(
    rows: Rows,
    edges: EdgeChanges,
    after: Form,
    nodes: Mapping[str, Arrays],
    history: tuple[Mapping[str, int], ...],
    room: Room,
) -> Rows:
    offsets = offsets_of(list(after.counts.values()))
    first = dict(zip(after.node_types, offsets, strict=False))
    placed = {
        kind: _placed(rows, kind, edges.new[kind], first, after, nodes)
        for kind in after.edge_types
        if kind in edges.new
    }
    kinds, edge_arrays, counts = _by_type(rows, edges.gone, placed, after, room)
    numbers = [torch.full_like(p.before, after.edge_types.index(kind)) for kind, p in placed.items()]
    receivers, before, senders, number = (
        torch.cat([edges.gone[:0], *each])
        for each in (
            [p.receivers for p in placed.values()],
            [p.before for p in placed.values()],
            [p.senders for p in placed.values()],
            numbers,
        )
    )
    order = receivers.argsort(stable=True)
    at = Places(edges.gone, before[order])
    indices = _indices(rows, at, senders[order], first, offsets[-1], room)
    indptr = _indptr(rows, at, receivers[order], first, after, room)
    if len(after.edge_types) > 1:
        dtype = edge_type_dtype(len(after.edge_types))
        kinds = woven(rows.types.edge_type.to(dtype), at, number[order].to(dtype), partial(room, "edge_type"))
    types = GraphTypes(
        after.node_types,
        offsets,
        after.edge_types,
        counts,
        kinds,
        nodes,
        edge_arrays,
        after.time,
        rows.types.seeds,
        history=history,
        tables=rows.types.tables,
    )
    return Rows(indptr, indices, types)


def _by_type(
    rows: Rows, gone: Tensor, placed: Mapping[EdgeType, _Placed], after: Form, room: Room
) -> tuple[Tensor, dict[EdgeType, Arrays], tuple[int, ...]]:
    """What the edges of each type carry, and how many there are; the first is their type, if there is one alone."""
    types, arrays, counts = rows.types, {}, []
    kinds_of_gone = rows.kinds(gone)
    for number, kind in enumerate(after.edge_types):
        known = number < len(types.edge_types)
        old = types.edge_arrays[kind] if known else after.edge_arrays[kind]
        lost = gone[kinds_of_gone == number]
        new = placed.get(kind)
        counts.append((types.num_edges[number] if known else 0) - len(lost) + (0 if new is None else len(new.before)))
        arrays[kind] = dict(old)
        if not old or (new is None and not len(lost)):
            continue
        before = gone[:0] if new is None else new.before
        at = Places(*(_ranks(types, number, each) if known else torch.zeros_like(each) for each in (lost, before)))
        for name, array in old.items():
            more = array[:0] if new is None else new.arrays[name]
            arrays[kind][name] = woven(array, at, more, partial(room, f"{below_edges(kind)}{name}"))
    alone = torch.zeros(1, dtype=torch.uint8).expand(sum(counts))
    return alone, arrays, tuple(counts)


def _ranks(types: GraphTypes, number: int, positions: Tensor) -> Tensor:
    return positions if len(types.edge_types) == 1 else ranks_of_type(types.edge_type, number, positions)


def _placed(
    rows: Rows, kind: EdgeType, new: Arrays, first: Mapping[str, int], after: Form, nodes: Mapping[str, Arrays]
) -> _Placed:
    """Bring the new edges of a type into order, and find their places."""
    source, _, target = kind
    senders, receivers = new[PAIRS]
    times = _times(kind, new, senders, after, nodes)
    order = _order(receivers, times, senders)
    senders, receivers = senders[order], receivers[order]
    before = torch.full_like(receivers, int(rows.indptr[rows.first(target) + rows.count(target)]))
    if kind in rows.types.edge_types:
        is_old = receivers < rows.count(target)
        there = receivers[is_old] + rows.first(target), senders[is_old], None if times is None else times[order][is_old]
        before[is_old] = _places_in_rows(rows, kind, *there, after, nodes)
    elif target in rows.types.node_types:  # the last type of each row
        is_old = receivers < rows.count(target)
        before[is_old] = rows.indptr[receivers[is_old] + rows.first(target) + 1]
    arrays = {name: array[order] for name, array in new.items() if name != PAIRS}
    return _Placed(arrays, before, senders + first[source], receivers + first[target])


def _times(kind: EdgeType, arrays: Arrays, senders: Tensor, after: Form, nodes: Mapping[str, Arrays]) -> Tensor | None:
    """When edges were there, where they are ordered by it."""
    if after.time is None:
        return None
    if after.time in after.edge_arrays[kind]:
        return arrays[after.time]
    times = nodes[kind[0]].get(after.time)
    return None if times is None else times[senders]


def _order(rows: Tensor, times: Tensor | None, senders: Tensor) -> Tensor:
    order = senders.argsort(stable=True)
    for key in (times, rows):
        order = order if key is None else order[key[order].argsort(stable=True)]
    return order


def _places_in_rows(
    rows: Rows,
    kind: EdgeType,
    receivers: Tensor,
    senders: Tensor,
    times: Tensor | None,
    after: Form,
    nodes: Mapping[str, Arrays],
) -> Tensor:
    """Before which position new edges of a type come, in rows that are there; they are in their order."""
    found, types = torch.empty_like(receivers), rows.types
    number, first = types.edge_types.index(kind), rows.first(kind[0])
    for some, at in row_pieces(rows.indptr, receivers.unique_consecutive()):
        new = slice(*torch.searchsorted(receivers, torch.stack([some[0], some[-1] + 1])).tolist())
        row = torch.arange(len(some)).repeat_interleave(rows.indptr[some + 1] - rows.indptr[some])
        kinds = rows.kinds(at)
        starts = rows.indptr[some] + torch.bincount(row[kinds < number], minlength=len(some))
        at, row = at[kinds == number], row[kinds == number]
        known = rows.indices[at].to(torch.int64) - first
        own = (
            {}
            if times is None
            else {
                name: array[places(types.edge_type, at, len(types.edge_types))]
                for name, array in types.edge_arrays[kind].items()
                if name == after.time
            }
        )
        when = _times(kind, own, known, after, nodes)
        row_of_new = torch.searchsorted(some, receivers[new])
        order = _order(
            torch.cat([row, row_of_new]),
            None if times is None or when is None else torch.cat([when, times[new]]),
            torch.cat([known, senders[new]]),
        )
        is_new = order >= len(row)
        passed = (~is_new).cumsum(0)[is_new]  # edges that are there and come before, in all rows of this piece
        counts = torch.bincount(row, minlength=len(some))
        found[new] = starts[row_of_new] + passed - (counts.cumsum(0) - counts)[row_of_new]
    return found


def _indices(rows: Rows, at: Places, senders: Tensor, first: Mapping[str, int], num_nodes: int, room: Room) -> Tensor:
    """The senders by their ids in the changed graph, in which types may begin later than before."""
    dtype, types = index_dtype(num_nodes), rows.types
    shifts = torch.tensor([first[kind] - rows.first(kind) for kind in types.node_types])
    stays = rows.indices.dtype == dtype and not bool(shifts.any())
    return woven(
        rows.indices,
        at,
        senders.to(dtype),
        partial(room, "indices"),
        None if stays else lambda piece: (piece + shifts[types.type_of(piece)]).to(dtype),
    )


def _indptr(rows: Rows, at: Places, receivers: Tensor, first: Mapping[str, int], after: Form, room: Room) -> Tensor:
    """Where the rows begin. Where rows come behind all others alone, those that are there are not copied."""
    num_nodes = sum(after.counts.values())
    old, shifts = rows.num_nodes, any(first[kind] != rows.first(kind) for kind in rows.types.node_types)
    if not at.gone.numel() and not shifts and bool((receivers >= old).all()):
        if num_nodes == old:
            return rows.indptr
        grown = room("indptr", rows.indptr, num_nodes - old)
        degrees = torch.bincount(receivers - old, minlength=num_nodes - old)
        grown[old + 1 :] = degrees.cumsum(0) + rows.num_edges
        return grown
    degrees = torch.bincount(receivers, minlength=num_nodes)
    lost = torch.searchsorted(rows.indptr, at.gone, right=True) - 1
    stayed = rows.indptr.diff()
    stayed.index_add_(0, lost, torch.full_like(lost, -1))
    for kind in rows.types.node_types:
        nodes = rows.types.nodes_of(kind)
        degrees[first[kind] : first[kind] + len(nodes)] += stayed[nodes.start : nodes.stop]
    return starts_of(degrees)
