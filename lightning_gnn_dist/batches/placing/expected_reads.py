"""Which rows batches read most often: expected draws from the training nodes, hop by hop.

    r_0(v) = 1 for each training node v,   r_(h+1)(u) = sum over edges u -> v of f(r_h(v)) min(1, s_h / deg v)
    f(r) = B (1 - exp(-r / B)), the batches of B that hold a node which is drawn r times

s_h is the number of neighbours drawn at hop h. Nothing is drawn, so the order is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import senders_by_row
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


class Reads(NamedTuple):
    """How often batches of a pass over the training nodes read each node.

    Attributes:
        of_nodes: Batches that are expected to hold each node, float64, shape ``(N,)``.
        num_batches: Batches of a pass.
    """

    of_nodes: Tensor
    num_batches: int


def expected_reads(graph: Graph, sampler: Sampler, batch_size: int) -> Reads:
    """Return how often training batches are expected to read each node.

    A graph without training nodes, as of links, counts all nodes. Of a sampler that is no ``NeighborSampler``, one
    neighbour a hop is counted, and neighbours that are drawn by weight count as equally likely.
    """
    marked = list(graph.types.splits("train").values())
    seeds = torch.cat(marked) if marked else torch.arange(0)
    seeds = seeds if len(seeds) else torch.arange(graph.num_nodes)
    num_batches = max(1, -(-len(seeds) // batch_size))
    drawn = torch.zeros(graph.num_nodes, dtype=torch.float64)
    drawn[seeds] = 1.0
    total, held = drawn.clone(), drawn
    for size in per_hop(sampler, graph.types):
        drawn = _senders_drawn(graph, held, size)
        held = _batches_with(drawn, num_batches)
        total += drawn
    return Reads(_batches_with(total, num_batches), num_batches)


def most_read(reads: Tensor, types: GraphTypes, widths: Sequence[int], room: int) -> list[Tensor]:
    """Return the nodes that are read most of those whose rows fit into ``room`` bytes together.

    Args:
        reads: How often each node is read.
        types: Those of the graph.
        widths: Bytes of a row of each node type. Types with 0 are left out.
        room: Bytes.

    Returns:
        For each node type ids in it, increasing.
    """
    order = reads.argsort(descending=True, stable=True)
    width = torch.tensor(widths)[types.type_of(order)]
    order, width = order[width > 0], width[width > 0]
    chosen = order[width.cumsum(0) <= room].sort().values
    bounds = torch.searchsorted(chosen, torch.tensor(types.offsets)).tolist()
    ends = zip(bounds[:-1], bounds[1:], types.offsets[:-1], strict=True)
    return [chosen[first:last] - start for first, last, start in ends]


def per_hop(sampler: Sampler, types: GraphTypes) -> list[int]:
    """Return how many neighbours of a node are drawn in each hop, -1 for all: 1 if it is no ``NeighborSampler``."""
    if not isinstance(sampler, NeighborSampler):
        return [1] * sampler.num_hops
    return [-1 if (numbers < 0).any() else int(numbers.sum()) for numbers in sampler.of_types(types)]


def _batches_with(drawn: Tensor, num_batches: int) -> Tensor:
    return -num_batches * torch.expm1(-drawn / num_batches)


def _senders_drawn(graph: Graph, held: Tensor, size: int) -> Tensor:
    """Return how often nodes are drawn as senders to nodes that so many batches hold."""
    share = held if size < 0 else held * (size / graph.degrees().clamp(min=1)).clamp(max=1.0)
    drawn = torch.zeros_like(held)
    for rows, senders in senders_by_row(graph.indptr, graph.indices):
        drawn.index_add_(0, senders, share[rows])
    return drawn
