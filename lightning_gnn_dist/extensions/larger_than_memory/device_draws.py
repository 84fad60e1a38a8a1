"""What a sampler on a device draws for a hop of a bulk: edges of each row, or nodes of each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.larger_than_memory.stack import Edges, Stack, packed
from lightning_gnn_dist.extensions.larger_than_memory.tensors import (
    Frontier,
    below,
    distinct,
    draw,
    scales,
    unit,
    words_of,
)

Choose: TypeAlias = Callable[[Frontier, int], Tensor]


def rows_of(indptr: Tensor, stack: Stack, keys: Tensor) -> Frontier:
    """The rows of a stack's frontier. Those of nodes that do not exist are empty."""
    first = indptr[stack.nodes]
    degree = (indptr[stack.nodes + 1] - first) * (stack.batch < stack.num_batches)
    return Frontier(keys[stack.batch], stack.nodes, first, degree)


def every_edge(rows: Frontier) -> tuple[Tensor, Tensor]:
    """All edges of the rows: each one's row, and its position in the graph's ``indices``."""
    upto = rows.degree.cumsum(0)
    total = int(upto[-1]) if upto.numel() else 0
    at = torch.arange(total, device=upto.device)
    row = torch.arange(upto.numel(), device=upto.device).repeat_interleave(rows.degree, output_size=total)
    return row, at + (rows.first - upto + rows.degree)[row]


def drawn_edges(rows: Frontier, size: int, *, replace: bool, choose: Choose | None) -> tuple[Tensor, Tensor]:
    """Draw ``size`` edges of each row, or take all of a shorter one; return as :func:`every_edge` does.

    With a size, the edges are followed by fillers of the last row, which must be empty, up to ``size`` for each row
    before it. So the host need not know how many there are.

    Args:
        rows: The rows to draw from, of a graph that has edges.
        size: Edges per row; -1 takes all.
        replace: Whether an edge may be drawn more than once; then a short row draws ``size`` edges, too.
        choose: Chooses the slots of ``size`` edges of rows that are not taken whole, or None if all edges of a row are
            equally likely.
    """
    if size < 0:
        return every_edge(rows)
    is_drawn = rows.degree > (0 if replace else size)
    in_order = torch.arange(size, device=rows.node.device)
    if choose is None:
        slots = torch.where(is_drawn[:, None], _evenly(rows, size, replace), in_order)
    else:
        slots, drawn = in_order.repeat(rows.node.numel(), 1), is_drawn.nonzero().view(-1)
        slots[drawn] = choose(rows.at(drawn), size)
    taken = in_order < torch.where(is_drawn, size, rows.degree)[:, None]
    room = (rows.node.numel() - 1) * size
    entries = torch.arange(room + size, device=rows.node.device)
    chosen = packed(entries, taken.view(-1), room, room)[:room]
    return chosen // size, (rows.first[:, None] + slots).view(-1)[chosen]


def _evenly(rows: Frontier, size: int, replace: bool) -> Tensor:
    if replace:
        return below(words_of(rows, size), rows.degree[:, None])
    return distinct(rows.key[:, None], rows.node[:, None], rows.degree[:, None], size)


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
    rows = rows_of(indptr, stack, keys)
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
