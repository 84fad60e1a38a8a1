"""What is drawn on a device for a hop of a bulk, as torch operators: edges of each row, or nodes of each batch.

They draw by the random words of the compiled loops. int64 arithmetic wraps as uint64 does; only a shift to the right
has to clear the copies of the sign. Sums of layer-wise draws are added up in another order than there, so weights may
differ in their last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.stack import Edges, Stack, packed
from lightning_gnn_dist.graph.graph import Graph


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


_NODE, _STEP = _signed(0xD1342543DE82EF95), _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def keys_of(batch_keys: Sequence[BatchKey], num_hops: int, device: torch.device) -> Tensor:
    """The key of each hop in each batch, int64, shape (num_hops, k + 1); the last batch does not exist."""
    keys = [typed_keys(*batch_key, num_hops, 1) for batch_key in batch_keys]
    words = np.concatenate([*keys, np.zeros((num_hops, 1), np.uint64)], axis=1).view(np.int64)
    return sent(torch.from_numpy(words), device)


def draw(keys: Tensor, nodes: Tensor, i: Tensor | int) -> Tensor:
    """The ``i``-th random word of each node under its key; the arguments broadcast."""
    step = _STEP * i if isinstance(i, Tensor) else _signed(_STEP * i)
    return _mix_(_mix_(keys + _NODE * nodes) + step)


def unit(words: Tensor) -> Tensor:
    """Numbers in ``[0, 1)``, float64."""
    return _shift(words, 11).to(torch.float64).mul_(2.0**-53)


def below(words: Tensor, bound: Tensor) -> Tensor:
    """Numbers in ``[0, bound)``; ``bound`` must not exceed ``2**31``."""
    return (_shift(words, 32) * bound) >> 32


def _mix_(words: Tensor) -> Tensor:
    words.bitwise_xor_(_shift(words, 30)).mul_(_MIX_1)
    words.bitwise_xor_(_shift(words, 27)).mul_(_MIX_2)
    return words.bitwise_xor_(_shift(words, 31))


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


class Frontier(NamedTuple):
    """The rows of a stack's frontier. Those of nodes that do not exist are empty.

    Attributes:
        key: The key under which each row draws.
        node: The node that the row belongs to.
        first: Where the row starts in the graph's ``indices``.
        degree: The length of the row.
    """

    key: Tensor
    node: Tensor
    first: Tensor
    degree: Tensor

    @classmethod
    def of(cls, graph: Graph, stack: Stack, keys: Tensor) -> Frontier:
        first = graph.indptr[stack.nodes]
        degree = (graph.indptr[stack.nodes + 1] - first) * (stack.batch < stack.num_batches)
        return cls(keys[stack.batch], stack.nodes, first, degree)


def every_edge(rows: Frontier) -> tuple[Tensor, Tensor]:
    """All edges of the rows: each one's row, and its position in the graph's ``indices``."""
    upto = rows.degree.cumsum(0)
    total = int(upto[-1]) if upto.numel() else 0
    at = torch.arange(total, device=upto.device)
    row = torch.arange(upto.numel(), device=upto.device).repeat_interleave(rows.degree, output_size=total)
    return row, at + (rows.first - upto + rows.degree)[row]


def drawn_edges(rows: Frontier, size: int, *, replace: bool) -> tuple[Tensor, Tensor]:
    """Draw ``size`` edges of each row, or take all of a shorter one; return as :func:`every_edge` does.

    With a size, the edges are followed by fillers of the last row, which must be empty, up to ``size`` for each row
    before it. So the host need not know how many there are.

    Args:
        rows: The rows to draw from, of a graph that has edges.
        size: Edges per row; -1 takes all.
        replace: Whether an edge may be drawn more than once; then a short row draws ``size`` edges, too.
    """
    if size < 0:
        return every_edge(rows)
    in_order = torch.arange(size, device=rows.node.device)
    keys, nodes, degrees = rows.key[:, None], rows.node[:, None], rows.degree[:, None]
    if replace:
        slots = below(draw(keys, nodes, in_order), degrees)
    else:
        slots = torch.where(degrees > size, distinct(keys, nodes, degrees, size), in_order)
    taken = in_order < torch.where(degrees > (0 if replace else size), size, degrees)
    room = (rows.node.numel() - 1) * size
    entries = torch.arange(room + size, device=rows.node.device)
    chosen = packed(entries, taken.view(-1), room, room)[:room]
    return chosen // size, (rows.first[:, None] + slots).view(-1)[chosen]


def distinct(keys: Tensor, nodes: Tensor, degrees: Tensor, size: int) -> Tensor:
    """``size`` distinct slots of each row, by Floyd's algorithm. Those of a row shorter than ``size`` mean nothing."""
    step = torch.arange(size, device=nodes.device)
    last = degrees - size + step
    chosen = below(draw(keys, nodes, step), last + 1)
    for i in range(1, size):
        slot = chosen[:, i : i + 1]
        is_taken = (chosen[:, :i] == slot).any(1, keepdim=True)
        chosen[:, i : i + 1] = torch.where(is_taken, last[:, i : i + 1], slot)
    return chosen


