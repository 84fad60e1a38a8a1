"""Edges drawn from many rows at once, in torch operators: the same as by the compiled loops of :mod:`kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.kernels import LEAST_WEIGHT
from lightning_gnn_dist.engine.torch_rng import below, draw, unit

ENTRIES_AT_ONCE = 1 << 21  # of a matrix of weighted rows: several fit a GPU's cache
LONGEST_ROW = 1 << 40


class Rows(NamedTuple):
    """The rows of a frontier.

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

    def at(self, slots: Tensor) -> Rows:
        return Rows(*(vector[slots] for vector in self))


def rows_of(indptr: Tensor, key: Tensor, node: Tensor) -> Rows:
    first = indptr[node]
    return Rows(key, node, first, indptr[node + 1] - first)


def every_edge(rows: Rows) -> tuple[Tensor, Tensor]:
    """All edges of the rows: each one's row, and its position in the graph's ``indices``."""
    upto = rows.degree.cumsum(0)
    total = int(upto[-1]) if upto.numel() else 0
    at = torch.arange(total, device=upto.device)
    row = torch.arange(upto.numel(), device=upto.device).repeat_interleave(rows.degree, output_size=total)
    return row, at + (rows.first - upto + rows.degree)[row]


def drawn_edges(rows: Rows, size: int, *, replace: bool, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw ``size`` edges of each row, or take all of a shorter one; return as :func:`every_edge` does.

    Args:
        rows: The rows to draw from.
        size: Edges per row; -1 takes all.
        replace: Whether an edge may be drawn more than once; then a short row draws ``size`` edges, too.
        weights: A weight for each edge of the graph, float32, or None if all are equally likely.
    """
    if size < 0:
        return every_edge(rows)
    is_drawn = rows.degree > (0 if replace else size)
    in_order = torch.arange(size, device=rows.node.device)
    if weights is None:
        slots = torch.where(is_drawn[:, None], _evenly(rows, size, replace), in_order)
    else:
        slots = in_order.repeat(rows.node.numel(), 1)
        for some, drawn in _by_weight(rows, is_drawn, size, replace, weights):
            slots[some] = drawn
    taken = in_order < torch.where(is_drawn, size, rows.degree)[:, None]
    chosen = taken.view(-1).nonzero().view(-1)
    return chosen // size, (rows.first[:, None] + slots).view(-1)[chosen]


def _evenly(rows: Rows, size: int, replace: bool) -> Tensor:
    if replace:
        return below(_words(rows, size), rows.degree[:, None])
    return distinct(rows.key[:, None], rows.node[:, None], rows.degree[:, None], size)


def _words(rows: Rows, count: int) -> Tensor:
    """The first ``count`` random words of each row, shape (rows, count)."""
    return draw(rows.key[:, None], rows.node[:, None], torch.arange(count, device=rows.node.device))


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


def _by_weight(
    rows: Rows, is_drawn: Tensor, size: int, replace: bool, weights: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some rows of similar length, as positions in ``rows``, and the slots that they draw."""
    drawn = is_drawn.nonzero().view(-1)
    degree, order = rows.degree[drawn].sort()
    widths = [1 << i for i in range(LONGEST_ROW.bit_length())]
    upto = torch.searchsorted(degree, torch.tensor(widths, device=degree.device), right=True).tolist()
    for width, (start, end) in zip(widths, pairwise([0, *upto]), strict=True):
        fits = drawn[order[start:end]]
        for some in fits.split(max(1, ENTRIES_AT_ONCE // width)) if end > start else ():
            few = rows.at(some)
            yield some, _high(few, width, size, weights) if replace else _earliest(few, width, size, weights)


def _laid_out(rows: Rows, width: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as a matrix, a line per row, and a mask of its entries that lie behind the end of a row."""
    slot = torch.arange(width, device=rows.node.device)
    last = rows.first + rows.degree - 1
    position = (rows.first[:, None] + slot).minimum(last[:, None])
    return weights[position].to(torch.float64).clamp_(min=LEAST_WEIGHT), slot >= rows.degree[:, None]


def _earliest(rows: Rows, width: int, size: int, weights: Tensor) -> Tensor:
    """Draw by weight without replacement: the slots of the first to arrive at rates ``weights``, in this order."""
    rate, outside = _laid_out(rows, width, weights)
    arrival = unit(_words(rows, width)).neg_().log1p_().neg_().div_(rate)
    return least(arrival.masked_fill_(outside, torch.inf), size)


def least(matrix: Tensor, size: int) -> Tensor:
    """The columns of the ``size`` least entries of each row, the least first.

    The entries are divided into groups. The least entries are all in the ``size`` groups with the least minima, so two
    short sorts replace a long one.
    """
    num_rows, width = matrix.shape
    depth = 1  # of a group
    while (2 * depth) ** 2 * size <= width and width % (2 * depth) == 0:
        depth *= 2
    if depth == 1:
        return matrix.sort(dim=1, stable=True).indices[:, :size]
    num_groups = width // depth
    groups = matrix.view(num_rows, depth, num_groups).amin(1).sort(dim=1, stable=True).indices[:, :size]
    layer = num_groups * torch.arange(depth, device=matrix.device)
    groups = groups.sort(dim=1).values  # in order: ties stay as they are
    slots = (groups[:, None] + layer[:, None]).view(num_rows, depth * size)
    return slots.gather(1, matrix.gather(1, slots).sort(dim=1, stable=True).indices[:, :size])


def _high(rows: Rows, width: int, size: int, weights: Tensor) -> Tensor:
    """Draw by weight with replacement: find random numbers in the running sums of the weights."""
    weight, outside = _laid_out(rows, width, weights)
    heights = weight.masked_fill_(outside, 0.0).cumsum(1)
    height = unit(_words(rows, size)) * heights[:, -1:]
    return torch.searchsorted(heights, height, right=True).minimum(rows.degree[:, None] - 1)
