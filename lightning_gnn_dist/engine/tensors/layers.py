"""Layer-wise draws for many batches at once, in torch operators: the same as by the loops of :mod:`layer_kernels`.

Sums are added up in another order than there, so weights may differ in their last digit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.stack import Edges, Stack
from lightning_gnn_dist.engine.tensors.rng import draw, unit
from lightning_gnn_dist.engine.tensors.rows import every_edge, rows_of


class LayerRule(NamedTuple):
    """How nodes are drawn for a hop.

    Attributes:
        size: Nodes to draw for each batch, on average.
        importance: The importance of each node of the graph, float64, or None for its squared column norm in the
            frontier's rows of A.
        weights: The entries of A, float32 in the order of the graph's edges, or None for 1 / in-degree of the receiver.
        normalize: Whether to scale the weights of each row to the sum that the row has in A.
    """

    size: int
    importance: Tensor | None
    weights: Tensor | None
    normalize: bool


def drawn_layer(indptr: Tensor, indices: Tensor, stack: Stack, keys: Tensor, rule: LayerRule) -> Edges:
    """Draw nodes; return the frontier's edges from them, with their weights."""
    rows = rows_of(indptr, keys[stack.batch], stack.nodes)
    row, position = every_edge(rows)
    column = indices[position].to(torch.int64)
    value = rows.degree[row] if rule.weights is None else rule.weights[position]
    value = 1.0 / value.to(torch.float64) if rule.weights is None else value.to(torch.float64)
    chance = _chances(stack, row, column, value, rule)
    kept = (unit(draw(rows.key[row], column, 0)) < chance).nonzero().view(-1)
    whole, row = value.new_zeros(rows.node.numel()).index_add_(0, row, value), row[kept]
    weight = value[kept] * (1.0 / chance[kept])
    if rule.normalize:
        total = torch.zeros_like(whole).index_add_(0, row, weight)
        weight = weight.to(torch.float32) * torch.where(total > 0, whole / total, 1.0)[row]
    return Edges(row, column[kept], position[kept], weight)


def column_norms(indptr: Tensor, indices: Tensor, weights: Tensor | None) -> Tensor:
    """The squared norm of each column of A, float64, shape (N,)."""
    degrees = indptr.diff()
    value = 1.0 / degrees.to(torch.float64).repeat_interleave(degrees) if weights is None else weights
    return value.new_zeros(degrees.numel(), dtype=torch.float64).index_add_(
        0, indices.to(torch.int64), value.to(torch.float64).square()
    )


def _chances(stack: Stack, row: Tensor, column: Tensor, value: Tensor, rule: LayerRule) -> Tensor:
    """The probability that the sender of each edge is drawn."""
    k, n = stack.num_batches, stack.num_nodes
    batch = stack.batch[row]
    if rule.importance is None:
        ids = batch * n + column
        norms = value.new_zeros(k * n).index_add_(0, ids, value.square())
        factor, importance = scales(norms.view(k, n), rule.size)[batch], norms[ids]
    else:
        factor, importance = scales(rule.importance[None], rule.size), rule.importance[column]
    return torch.where(importance > 0, (factor * importance).clamp(max=1), 0.0)


def scales(importance: Tensor, size: int) -> Tensor:
    """The factor with which each row's ``min(1, factor * row)`` sums to ``size``; infinite if no more are above 0."""
    factor = importance.new_zeros(importance.size(0))
    previous = factor - 1
    while bool((factor > previous).any()):  # an entry that reaches 1 takes no more, so the factor of the others grows
        is_certain, previous = factor[:, None] * importance >= 1, factor
        room, mass = size - is_certain.sum(1), importance.masked_fill(is_certain, 0.0).sum(1)
        factor = torch.where((room > 0) & (mass > 0), (room / mass).maximum(factor), factor)
    return factor.masked_fill((importance > 0).sum(1) <= size, torch.inf)
