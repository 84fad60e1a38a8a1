"""What subgraph samplers share: a batch is some nodes, the seeds first, and every edge between two of them.

All layers compute on the same graph. A batch still has hops: all nodes beside the seeds are found at the first one, and
the last layer is computed for the seeds alone.
"""

from __future__ import annotations

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


def seeds_first(indptr: Tensor, indices: Tensor, seeds: Tensor, num_hops: int) -> Sample:
    """A whole graph as a sample, renumbered so that the seeds come first; with one hop, only the seeds' rows."""
    num_nodes = indptr.numel() - 1
    others = torch.ones(num_nodes, dtype=torch.bool).index_fill_(0, seeds, False).nonzero().view(-1)
    nodes = torch.cat([seeds, others])
    position = torch.empty_like(nodes)
    position[nodes] = torch.arange(nodes.numel())

    rows = nodes if num_hops > 1 else seeds
    edges = edge_positions(indptr, rows)
    degrees = indptr[rows + 1] - indptr[rows]
    starts = starts_of(degrees)
    small = torch.int32 if edges.numel() < 2**31 else torch.int64

    of_seeds = int(starts[seeds.numel()])
    unused = [0] * (num_hops - 1)
    return Sample(
        nodes=nodes,
        indptr=starts.to(small),
        indices=position[indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=[seeds.numel(), others.numel(), *unused],
        num_sampled_edges=[of_seeds, edges.numel() - of_seeds, *unused][:num_hops],
        edge_ids=edges,
    )
