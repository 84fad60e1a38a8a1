"""Reads the part of a rank from a graph with types: the nodes of each type in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, degrees_of, row_pieces
from lightning_gnn_dist.graph.typed.induced import induced


def learned_from(graph: Graph) -> Tensor:
    """The training nodes of a graph with types; all nodes where no mask tells, as in a graph whose edges are split."""
    is_marked = any("train_mask" in arrays for arrays in graph.types.node_arrays.values())
    return graph.split("train") if is_marked else torch.arange(graph.num_nodes)


def read_typed(
    graph: Graph,
    residents: Tensor,
    own: Tensor,
    train: Tensor,
    boundary: Boundary,
    coverage: Coverage | None,
    seed: int,
) -> Graph:
    """Return a part in RAM, whose ``node_arrays`` tell of all its nodes, and whose types of those of each type.

    Args:
        graph: The whole graph.
        residents: The nodes of the part without its halo.
        own: Those of them that the rank learns from, in increasing order.
        train: The training nodes of the whole graph.
        boundary: Which nodes around the part come along.
        coverage: Weighs the nodes. With None there are no weights.
        seed: Decides everything random.
    """
    hops = boundary.around(graph, residents, lambda nodes: _edges_into(graph, nodes), seed)
    nodes = torch.cat([residents, *hops]).sort().values
    receives = ~Lookup(hops[-1]).contains(nodes) if hops else None
    indptr, indices, types = induced(graph.indptr, graph.indices, graph.types, nodes, receives)
    is_own = Lookup(own).contains(nodes)
    arrays = {"n_id": nodes, "train_mask": is_own & Lookup(train).contains(nodes)}
    part = typed_graph(indptr, indices, types, node_arrays=arrays)
    if coverage is not None:
        part.node_arrays["coverage"] = weights_of_part(coverage, part, degrees_of(graph.indptr, nodes), is_own)
    return part


def _edges_into(graph: Graph, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    for some, at in row_pieces(graph.indptr, nodes):
        rows = torch.arange(done, done + some.numel()).repeat_interleave(degrees_of(graph.indptr, some))
        yield rows, graph.indices[at].to(torch.int64)
        done += some.numel()


def weights_of_part(coverage: Coverage, part: Graph, degrees: Tensor, is_own: Tensor) -> Tensor:
    """Return the coverage of every node. The prior is the mean of the rank's own, which do not come first."""
    if coverage.prior is None and coverage.shrinkage:
        plain = Coverage(shrinkage=0.0, prior=0.0).of(part, degrees, 0)[is_own]
        coverage = replace(coverage, prior=float(plain.mean()) if plain.numel() else 1.0)
    return coverage.of(part, degrees, 0)
