"""What subgraph samplers share: a batch is some nodes, the seeds first, and every edge between two of them.

All layers compute on the same graph. A batch still has hops: where nothing else is said, all nodes beside the seeds are
found at the first one, and the last layer is computed for the seeds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample, sample_hops
from lightning_gnn_dist.engine.subgraph_kernels import sample_induced
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions, starts_of


def induced(
    graph: Graph, seeds: Tensor, others: Tensor, batch_key: BatchKey, num_hops: int, *, with_ids: bool | None = None
) -> Sample:
    """Sample the seeds, ``others`` (ids may repeat) and all edges among them; with one hop, only the seeds' rows."""
    return sample_hops(graph, seeds, num_hops, sample_induced, others.numpy(), with_ids=with_ids)


def seeds_first(indptr: Tensor, indices: Tensor, hops: Sequence[Tensor], num_hops: int) -> Sample:
    """A whole graph as a sample, renumbered so that its nodes come hop by hop; with one hop, only the seeds' rows.

    Otherwise those of all nodes, also of the last hop, whose edges count as edges of the hop before.
    """
    nodes = torch.cat([*hops])
    position = torch.empty_like(nodes)
    position[nodes] = torch.arange(nodes.numel())

    rows = nodes if num_hops > 1 else hops[0]
    edges = edge_positions(indptr, rows)
    starts = starts_of(indptr[rows + 1] - indptr[rows])
    small = torch.int32 if edges.numel() < 2**31 else torch.int64

    num_nodes = [hop.numel() for hop in hops] + [0] * (num_hops + 1 - len(hops))
    upto = [0, *starts[torch.tensor(num_nodes[: num_hops - 1], dtype=torch.int64).cumsum(0)].tolist(), edges.numel()]
    return Sample(
        nodes=nodes,
        indptr=starts.to(small),
        indices=position[indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=num_nodes,
        num_sampled_edges=[end - start for start, end in pairwise(upto)],
        edge_ids=edges,
    )


def by_distance(indptr: Tensor, indices: Tensor, seeds: Tensor, num_hops: int) -> list[Tensor]:
    """The nodes of a graph by their distance from the seeds, those that are ``num_hops`` away and more at last."""
    hops, is_left = [seeds], torch.ones(indptr.numel() - 1, dtype=torch.bool).index_fill_(0, seeds, False)
    for _ in range(num_hops - 1):
        is_sender = torch.zeros_like(is_left)
        is_sender[indices[edge_positions(indptr, hops[-1])].to(torch.int64)] = True
        hops.append((is_sender & is_left).nonzero().view(-1))
        is_left[hops[-1]] = False
    return [*hops, is_left.nonzero().view(-1)]
