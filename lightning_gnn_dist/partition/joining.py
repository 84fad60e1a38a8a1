"""New nodes of a graph join the parts of those that were there, without a new cut."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_between, check_instance
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions, senders_by_row, starts_of
from lightning_gnn_dist.partition import kernels
from lightning_gnn_dist.partition.base import MAX_SHARE, Partition, part_capacity

log = logging.getLogger(__name__)

PASSES = 3  # the first places nodes by those that are placed, the others see all
PAYS = 0.02  # of all edges: where a new cut may save so many, it is advised


def join_partition(partition: Partition, graph: Graph, slack: float = 0.05) -> Partition:
    """Return parts for a graph that has got nodes: those that were there stay, and each new one joins its neighbours.

    A new node goes where most of its neighbours are, in both directions, less as a part fills up (as
    :class:`StreamingPartitioner` places nodes); without neighbours, to the smallest part. A line of the log says how
    many edges are cut, and whether a new cut would pay.

    Args:
        partition: The parts of an earlier version of the graph, such as ``data.partition(4)``.
        graph: The graph now.
        slack: A part takes new nodes until it has ``1 + slack`` times the average.
    """
    check_instance("partition", partition, Partition, "a Partition of an earlier version, such as data.partition(4)")
    check_instance("graph", graph, Graph, "a Graph, such as graph.extended(nodes) returns")
    check_between(0, MAX_SHARE, slack=slack)
    graph.check_whole()
    graph.check_edges()
    assignment, new = _assigned(partition, graph)
    if not new.numel():
        return Partition(assignment, partition.num_parts)
    nodes = torch.cat([new, (assignment >= 0).nonzero().view(-1)])  # the new ones first
    place = torch.empty_like(nodes)
    place[nodes] = torch.arange(len(nodes))
    starts, neighbors = _neighbors(graph, new, assignment < 0, place)
    parts = assignment[nodes].numpy()
    sizes = partition.counts().numpy()
    capacity = part_capacity(graph.num_nodes, partition.num_parts, slack)
    rows = starts.numpy(), neighbors.numpy(), np.empty(0, np.int64)
    for _ in range(PASSES):
        kernels.stream(*rows, parts, sizes.copy(), capacity, 0, False, 0.0)
    assignment[new] = torch.from_numpy(parts[: len(new)])
    joined = Partition(assignment, partition.num_parts)
    log.info("%s", advice(joined, graph, new))
    return joined


def advice(partition: Partition, graph: Graph, new: Tensor) -> str:
    """Say how many edges are cut, and whether to cut anew. It reads all edges."""
    is_new = torch.zeros(graph.num_nodes, dtype=torch.bool).index_fill_(0, new, True)
    cut, edges = torch.zeros(2), torch.zeros(2)  # between nodes that were there, and at new ones
    parts = partition.assignment
    for rows, senders in senders_by_row(graph.indptr, graph.indices):
        kind = (is_new[rows] | is_new[senders]).long()
        edges += torch.bincount(kind, minlength=2)
        cut += torch.bincount(kind[parts[rows] != parts[senders]], minlength=2)
    known, found = (cut / edges.clamp(min=1)).tolist()
    saved = (found - known) * float(edges[1]) / max(float(edges.sum()), 1)
    sizes = partition.counts()
    uneven = float(sizes.max()) / max(float(sizes.double().mean()), 1)
    advised = (
        f"a new cut may save {saved:.0%} of all edges, and pays" if saved >= PAYS else "a new cut would hardly save any"
    )
    return (
        f"{new.numel():,} new nodes have joined {partition.num_parts} parts, of which the largest has {uneven:.2f} "
        f"times the mean: {found:.1%} of their edges are cut, and {known:.1%} of the others; {advised}."
    )


def _assigned(partition: Partition, graph: Graph) -> tuple[Tensor, Tensor]:
    """The part of each node, -1 of new ones, and the new ones."""
    counts, types = partition.assignment.numel(), graph.types
    earlier = next((known for known in types.history if sum(known.values()) == counts), None)
    earlier = types.num_nodes if counts == graph.num_nodes else earlier
    if earlier is None:
        sizes = [sum(known.values()) for known in types.history] + [graph.num_nodes]
        raise ValueError(
            f"partition assigns {counts} nodes, and the graph had {', '.join(map(str, dict.fromkeys(sizes)))} in its "
            "versions: give the parts of one of them."
        )
    assignment, first = torch.full((graph.num_nodes,), -1, dtype=torch.int32), 0
    for kind in types.node_types:
        number, at = earlier.get(kind, 0), types.nodes_of(kind).start
        assignment[at : at + number] = partition.assignment[first : first + number]
        first += number
    return assignment, (assignment < 0).nonzero().view(-1)


def _neighbors(graph: Graph, new: Tensor, is_new: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbours of new nodes, row after row, in both directions, by their places."""
    degrees = graph.indptr[new + 1] - graph.indptr[new]
    received = graph.indices[edge_positions(graph.indptr, new)].to(torch.int64)
    owners, others = [place[new].repeat_interleave(degrees)], [place[received]]
    for rows, senders in senders_by_row(graph.indptr, graph.indices):
        sent = is_new[senders]
        owners.append(place[senders[sent]])
        others.append(place[rows[sent]])
    owner, other = torch.cat(owners), torch.cat(others)
    return starts_of(torch.bincount(owner, minlength=len(new))), other[owner.argsort(stable=True)]
