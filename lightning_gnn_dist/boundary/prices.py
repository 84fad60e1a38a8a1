"""What each way to treat a boundary would cost on a partition: rows held, bytes in RAM, bytes sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Halo, History, Isolated
from lightning_gnn_dist.boundary.work import Pass
from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of
from lightning_gnn_dist.layers.reach import Neighbourhoods
from lightning_gnn_dist.partition.advice import bytes_of_part, bytes_per_part
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.partition_report import PartitionReport, learned_from

BYTES_OF_A_NUMBER = 4  # float32
SHARE, EVERY = 0.1, 5  # of which prices are told
_MOST_EDGES = 4_000_000_000  # that are looked at, some minutes' work, before one part stands for all


class Price(NamedTuple):
    """The price of a boundary, of the part that pays most.

    Attributes:
        boundary: What is paid for.
        rows: Nodes of other parts whose input rows a part holds.
        bytes_held: Bytes of a part in RAM.
        bytes_sent: Bytes that a rank sends for its boundary, beside gradients and models.
        loses: What of the neighbourhoods of training nodes is not seen, in words.
        per: What ``bytes_sent`` is sent in.
        work: The work of a step of a module with ``layers()`` on a whole part, in edges.
        times: What all ranks compute in a pass of such steps, in times of one process.
    """

    boundary: Boundary
    rows: int
    bytes_held: int
    bytes_sent: int
    loses: str
    per: Literal["step", "round"] = "step"
    work: int = 0
    times: float = 1.0


def prices(graph: Graph, partition: Partition, report: PartitionReport, num_layers: int, width: int) -> Iterator[Price]:
    """Yield the price of each boundary that the graph can have.

    Args:
        graph: The whole graph, of which all edges are read several times.
        partition: The part of each node.
        report: The figures of the partition.
        num_layers: Layers of the model.
        width: Numbers in a row between two layers.
    """
    halos = _halos(graph, partition, report, num_layers)
    rows_before = 0
    yield Price(Isolated(), 0, int(bytes_per_part(graph, report).max()), 0, f"{report.cut_ratio:.0%} of all edges")
    for hops, (rows, held, work, times) in enumerate(halos, 1):
        is_exact = hops == num_layers or rows == rows_before  # no node of the last hop, which would receive nothing
        away = "what is more than a hop away" if hops == 1 else f"what is more than {hops} hops away"
        yield Price(Halo(hops), rows, held, 0, "nothing" if is_exact else away, work=work, times=times)
        if is_exact:
            break
        rows_before = rows
    rows, held, *_ = halos[0]
    between = _rows_between(graph, partition, num_layers)
    if not between.any():  # as of a single layer, or a single part
        yield Price(Exchange(), rows, held, 0, "nothing")
        return
    of_row, (kept, sent) = width * BYTES_OF_A_NUMBER, _rows_of_a_meeting(graph, partition, num_layers)
    yield Price(History(), rows, held + kept * of_row, sent * of_row, "what changes in a round", "round")
    some, sent = (_most_sent(between, share) for share in (SHARE, 1.0))
    yield Price(Exchange(share=SHARE), rows, held, some * of_row, f"{1 - SHARE:.0%} of the rows, others in each step")
    yield Price(Exchange(every=EVERY), rows, held, sent * of_row // EVERY, f"what changes in {EVERY} steps")
    yield Price(Exchange(overlap=True), rows, held, sent * of_row, "what changes in a step")
    yield Price(Exchange(), rows, held, sent * of_row, "nothing")


def short_name(boundary: Boundary) -> str:
    """How a boundary is written, without what is not given."""
    return f"Halo({boundary.hops})" if isinstance(boundary, Halo) else brief(boundary)


def bytes_with_halos(graph: Graph, hops: list[Tensor]) -> Tensor:
    """Bytes in RAM of a part with halos of 1, 2 ... hops, shape ``(num_hops,)``.

    Args:
        graph: The whole graph.
        hops: The nodes 0, 1, 2 ... hops away from the part's nodes.
    """
    edges = torch.stack([degrees_of(graph.indptr, nodes).sum() for nodes in hops[:-1]])
    return bytes_of_part(graph, _upto(hops)[1:], edges.cumsum(0))


def _upto(hops: list[Tensor]) -> Tensor:
    """How many nodes lie within 0, 1, 2 ... hops."""
    return torch.tensor([nodes.numel() for nodes in hops]).cumsum(0)


def _halos(
    graph: Graph, partition: Partition, report: PartitionReport, num_layers: int
) -> list[tuple[int, int, int, float]]:
    """For halos of 1, 2 ... hops, the most rows, bytes and work of a part, and what all compute."""
    neighbourhoods, parts = Neighbourhoods(graph, num_layers), torch.arange(partition.num_parts)
    if partition.num_parts * num_layers * graph.num_edges > _MOST_EDGES:
        parts = report.halo_nodes.argsort(descending=True)[:1]  # it likely pays most
    is_seed, whole = learned_from(graph, graph.types.seeds), Pass(num_layers, math.inf, 1, 1, is_layered=True)
    nodes, held, work = [], [], []
    for part in parts.tolist():
        is_own = partition.assignment == part
        hops = neighbourhoods.hops(is_own.nonzero().view(-1))
        nodes.append(_upto(hops))
        held.append(bytes_with_halos(graph, hops))
        work.append(whole.with_halos(graph, neighbourhoods, hops, (is_own & is_seed).nonzero().view(-1)))
    of_one, stand_for = whole.of_one(graph), partition.num_parts / len(work)
    times = [whole.times(of_parts, of_one) * stand_for for of_parts in zip(*work, strict=True)]
    found = torch.stack(nodes), torch.stack(held), torch.tensor(work)
    most = [each.amax(0).tolist() for each in (found[0][:, 1:] - found[0][:, :1], *found[1:])]
    return list(zip(*most, times, strict=True))


def _rows_between(graph: Graph, partition: Partition, num_layers: int) -> Tensor:
    """The rows that ranks (first) read of other ranks (second) in a step, behind all layers but the last."""
    neighbourhoods, owner, num_parts = Neighbourhoods(graph, 1), partition.assignment, partition.num_parts
    needed = learned_from(graph, graph.types.seeds)
    between = torch.zeros(max(num_layers - 1, 1), num_parts, num_parts, dtype=torch.int64)
    for layer in range(num_layers - 1):
        computed = needed.clone()
        for part in range(num_parts):
            nodes = (computed & (owner == part)).nonzero().view(-1)
            read = neighbourhoods.senders(nodes)
            givers = owner[read]
            between[layer, part] = torch.bincount(givers[givers != part], minlength=num_parts)
            needed[read] = True
    return between


def _most_sent(between: Tensor, share: float) -> int:
    """The most rows and gradients of rows that a rank sends in a step."""
    rows = (share * between.double()).ceil().sum(0)
    return int((rows.sum(0) + rows.sum(1)).max())  # rows by those who own them, gradients by those who read them


def _rows_of_a_meeting(graph: Graph, partition: Partition, num_layers: int) -> tuple[int, int]:
    """The most rows that a rank keeps of others from meeting to meeting, and the most that one sends for that."""
    neighbourhoods, owner, num_parts = Neighbourhoods(graph, 1), partition.assignment, partition.num_parts
    kept, sent = torch.zeros(2, num_parts, dtype=torch.int64)
    in_steps, for_others = (
        learned_from(graph, graph.types.seeds),
        torch.zeros(graph.num_nodes, dtype=torch.bool),
    )  # are computed
    for _ in range(num_layers - 1):
        before = in_steps.clone(), for_others.clone()
        for part in range(num_parts):
            own, asked = owner == part, torch.zeros(graph.num_nodes, dtype=torch.bool)
            for computed, known in zip(before, (in_steps, for_others), strict=True):
                read = neighbourhoods.senders((computed & own).nonzero().view(-1))
                is_own = own[read]
                known[read[is_own]] = asked[read[~is_own]] = True
                kept[part] += (~is_own).sum() if known is in_steps else 0
            sent += torch.bincount(owner[asked], minlength=num_parts)
            for_others |= asked
    return int(kept.max()), int(sent.max())
