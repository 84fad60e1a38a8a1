"""Bulk sampling by products of sparse matrices, exactly as in Tripathy, Yelick, Buluc (MLSys 2024, arXiv:2311.02909).

    node-wise    Q: a row for each frontier node of each batch, 1 at the node       P = Q A
    layer-wise   Q: a row for each batch, 1 at all of its frontier                  P = Q (A o A)
    NORM         rows of P become probabilities
    SAMPLE       edges of each row, or columns of each batch, are drawn
    EXTRACT      A_l = Q_R A Q_C: the frontier's rows and the drawn columns; the columns of batch i begin at i * n

It uses torch operators on the device of the graph's tensors, and the random words of the compiled samplers, so batches
are the same. The products read all edges of a frontier: where few are drawn, they are 50 to 100 times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.stack import Edges, Stack
from lightning_gnn_dist.engine.tensors import (
    Frontier,
    TensorWeights,
    below,
    by_weight,
    distinct,
    draw,
    keys_of,
    scales,
    unit,
)
from lightning_gnn_dist.engine.weighted import table_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.block import spend_warning
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler, LayerSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


@dataclass(frozen=True)
class MatrixSampler:
    """Draws the batches of another sampler by products of matrices. The graph must not hold an edge twice.

    Args:
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``.
    """

    sampler: NeighborSampler | LayerSampler

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, NeighborSampler | LadiesSampler | FastGCNSampler):
            raise TypeError(
                "sampler must be one whose batches products of matrices draw, NeighborSampler, LadiesSampler or "
                f"FastGCNSampler, got {shown(self.sampler)}."
            )

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk = check_bulk(graph, seeds, keys, untyped="MatrixSampler")
        if not bulk:
            return []
        for ids, _ in bulk:
            refuse_repeated(ids)
        matrix = adjacency(graph)
        stack = Stack([ids.to(matrix.device) for ids, _ in bulk], graph.num_nodes)
        for hop, words in enumerate(keys_of(keys, self.num_hops, matrix.device)[:, :-1]):
            stack.trim()
            if isinstance(self.sampler, NeighborSampler):
                stack.grow(_node_wise(self.sampler, graph, matrix, stack, words, hop))
            else:
                stack.grow(_layer_wise(self.sampler, graph, matrix, stack, words, hop))
        return stack.samples(with_ids=bool(graph.edge_arrays))


def adjacency(graph: Graph) -> Tensor:
    """The sparse matrix A, shape (N, N). Each entry is the position of its edge plus 1, for 0 is no entry."""
    graph.check_edges()  # torch does not check the indices of a sparse matrix
    rows = torch.arange(graph.num_nodes, device=graph.indices.device).repeat_interleave(graph.degrees())
    numbers = torch.arange(1, graph.num_edges + 1, dtype=torch.float64, device=rows.device)
    spend_warning()
    matrix = _sparse(rows, graph.indices, numbers, graph.num_nodes, graph.num_nodes)
    if matrix.values().numel() < graph.num_edges:
        raise ValueError("The graph holds an edge twice, which a matrix cannot. Make it simple: data.coalesce().")
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
    slots = _draw_slots(sampler, graph, product, keys[batch], nodes, degrees, is_drawn, size)
    entries = torch.cat([(~is_drawn[row]).nonzero().view(-1), (first[is_drawn, None] + slots).view(-1)])
    entries = entries[row[entries].argsort(stable=True)]
    position = position[entries]
    return Edges(row[entries], graph.indices[position].long(), position, None)


def _draw_slots(
    sampler: NeighborSampler,
    graph: Graph,
    product: Tensor,
    keys: Tensor,
    nodes: Tensor,
    degrees: Tensor,
    is_drawn: Tensor,
    size: int,
) -> Tensor:
    """The slots of the edges that are drawn from each row that is not taken whole."""
    if size < 0:
        return nodes[is_drawn, None][:, :0]
    if sampler.weight is None:
        keys, nodes, bound = (vector[is_drawn, None] for vector in (keys, nodes, degrees))
        if sampler.replace:
            return below(draw(keys, nodes, torch.arange(size, device=keys.device)), bound)
        return distinct(keys, nodes, bound, size)
    values = _values(sampler, graph)[product.values().long() - 1].float()
    starts = starts_of(degrees)
    rows = Frontier(keys, nodes, starts[:-1], degrees).at(is_drawn.nonzero().view(-1))
    return by_weight(rows, size, replace=sampler.replace, weights=TensorWeights(values, table_of(starts, values)))


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
