"""Batches of a sharded graph: the same, bit for bit, as where every host has the graph.

frontier -> its owners draw neighbours, hop by hop -> ... -> the features of all nodes of a bulk, fetched once
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import Arrays, SampledData, assemble
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.stack import Edges, Stack
from lightning_gnn_dist.engine.torch_rng import keys_of
from lightning_gnn_dist.sampling.base import check_seeds
from lightning_gnn_dist.sampling.fastgcn import FastGCNSampler
from lightning_gnn_dist.sampling.ladies import LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sharded.layer_sampling import LayerWise, sample_layer_wise
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph, union

ShardedSampler = NeighborSampler | LayerWise


def batches(
    graph: ShardedGraph,
    sampler: ShardedSampler,
    seeds: Sequence[Tensor],
    keys: Sequence[BatchKey],
    *,
    widen: bool = True,
    all_labels: bool = True,
) -> list[SampledData]:
    """Return the batches of a bulk. Collective: a rank with fewer seeds than others passes empty tensors."""
    samples = sample_bulk(graph, sampler, seeds, keys)
    nodes, in_nodes = union([sample.nodes for sample in samples])
    arrays = graph.fetch(nodes)
    edges: dict[str, Tensor] = {}
    if graph.has_edge_arrays:
        ids, in_edges = union([sample.edge_ids for sample in samples if sample.edge_ids is not None])
        edges = graph.fetch_edges(ids)
        samples = [sample._replace(edge_ids=at) for sample, at in zip(samples, in_edges, strict=True)]
    rows = Arrays(arrays, edges)
    return [
        assemble(rows, sample._replace(nodes=at), widen=widen, all_labels=all_labels)
        for sample, at in zip(samples, in_nodes, strict=True)
    ]


def sample_bulk(
    graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[Sample]:
    """Return what ``sampler`` draws from the whole graph, one sample for each batch. Collective."""
    if not isinstance(sampler, NeighborSampler):
        return sample_layer_wise(graph, sampler, seeds, keys)
    stack = Stack([check_seeds(ids, graph.num_nodes) for ids in seeds], graph.num_nodes)
    for hop, fanout in enumerate(sampler.per_hop):
        batch, nodes = stack.frontier
        words = keys_of(keys, hop, nodes.device)
        drawn = graph.draw(nodes, batch, words, fanout, replace=sampler.replace, weight=sampler.weight)
        row = torch.arange(nodes.numel()).repeat_interleave(drawn.counts)
        position = drawn.senders if drawn.edge_ids is None else drawn.edge_ids
        stack.grow(Edges(row, drawn.senders, position, None))
    return stack.samples(with_ids=graph.has_edge_arrays)


def check_sampler(sampler: object) -> ShardedSampler:
    """Return the sampler; refuse one that needs the whole graph on one host."""
    if isinstance(sampler, NeighborSampler | LadiesSampler | FastGCNSampler):
        return sampler
    raise ValueError(
        f"A sharded graph is sampled by NeighborSampler, LadiesSampler or FastGCNSampler, got "
        f"{shown(sampler)}: others "
        "ask for edges among nodes of several hosts. Choose one of these, or give every host the whole graph."
    )
