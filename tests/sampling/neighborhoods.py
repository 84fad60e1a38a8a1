"""A sample of neighbours, its edges, and graphs to draw from."""

from collections.abc import Sequence

import torch

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.engine.sample import BatchKey, Sample

PLACE = BatchKey(seed=0, epoch=1, batch=2)


def one(graph: Graph, seeds: list[int], *num_neighbors: int, place: BatchKey = PLACE) -> Sample:
    return NeighborSampler(num_neighbors).sample_bulk(graph, [torch.tensor(seeds, dtype=torch.int64)], [place])[0]


def edge_index_of(graph: Graph) -> torch.Tensor:
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return torch.stack([graph.indices.long(), rows])


def assert_same(left: Sequence[Sample], right: Sequence[Sample], rtol: float = 0.0) -> None:
    """Samples are equal, but for weights that may be computed in another order; others may lie on a device."""
    for one, other in zip(left, right, strict=True):
        for name in ("nodes", "indptr", "indices", "edge_ids"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or (mine.dtype == theirs.dtype and mine.equal(theirs.cpu())), name
        for name in ("num_sampled_nodes", "num_sampled_edges", "is_constant"):
            assert getattr(one, name) == getattr(other, name), name
        for name in ("edge_weight", "node_norm"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.allclose(mine, theirs.cpu(), rtol=rtol, atol=1e-8 * (rtol > 0)), name


# What may happen to the arrays of a graph of 400 nodes behind its back: the array, the place, the value.
CHANGES = [("indices", 7, 10**9), ("indices", 7, -1), ("indices", 7, 400), ("indices", 7, -(2**31))]
CHANGES += [("indptr", 3, -5), ("indptr", 3, 10**12), ("indptr", 400, 10**7)]


def damaged(graph: Graph, name: str, place: int, value: int) -> Graph:
    getattr(graph, name).numpy()[place] = value  # which torch is not told of
    return graph