def drawn_layer(
    graph: Graph, stack: Stack, rows: Frontier, size: int, importance: Tensor | None, weights: Tensor | None
) -> tuple[Edges, Tensor]:
    """Draw nodes; return the frontier's edges from them, with their weights, and the sum that each row has in A.

    Args:
        graph: The graph.
        stack: The batches.
        rows: The rows of its frontier.
        size: Nodes to draw for each batch, on average.
        importance: The importance of each node of the graph, float64, or None for its squared column norm in the
            frontier's rows of A.
        weights: The entries of A, float32 in the order of the graph's edges, or None for 1 / in-degree of the receiver.
    """
    row, position = every_edge(rows)
    column = graph.indices[position].to(torch.int64)
    value = rows.degree[row] if weights is None else weights[position]
    value = 1.0 / value.to(torch.float64) if weights is None else value.to(torch.float64)
    if importance is None:
        shape = stack.num_batches, stack.num_nodes
        ids = stack.batch[row] * stack.num_nodes + column
        norms = value.new_zeros(shape[0] * shape[1]).index_add_(0, ids, value.square())
        factor, norm = scales(norms.view(shape), size)[stack.batch[row]], norms[ids]
    else:
        factor, norm = scales(importance[None], size), importance[column]
    chance = torch.where(norm > 0, (factor * norm).clamp(max=1), 0.0)
    kept = (unit(draw(rows.key[row], column, 0)) < chance).nonzero().view(-1)
    whole = value.new_zeros(rows.node.numel()).index_add_(0, row, value)
    return Edges(row[kept], column[kept], position[kept], value[kept] * (1.0 / chance[kept])), whole


def normalized(edges: Edges, whole: Tensor) -> Edges:
    """Scale the weights of each row to the sum that the row has in A."""
    assert edges.weight is not None
    total = torch.zeros_like(whole).index_add_(0, edges.row, edges.weight)
    share = torch.where(total > 0, whole / total, 1.0)[edges.row]
    return edges._replace(weight=edges.weight.to(torch.float32) * share)


def column_norms(graph: Graph, weights: Tensor | None) -> Tensor:
    """The squared norm of each column of A, float64, shape (N,)."""
    degrees = graph.indptr.diff()
    value = 1.0 / degrees.to(torch.float64).repeat_interleave(degrees) if weights is None else weights
    return value.new_zeros(degrees.numel(), dtype=torch.float64).index_add_(
        0, graph.indices.to(torch.int64), value.to(torch.float64).square()
    )


def scales(importance: Tensor, size: int) -> Tensor:
    """The factor with which each row's ``min(1, factor * row)`` sums to ``size``; infinite if no more are above 0."""
    factor = importance.new_zeros(importance.size(0))
    previous = factor - 1
    while bool((factor > previous).any()):  # an entry that reaches 1 takes no more, so the factor of the others grows
        is_certain, previous = factor[:, None] * importance >= 1, factor
        room, mass = size - is_certain.sum(1), importance.masked_fill(is_certain, 0.0).sum(1)
        factor = torch.where((room > 0) & (mass > 0), (room / mass).maximum(factor), factor)
    return factor.masked_fill((importance > 0).sum(1) <= size, torch.inf)
