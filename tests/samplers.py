"""Every sampler of nodes, for the tests that hold for all of them. A new one needs a line here, and no other."""

import torch

from lightning_gnn_dist import (
    ClusterSampler,
    FastGCNSampler,
    Graph,
    LadiesSampler,
    NeighborSampler,
    RandomWalkSampler,
    ShadowSampler,
    TemporalSampler,
    WholePartSampler,
    communities,
)
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.matrix import MatrixSampler

SAMPLERS: dict[str, Sampler] = {
    "neighbor": NeighborSampler([4, 3]),
    "neighbor_three_hops": NeighborSampler([3, 2, 2]),
    "neighbor_all": NeighborSampler([-1, -1]),
    "neighbor_replaced": NeighborSampler([4, 3], replace=True),
    "neighbor_weighted": NeighborSampler([4, 3], weight="weight"),
    "ladies": LadiesSampler([40, 30]),
    "fastgcn": FastGCNSampler([40, 30]),
    "ladies_weighted": LadiesSampler([40, 30], weight="weight"),
    "matrix": MatrixSampler(NeighborSampler([4, 3])),
    "walk": RandomWalkSampler(2, visits=4),
    "shadow": ShadowSampler([4, 2], num_hops=2),
    "temporal": TemporalSampler([4, 3], "chunk"),  # whose numbers are times like any
    "cluster": ClusterSampler(2),
    "whole": WholePartSampler(2),
}


def graph_for_all(num_nodes: int = 400) -> Graph:
    """A graph with the arrays that they ask for."""
    plain = communities(num_nodes)
    weight = torch.rand(plain.num_edges, generator=torch.Generator().manual_seed(0))
    chunk = torch.arange(num_nodes) * 12 // num_nodes
    return Graph(plain.indptr, plain.indices, plain.node_arrays | {"chunk": chunk}, {"weight": weight})
