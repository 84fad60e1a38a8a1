"""Bulk sampling by products of sparse matrices, exactly as in Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909).

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
from lightning_gnn_dist.extensions.larger_than_memory import device_draws as tensors
from lightning_gnn_dist.extensions.larger_than_memory.device_draws import below, distinct, draw, keys_of, scales, unit
from lightning_gnn_dist.extensions.larger_than_memory.stack import Edges, Stack
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.block import spend_warning
from lightning_gnn_dist.sampling.layer_wise import LayerSampler
from tests.sampling import reference
from tests.sampling.neighborhoods import assert_same
from tests.sampling.reference import random_graph


def matrix_form(
    sampler: NeighborSampler | LayerSampler, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> list[Sample]:
    """Draw the batches of a sampler by products of matrices. The graph must not hold an edge twice."""
    matrix = adjacency(graph)
    stack = Stack([ids.to(matrix.device) for ids in seeds], graph.num_nodes)
    grow = _node_wise if isinstance(sampler, NeighborSampler) else _layer_wise
    for hop, words in enumerate(keys_of(keys, sampler.num_hops, matrix.device)[:, :-1]):
        stack.trim()
        stack.grow(grow(sampler, graph, matrix, stack, words, hop))
    return stack.samples(with_ids=bool(graph.edge_arrays))


def adjacency(graph: Graph) -> Tensor:
    """The sparse matrix A, shape (N, N). Each entry is the position of its edge plus 1, for 0 is no entry."""
    graph.check_edges()  # torch does not check the indices of a sparse matrix
    rows = torch.arange(graph.num_nodes, device=graph.indices.device).repeat_interleave(graph.degrees())
    numbers = torch.arange(1, graph.num_edges + 1, dtype=torch.float64, device=rows.device)
    spend_warning()
    matrix = _sparse(rows, graph.indices, numbers, graph.num_nodes, graph.num_nodes)
    assert matrix.values().numel() == graph.num_edges  # an entry holds one edge
    return matrix


def _sparse(rows: Tensor, columns: Tensor, values: Tensor, num_rows: int, num_columns: int) -> Tensor:
    index = torch.stack([rows, columns.to(torch.int64)])
    return torch.sparse_coo_tensor(index, values, (num_rows, num_columns), check_invariants=False).coalesce()


def _one_hot(columns: Tensor, num_columns: int) -> Tensor:
    rows = torch.arange(columns.numel(), device=columns.device)
    return _sparse(rows, columns, torch.ones_like(rows, dtype=torch.float64), columns.numel(), num_columns)


def _values(sampler: NeighborSampler | LayerSampler, graph: Graph) -> Tensor:
    """A weight for each edge of the graph, float64: the array that the sampler names, or 1 / in-degree."""
    if sampler.weight is not None:
        return graph.edge_arrays[sampler.weight].view(-1).to(torch.float32).to(torch.float64)
    return 1.0 / graph.degrees().repeat_interleave(graph.degrees()).to(torch.float64)


# Node-wise.


def _node_wise(sampler: NeighborSampler, graph: Graph, matrix: Tensor, stack: Stack, keys: Tensor, hop: int) -> Edges:
    batch, nodes = stack.batch[:-1], stack.nodes[:-1]
    product = torch.sparse.mm(_one_hot(nodes, graph.num_nodes), matrix).coalesce()
    row, position = product.indices()[0], product.values().long() - 1
    degrees = torch.bincount(row, minlength=nodes.numel())
    first, size = degrees.cumsum(0) - degrees, sampler.per_hop[hop]
    is_drawn = (degrees > (0 if sampler.replace else size)) & (size >= 0)
    slots = _draw_slots(sampler, keys[batch], nodes, degrees, is_drawn, size)
    entries = torch.cat([(~is_drawn[row]).nonzero().view(-1), (first[is_drawn, None] + slots).view(-1)])
    entries = entries[row[entries].argsort(stable=True)]
    position = position[entries]
    return Edges(row[entries], graph.indices[position].long(), position, None)


def _draw_slots(
    sampler: NeighborSampler, keys: Tensor, nodes: Tensor, degrees: Tensor, is_drawn: Tensor, size: int
) -> Tensor:
    """The slots of the edges that are drawn from each row that is not taken whole."""
    if size < 0:
        return nodes[is_drawn, None][:, :0]
    keys, nodes, bound = (vector[is_drawn, None] for vector in (keys, nodes, degrees))
    if sampler.replace:
        return below(draw(keys, nodes, torch.arange(size, device=keys.device)), bound)
    return distinct(keys, nodes, bound, size)


# Layer-wise.


def _layer_wise(sampler: LayerSampler, graph: Graph, matrix: Tensor, stack: Stack, keys: Tensor, hop: int) -> Edges:
    batch, nodes, n = stack.batch[:-1], stack.nodes[:-1], graph.num_nodes
    values = _values(sampler, graph)
    rows = torch.sparse.mm(_one_hot(nodes, n), matrix).coalesce()  # Q_R A
    (row, column), position = rows.indices().unbind(), rows.values().long() - 1
    chances = _chances(sampler, matrix, values, stack, hop)  # (k * n,)
    node = torch.arange(n, device=keys.device)
    is_drawn = unit(draw(keys[:, None], node, 0)).view(-1) < chances
    inverse = torch.where(is_drawn, 1.0 / chances, 0.0)
    shifted = _sparse(row, column + batch[row] * n, rows.values(), nodes.numel(), stack.num_batches * n)
    drawn = is_drawn.nonzero().view(-1)
    select = _sparse(drawn, drawn, torch.ones_like(inverse[drawn]), inverse.numel(), inverse.numel())
    chosen = torch.sparse.mm(shifted, select).coalesce()  # (Q_R A) Q_C
    whole = values.new_zeros(nodes.numel()).index_add_(0, row, values[position])
    (row, column), position = chosen.indices().unbind(), chosen.values().long() - 1
    weight = values[position] * inverse[column]
    if sampler.normalize:
        kept = torch.zeros_like(whole).index_add_(0, row, weight)
        weight = weight * torch.where(kept > 0, whole / kept, 1.0)[row]
    return Edges(row, column % n, position, weight)


def _chances(sampler: LayerSampler, matrix: Tensor, values: Tensor, stack: Stack, hop: int) -> Tensor:
    """NORM: the probability that each node is drawn for each batch, shape (k * n,)."""
    batch, nodes, n = stack.batch[:-1], stack.nodes[:-1], stack.num_nodes
    if not isinstance(sampler, LadiesSampler):  # Q has one row, all ones
        batch, nodes = nodes.new_zeros(n), torch.arange(n, device=nodes.device)
    square = _sparse(matrix.indices()[0], matrix.indices()[1], values.square(), n, n)
    num_rows = stack.num_batches if isinstance(sampler, LadiesSampler) else 1
    frontier = _sparse(batch, nodes, torch.ones_like(nodes, dtype=torch.float64), num_rows, n)
    product = torch.sparse.mm(frontier, square).to_dense()
    factors = scales(product, sampler.num_nodes[hop])[:, None]
    rows = torch.where(product > 0, (factors * product).clamp(max=1), 0.0)
    return rows.expand(stack.num_batches, n).reshape(-1)


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
