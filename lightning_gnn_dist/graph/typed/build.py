"""Makes typed graphs: of tables of nodes and edges, and of some nodes of another."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, induced_rows, starts_of, take_rows
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, edge_type_dtype, offsets_of, within


class NodeTable(NamedTuple):
    """The nodes of one type."""

    num: int
    arrays: Mapping[str, Tensor]


class EdgeTable(NamedTuple):
    """The edges of one type. ``edge_index`` counts senders and receivers each in its type."""

    edge_index: Tensor
    arrays: Mapping[str, Tensor]


def build(
    nodes: Mapping[str, NodeTable], edges: Mapping[EdgeType, EdgeTable], time: str | None = None
) -> tuple[Tensor, Tensor, GraphTypes]:
    """Return ``indptr``, ``indices`` and the types of a graph.

    Args:
        nodes: The nodes of each type.
        edges: The edges of each type.
        time: The array in whose order the edges of one type into a node come, see :class:`GraphTypes`.
    """
    for kind, table in nodes.items():
        with within(kind):
            if table.num < 1:
                raise ValueError("there are no nodes of this type: leave it out, and the edges from and to it.")
            convert.check_time(table.arrays, time, "node")
    offsets = offsets_of([table.num for table in nodes.values()])
    convert.check_num_nodes(offsets[-1])
    first = dict(zip(nodes, offsets, strict=False))
    everywhere = {name for table in (*nodes.values(), *edges.values()) for name in table[1]}
    if time is not None:
        check_word("time", time, "time")
    if time is not None and time not in everywhere:
        raise ValueError(f"time names the array {shown(time)}, and no node type and no edge type has it.")
    for edge_type, links in edges.items():
        with within(edge_type):
            _check_edges(edge_type, links, nodes, time)
    counts = [links.edge_index.shape[1] for links in edges.values()]
    senders = torch.empty(sum(counts), dtype=convert.index_dtype(offsets[-1]))
    receivers, orders = torch.empty(sum(counts), dtype=torch.int64), {}
    slices = [slice(*ends) for ends in pairwise(offsets_of(counts))]
    for (edge_type, links), at in zip(edges.items(), slices, strict=True):
        of_type, orders[edge_type] = _in_order(links, nodes[edge_type[0]], time)
        senders[at] = of_type + first[edge_type[0]]
        receivers[at] = links.edge_index[1].to(torch.int64) + first[edge_type[2]]
    indptr = starts_of(torch.bincount(receivers, minlength=offsets[-1]))
    kinds = torch.zeros(1, dtype=edge_type_dtype(len(counts))).expand(sum(counts))  # no byte for each
    if len(edges) > 1:  # edges of one row stay in order of types, times and senders
        of_all = torch.cat([order + at.start for order, at in zip(orders.values(), slices, strict=True)])
        order = torch.argsort(receivers[of_all], stable=True)
        numbers = torch.arange(len(counts)).to(kinds.dtype).repeat_interleave(torch.tensor(counts))
        senders, kinds = senders[order], numbers[order]
    types = GraphTypes(
        tuple(nodes),
        offsets,
        tuple(edges),
        tuple(counts),
        kinds,
        {kind: dict(table.arrays) for kind, table in nodes.items()},
        {kind: {name: array[orders[kind]] for name, array in table.arrays.items()} for kind, table in edges.items()},
        time,
    )
    return indptr, senders, types


def _check_edges(edge_type: EdgeType, table: EdgeTable, nodes: Mapping[str, NodeTable], time: str | None) -> None:
    for end, kind, ids in zip(("sender", "receiver"), edge_type[::2], table.edge_index, strict=True):
        count, of_type = nodes[kind].num, f" of type {kind!r}" if kind else ""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise ValueError(
                f"edge_index names the {end} {bad}, but there are {count} nodes{of_type}: their ids "
                f"count from 0, so they must lie in [0, {count})."
            )
    convert.check_rows("edge", table.arrays, table.edge_index.shape[1])
    convert.check_time(table.arrays, time, "edge")


def _in_order(table: EdgeTable, senders: NodeTable, time: str | None) -> tuple[Tensor, Tensor]:
    """The senders by receiver, then by time where there is one, then by sender; and the edges in this order."""
    sender, receiver = table.edge_index.to(torch.int64)
    times = None
    if time is not None and time in table.arrays:
        times = table.arrays[time]
    elif time is not None and time in senders.arrays:
        times = senders.arrays[time][sender]
    if times is None:
        keys, order = (receiver * senders.num + sender).sort(stable=True)
        return keys % senders.num, order
    order = torch.argsort(sender, stable=True)
    order = order[torch.argsort(times[order], stable=True)]
    order = order[torch.argsort(receiver[order], stable=True)]
    return sender[order], order


def induced(
    indptr: Tensor, indices: Tensor, types: GraphTypes, nodes: Tensor, receives: Tensor | None = None
) -> tuple[Tensor, Tensor, GraphTypes]:
    """The graph of ``nodes`` and the edges among them, in RAM. Each type's ``n_id`` holds the nodes' ids in it.

    Args:
        indptr: Where each row starts.
        indices: The in-neighbours, row after row.
        types: The types of the graph.
        nodes: Ids, those of the first node type first, and so on.
        receives: Which of them keep their rows. Default: all.
    """
    number, _ = types.to_local(nodes)
    if bool((number[1:] < number[:-1]).any()):
        raise ValueError("nodes must be in the order of their types, where ids increase: give nodes.sort().values.")
    kept, receives = [nodes[:0]], torch.ones_like(nodes, dtype=torch.bool) if receives is None else receives
    are_told_apart = len(types.edge_types) > 1 or any(types.edge_arrays.values())
    on_kept = kept.append if are_told_apart else lambda _: None
    starts, senders = induced_rows(indptr, indices, nodes[receives], nodes, receives, on_kept)
    edges = torch.cat(kept) if are_told_apart else nodes[:1].expand(senders.numel())  # where it does not matter which
    return starts, senders, types_of(types, nodes, edges)


def types_of(
    types: GraphTypes, nodes: Tensor, edges: Tensor, sender_offsets: tuple[int, ...] | None = None
) -> GraphTypes:
    """The types of some nodes and edges of a typed graph, with their arrays. Each type's ``n_id`` holds the nodes' ids.

    Args:
        types: The types of the graph.
        nodes: Ids, those of the first node type first, and so on.
        edges: The edges into them, row after row, by their positions in the graph.
        sender_offsets: That of the new types.
    """
    number, local = types.to_local(nodes)
    if len(types.edge_types) > 1:
        kinds, place = types.edge_type[edges], places(types.edge_type, edges, len(types.edge_types))
    else:  # no byte for each
        kinds, place = torch.zeros(1, dtype=types.edge_type.dtype).expand(edges.numel()), edges
    counts = torch.bincount(number, minlength=len(types.node_types)).tolist()
    node_arrays = {}
    for kind, ids in zip(types.node_types, local.split(counts), strict=True):
        node_arrays[kind] = {name: take_rows(array, ids) for name, array in types.node_arrays[kind].items()}
        node_arrays[kind].setdefault("n_id", ids)
    edge_arrays = {}
    for index, edge_type in enumerate(types.edge_types):
        of_type = place[kinds == index] if types.edge_arrays[edge_type] else place[:0]
        edge_arrays[edge_type] = {name: take_rows(a, of_type) for name, a in types.edge_arrays[edge_type].items()}
    num_edges = tuple(torch.bincount(kinds, minlength=len(types.edge_types)).tolist())
    made = (types.node_types, offsets_of(counts), types.edge_types, num_edges, kinds, node_arrays, edge_arrays)
    return GraphTypes(*made, types.time, sender_offsets=sender_offsets, tables=types.tables)


def places(edge_type: Tensor, positions: Tensor, num_types: int) -> Tensor:
    """Where each edge, given by its position in the graph, stands among the edges of its type.

    It reads all of ``edge_type`` once, in pieces.
    """
    order = positions.argsort()
    out, before = torch.empty_like(positions), torch.zeros(num_types, dtype=torch.int64)
    reach = max(edge_type.numel(), 1) + EDGES_PER_PIECE  # no edges are one piece, too
    ends = torch.searchsorted(positions[order], torch.arange(0, reach, EDGES_PER_PIECE))
    for number, piece in enumerate(edge_type.split(EDGES_PER_PIECE)):
        kinds = piece.to(torch.int64)
        counts = torch.bincount(kinds, minlength=num_types)
        by_type = torch.argsort(kinds, stable=True)
        rank = torch.empty_like(by_type)
        rank[by_type] = torch.arange(kinds.numel()) + (before - counts.cumsum(0) + counts).repeat_interleave(counts)
        some = order[ends[number] : ends[number + 1]]
        out[some] = rank[positions[some] - number * EDGES_PER_PIECE]
        before += counts
    return out
