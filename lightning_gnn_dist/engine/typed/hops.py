"""Runs the kernel of sampling neighbours."""

from __future__ import annotations

from torch import Tensor

from lightning_gnn_dist.engine.hop_kernels import ONE_TYPE, Draws, sample
from lightning_gnn_dist.engine.hops import sample_hops
from lightning_gnn_dist.engine.kernels import Array, Rule
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import GraphTypes


def edge_types_of(types: GraphTypes | None) -> Array:
    """The type of each edge, as kernels take it: empty where there is one type alone."""
    if types is None or len(types.edge_types) == 1:
        return ONE_TYPE
    numbers: Array = types.edge_type.numpy()
    return numbers


def sample_neighbors(graph: Graph, seeds: Tensor, fanouts: Array, batch_key: BatchKey, rule: Rule) -> Sample:
    """Draw so many neighbours of each edge type at each hop, ``fanouts[hop, type]``."""
    draws = Draws(edge_types_of(graph.types), fanouts, typed_keys(*batch_key, *fanouts.shape), rule)
    return sample_hops(graph, seeds, len(fanouts), sample, draws, with_kinds=graph.types is not None)
