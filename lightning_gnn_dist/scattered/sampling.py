"""Batches of a scattered graph: the same, bit for bit, as of one that every host has.

frontier -> its owners draw (two exchanges a hop) -> ... -> the rows of all nodes of a bulk, once
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.sampling.base import BatchKey, Sample, check_seeds
from lightning_gnn_dist.sampling.batch import Arrays, SampledData, assemble
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.stack import Edges, Stack
from lightning_gnn_dist.sampling.torch_rng import keys_of
from lightning_gnn_dist.scattered.graph import ScatteredGraph


def batches(
    graph: ScatteredGraph,
    sampler: NeighborSampler,
    seeds: Sequence[Tensor],
    keys: Sequence[BatchKey],
    *,
    widen: bool = True,
) -> list[SampledData]:
    """The batches of a bulk. Collective: a rank with fewer seeds than others gives batches without any."""
    samples = sample_bulk(graph, sampler, seeds, keys)
    nodes, places = _union([sample.nodes for sample in samples])
    arrays = graph.fetch(nodes)
    edges: dict[str, Tensor] = {}
    if graph.has_edge_arrays:
        ids, positions = _union([sample.edge_ids for sample in samples if sample.edge_ids is not None])
        edges = graph.fetch_edges(ids)
        samples = [sample._replace(edge_ids=at) for sample, at in zip(samples, positions, strict=True)]
    rows = Arrays(arrays, edges)
    return [assemble(rows, sample._replace(nodes=at), widen=widen) for sample, at in zip(samples, places, strict=True)]


def sample_bulk(
    graph: ScatteredGraph, sampler: NeighborSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[Sample]:
    """What ``sampler`` draws from the whole graph. Collective."""
    stack = Stack([check_seeds(ids, graph.num_nodes) for ids in seeds], graph.num_nodes)
    for hop, fanout in enumerate(sampler.num_neighbors):
        batch, nodes = stack.frontier
        words = keys_of(keys, hop, nodes.device)
        drawn = graph.draw(nodes, batch, words, fanout, replace=sampler.replace)
        row = torch.arange(nodes.numel()).repeat_interleave(drawn.counts)
        position = drawn.senders if drawn.edge_ids is None else drawn.edge_ids
        stack.grow(Edges(row, drawn.senders, position, None))
    return stack.samples(with_ids=graph.has_edge_arrays)


def check_sampler(sampler: object) -> NeighborSampler:
    """Refuse what owners cannot draw by themselves."""
    if isinstance(sampler, NeighborSampler) and sampler.weight is None:
        return sampler
    raise ValueError(
        f"A scattered graph is sampled by NeighborSampler without weight, got {sampler!r}: other samplers look at "
        "several rows at a time, and these are on several hosts. Choose it, or give every host the whole graph."
    )


def _union(vectors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The distinct entries of several vectors, and where among them each vector's are."""
    union, inverse = torch.cat(list(vectors)).unique(return_inverse=True)
    return union, inverse.split([vector.numel() for vector in vectors])
