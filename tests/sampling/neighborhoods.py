"""A sample of neighbours, its edges, and graphs to draw from."""

from __future__ import annotations

import torch

from lightning_gnn_dist import BatchKey, Graph, NeighborSampler, Sample

PLACE = BatchKey(seed=0, epoch=1, batch=2)


def one(graph: Graph, seeds: list[int], *num_neighbors: int, place: BatchKey = PLACE) -> Sample:
    return NeighborSampler(num_neighbors).sample_bulk(graph, [torch.tensor(seeds, dtype=torch.int64)], [place])[0]


def edges_of(sample: Sample) -> torch.Tensor:
    """The sampled edges as ids of the graph, senders first, sorted."""
    rows = torch.arange(sample.indptr.numel() - 1).repeat_interleave(sample.indptr.diff())
    edge_index = torch.stack([sample.nodes[sample.indices.long()], sample.nodes[rows]])
    return edge_index[:, (edge_index[0] * 10**6 + edge_index[1]).argsort()]


def edge_index_of(graph: Graph) -> torch.Tensor:
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return torch.stack([graph.indices.long(), rows])


def star(degree: int) -> Graph:
    """Node 0 receives from nodes 1 to `degree`."""
    return Graph.from_edge_index(torch.stack([torch.arange(1, degree + 1), torch.zeros(degree).long()]), degree + 1)
