"""Bulk sampling by products of matrices, exactly as in Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909).

    node-wise    Q: a row for each frontier node of each batch, 1 at the node       P = Q A
    layer-wise   Q: a row for each batch, 1 at all of its frontier                  P = Q (A o A)
    NORM         rows of P become probabilities
    SAMPLE       edges of each row, or columns of each batch, are drawn
    EXTRACT      A_l = Q_R A Q_C: the frontier's rows and the drawn columns; the columns of batch i begin at i * n

It uses the random words of the compiled samplers, so batches are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import FastGCNSampler, Graph, LadiesSampler, NeighborSampler
from lightning_gnn_dist.engine import rng
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.larger_than_memory import device_sampler as tensors
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import (
    Edges,
    Stack,
    below,
    distinct,
    draw,
    keys_of,
    scales,
    unit,
)
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.layer_wise import LayerSampler
from tests.sampling import reference
from tests.sampling.neighborhoods import assert_same
from tests.sampling.reference import random_graph


def matrix_form(
    sampler: NeighborSampler | LayerSampler, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[Sample]:
    """Draw the batches of a sampler by products of matrices. The graph must not hold an edge twice."""
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)  # A: the edge's position plus 1
    matrix[rows, graph.indices.long()] = torch.arange(1, graph.num_edges + 1).double()
    assert matrix.count_nonzero() == graph.num_edges
    stack = Stack(list(seeds), graph.num_nodes)
    for hop, words in enumerate(keys_of(keys, sampler.num_hops, matrix.device)[:, :-1]):
        stack.trim()
        nodes = torch.nn.functional.one_hot(stack.nodes[:-1], graph.num_nodes).double()
        grow = _node_wise if isinstance(sampler, NeighborSampler) else _layer_wise
        stack.grow(grow(sampler, graph, nodes @ matrix, stack, words, hop))
    return stack.samples(with_ids=bool(graph.edge_arrays))


def _entries(product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows, columns and positions of the edges of a product with A."""
    row, column = product.nonzero().T
    return row, column, product[row, column].long() - 1


def _node_wise(sampler: NeighborSampler, graph: Graph, product: Tensor, stack: Stack, words: Tensor, hop: int) -> Edges:
    (row, column, position), nodes = _entries(product), stack.nodes[:-1]
    degrees, size = torch.bincount(row, minlength=nodes.numel()), sampler.per_hop[hop]
    is_drawn = (degrees > (0 if sampler.replace else size)) & (size >= 0)
    keys, ids, bound = (vector[is_drawn, None] for vector in (words[stack.batch[:-1]], nodes, degrees))
    slots = ids[:, :0]
    if size >= 0 and sampler.replace:
        slots = below(draw(keys, ids, torch.arange(size)), bound)
    elif size >= 0:
        slots = distinct(keys, ids, bound, size)
    first = degrees.cumsum(0) - degrees
    entries = torch.cat([(~is_drawn[row]).nonzero().view(-1), (first[is_drawn, None] + slots).view(-1)])
    entries = entries[row[entries].argsort(stable=True)]
    return Edges(row[entries], column[entries], position[entries], None)


def _layer_wise(sampler: LayerSampler, graph: Graph, product: Tensor, stack: Stack, words: Tensor, hop: int) -> Edges:
    batch, n = stack.batch[:-1], graph.num_nodes
    values = 1.0 / graph.degrees().repeat_interleave(graph.degrees()).double()
    if sampler.weight is not None:
        values = graph.edge_arrays[sampler.weight].view(-1).float().double()
    chances = _chances(sampler, graph, values, stack, hop)
    is_drawn = unit(draw(words[:, None], torch.arange(n), 0)) < chances
    row, _, position = _entries(product)
    whole = values.new_zeros(len(product)).index_add_(0, row, values[position])
    row, column, position = _entries(product * is_drawn[batch])  # (Q_R A) Q_C
    weight = values[position] / chances[batch[row], column]
    if sampler.normalize:
        kept = torch.zeros_like(whole).index_add_(0, row, weight)
        weight = weight * torch.where(kept > 0, whole / kept, 1.0)[row]
    return Edges(row, column, position, weight)


def _chances(sampler: LayerSampler, graph: Graph, values: Tensor, stack: Stack, hop: int) -> Tensor:
    """NORM: the probability that each node is drawn for each batch, shape (k, n)."""
    n = graph.num_nodes
    square = torch.zeros(n, n, dtype=torch.float64)
    square[torch.arange(n).repeat_interleave(graph.degrees()), graph.indices.long()] = values.square()
    frontier = torch.ones(1, n, dtype=torch.float64)  # of FastGCN
    if isinstance(sampler, LadiesSampler):
        frontier = torch.zeros(stack.num_batches, n, dtype=torch.float64)
        frontier[stack.batch[:-1], stack.nodes[:-1]] = 1
    product = frontier @ square
    rows = torch.where(product > 0, (scales(product, sampler.num_nodes[hop])[:, None] * product).clamp(max=1), 0.0)
    return rows.expand(stack.num_batches, n)


# The literal matrix form draws the batches of the compiled samplers.


def simple_graph(num_nodes: int = 300, num_edges: int = 5000) -> Graph:
    """A random graph without repeated edges, with weights, some of them 0."""
    graph = random_graph(num_nodes, num_edges, seed=2)
    receivers = torch.arange(num_nodes).repeat_interleave(graph.degrees())
    edge_index = torch.stack([graph.indices.long(), receivers]).unique(dim=1)
    weight = torch.rand(edge_index.size(1), generator=torch.Generator().manual_seed(0))
    weight[::5] = 0
    return Graph.from_edge_index(edge_index, num_nodes, {}, {"edge_weight": weight})


SIMPLE = simple_graph()
SEEDS_OF_BULK = [torch.randperm(300, generator=torch.Generator().manual_seed(i))[: 7 * i + 1] for i in range(5)]
PLACES = [BatchKey(1, 2, 3 * i) for i in range(5)]

SAMPLERS: list[Sampler] = [
    *(
        NeighborSampler(numbers, replace=replace)
        for numbers in ([3], [5, -1, 2], [-1, 30])
        for replace in (False, True)
    ),
    *(
        kind(numbers, weight, normalize)
        for kind in (LadiesSampler, FastGCNSampler)
        for numbers in ([20], [60, 30, 10], [400, 50])
        for weight in (None, "edge_weight")
        for normalize in (False, True)
    ),
]


check_same = partial(assert_same, rtol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_sampler_is_its_matrix_form(sampler):
    bulk = SIMPLE, SEEDS_OF_BULK, PLACES
    check_same(sampler.sample_bulk(*bulk), matrix_form(sampler, *bulk))


def test_tensors_draw_the_words_of_kernels():
    keys = tensors.keys_of(PLACES, 4, torch.device("cpu"))[3, :-1]
    nodes, steps = torch.arange(40, 90), torch.arange(3)
    words = tensors.draw(keys[:, None, None], nodes[:, None], steps)
    expected = [
        [[reference.draw(int(rng.key(*place, 3)), int(node), i) for i in range(3)] for node in nodes]
        for place in PLACES
    ]
    assert (words.numpy().view("uint64") == np.array(expected, np.uint64)).all()
    assert tensors.draw(keys, nodes[:5], 2).equal(words[torch.arange(5), torch.arange(5), 2])
    flat = [word for row in expected for cell in row for word in cell]
    assert tensors.unit(words).view(-1).tolist() == [reference.unit(word) for word in flat]
    assert tensors.below(words, torch.tensor(9)).view(-1).tolist() == [((word >> 32) * 9) >> 32 for word in flat]
