"""Puts tables of nodes and edges, one for each type, together to one CSR over all nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names, within
from lightning_gnn_dist.graph.typed.types import GraphTypes, edge_type_dtype, offsets_of


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
    if any(nodes):
        check_names(tuple(nodes), tuple(edges))
    for kind, table in nodes.items():
        with within(kind):
            _check_nodes(table, time)
    offsets = offsets_of([table.num for table in nodes.values()])
    convert.check_num_nodes(offsets[-1])
    first = dict(zip(nodes, offsets, strict=False))
    everywhere = {name for table in (*nodes.values(), *edges.values()) for name in table[1]}
    if time is not None:
        check_word("time", time, "time")
    if time is not None and time not in everywhere:
        raise ValueError(f"time names the array {shown(time)}, and no node type and no edge type has it.")
    orders = {}
    for edge_type, links in edges.items():
        with within(edge_type):
            _check_edges(edge_type, links, nodes, time)
            orders[edge_type] = _order(links, nodes[edge_type[0]], time)
    counts = [order.numel() for order in orders.values()]
    sender = torch.cat(
        [edges[kind].edge_index[0, order].to(torch.int64) + first[kind[0]] for kind, order in orders.items()]
    )
    order: Tensor | slice = slice(None)
    receiver = torch.cat([table.edge_index[1].to(torch.int64) + first[kind[2]] for kind, table in edges.items()])
    if len(edges) > 1:  # edges of one row stay in order of types, times and senders
        starts = offsets_of(counts)
        of_all = torch.cat([order + start for order, start in zip(orders.values(), starts, strict=False)])
        order = torch.argsort(receiver[of_all], stable=True)
    degrees = torch.bincount(receiver, minlength=offsets[-1])
    numbers = torch.arange(len(counts)).to(edge_type_dtype(len(counts))).repeat_interleave(torch.tensor(counts))
    types = GraphTypes(
        tuple(nodes),
        offsets,
        tuple(edges),
        tuple(counts),
        numbers[order],
        {kind: dict(table.arrays) for kind, table in nodes.items()},
        {kind: {name: array[orders[kind]] for name, array in table.arrays.items()} for kind, table in edges.items()},
        time,
    )
    indptr = starts_of(degrees)
    return indptr, sender[order].to(convert.index_dtype(offsets[-1])), types


def _check_nodes(table: NodeTable, time: str | None) -> None:
    if table.num < 1:
        raise ValueError("there are no nodes of this type: leave it out, and the edges from and to it.")
    convert.check_rows("node", table.arrays, table.num)
    convert.check_time(table.arrays, time, "node")


def _check_edges(edge_type: EdgeType, table: EdgeTable, nodes: Mapping[str, NodeTable], time: str | None) -> None:
    convert.check_pairs(table.edge_index)
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


def _order(table: EdgeTable, senders: NodeTable, time: str | None) -> Tensor:
    """The edges by receiver, then by time where there is one, then by sender."""
    sender, receiver = table.edge_index.to(torch.int64)
    times = None
    if time is not None and time in table.arrays:
        times = table.arrays[time]
    elif time is not None and time in senders.arrays:
        times = senders.arrays[time][sender]
    if times is None:
        return torch.argsort(receiver * senders.num + sender, stable=True)
    order = torch.argsort(sender, stable=True)
    order = order[torch.argsort(times[order], stable=True)]
    return order[torch.argsort(receiver[order], stable=True)]
