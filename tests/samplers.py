"""Every sampler of nodes, for the tests that hold for all of them. A new one needs a line here, and no other."""

import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.sampling.base import Sampler
from tests.extensions import brought

SAMPLERS: dict[str, Sampler] = {
    "neighbor": lgd.NeighborSampler([4, 3]),
    "neighbor_three_hops": lgd.NeighborSampler([3, 2, 2]),
    "neighbor_all": lgd.NeighborSampler([-1, -1]),
    "neighbor_replaced": lgd.NeighborSampler([4, 3], replace=True),
    "neighbor_weighted": lgd.NeighborSampler([4, 3], weight="weight"),
    "ladies": lgd.LadiesSampler([40, 30]),
    "fastgcn": lgd.FastGCNSampler([40, 30]),
    "ladies_weighted": lgd.LadiesSampler([40, 30], weight="weight"),
    "cluster": lgd.ClusterSampler(2),
    "whole": lgd.WholePartSampler(2),
}
for more in brought("samplers"):
    SAMPLERS |= more.SAMPLERS


def of_extensions(name: str) -> list[Sampler]:
    """Samplers of a kind: of TWO_HOPS, of graphs INDUCED by nodes or APART around each seed, LARGE, or WEIGHED."""
    return [sampler for more in brought("samplers") for sampler in getattr(more, name, ())]


def graph_for_all(num_nodes: int = 400) -> lgd.Graph:
    """A graph with the arrays that they ask for."""
    plain = lgd.communities(num_nodes)
    weight = torch.rand(plain.num_edges, generator=torch.Generator().manual_seed(0))
    chunk = torch.arange(num_nodes) * 12 // num_nodes
    return lgd.Graph(plain.indptr, plain.indices, plain.node_arrays | {"chunk": chunk}, {"weight": weight})
