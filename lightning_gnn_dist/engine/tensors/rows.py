"""Edges drawn from many rows at once, in torch operators: the same as by the compiled loops of :mod:`kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.tensors.rng import below, draw, minus_log, unit
from lightning_gnn_dist.engine.weighted.alias import LEAST_WEIGHT, OTHER
from lightning_gnn_dist.engine.weighted.draws import SHORT

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


class TensorWeights(NamedTuple):
    """The weights of a graph's edges, on its device.

    Attributes:
        values: A weight for each edge, float32.
        table: The alias tables of all rows, int64.
    """

    values: Tensor
    table: Tensor


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


def drawn_edges(rows: Rows, size: int, *, replace: bool, weights: TensorWeights | None) -> tuple[Tensor, Tensor]:
    """Draw ``size`` edges of each row, or take all of a shorter one; return as :func:`every_edge` does.

    Args:
        rows: The rows to draw from.
        size: Edges per row; -1 takes all.
        replace: Whether an edge may be drawn more than once; then a short row draws ``size`` edges, too.
        weights: How likely each edge of the graph is, or None if all are equally likely.
    """
    if size < 0:
        return every_edge(rows)
    is_drawn = rows.degree > (0 if replace else size)
    in_order = torch.arange(size, device=rows.node.device)
    if weights is None:
        slots = torch.where(is_drawn[:, None], _evenly(rows, size, replace), in_order)
    else:
        slots, drawn = in_order.repeat(rows.node.numel(), 1), is_drawn.nonzero().view(-1)
        slots[drawn] = by_weight(rows.at(drawn), size, replace=replace, weights=weights)
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


def by_weight(rows: Rows, size: int, *, replace: bool, weights: TensorWeights) -> Tensor:
    """The slots that are drawn from rows by weight, without replacement from rows that are longer than ``size``."""
    if replace:
        return _chosen(rows, size, weights.table)
    slots, found = rows.node.new_zeros(rows.node.numel(), size), torch.zeros_like(rows.node)
    is_short = rows.degree <= max(SHORT, size + size // 2)
    tries = torch.where(is_short, 0, size + rows.degree // 2)  # as in num_tries
    for some in (~is_short).nonzero().view(-1).split(max(1, ENTRIES_AT_ONCE // size)):
        slots[some], found[some] = _different(_chosen(rows.at(some), size, weights.table), tries[some], size)
    for some, width in _of_similar_length(rows.degree, ~is_short & (found < size)):
        tried = _chosen(rows.at(some), size + width // 2, weights.table)
        slots[some], found[some] = _different(tried, tries[some], size)
    for some, width in _of_similar_length(rows.degree, found < size):
        slots[some] = _with_rest(rows.at(some), width, tries[some], slots[some], found[some], weights.values)
    return slots


def _chosen(rows: Rows, count: int, table: Tensor) -> Tensor:
    """The slots that the first ``count`` random words of each row choose by its alias table."""
    height = unit(_words(rows, count)) * rows.degree[:, None]
    slot = height.to(torch.int64)
    box = table[rows.first[:, None] + slot]
    threshold = (box >> 32).to(torch.int32).view(torch.float32)
    return torch.where(height.sub_(slot) < threshold, slot, box & OTHER)


def _different(slots: Tensor, tries: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first ``size`` different slots among the ``tries`` of each line, and how many there are.

    They come in their order, and what stands behind them means nothing.
    """
    in_order, order = slots.sort(dim=1, stable=True)
    is_first = torch.arange(slots.size(1), device=slots.device) < tries[:, None]
    is_first[:, 1:] &= torch.ones_like(is_first).scatter_(1, order[:, 1:], in_order.diff() > 0)[:, 1:]
    rank = is_first.cumsum(1)
    place = torch.where(is_first & (rank <= size), rank - 1, size)
    firsts = slots.new_zeros(len(slots), size + 1).scatter_(1, place, slots)
    return firsts[:, :size], rank[:, -1].clamp(max=size)


def _of_similar_length(degree: Tensor, is_chosen: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield some of the chosen rows, as positions in ``degree``, and a width that fits them all."""
    chosen = is_chosen.nonzero().view(-1)
    degree, order = degree[chosen].sort()
    widths = [1 << i for i in range(LONGEST_ROW.bit_length())]
    upto = torch.searchsorted(degree, torch.tensor(widths, device=degree.device), right=True).tolist()
    for width, (start, end) in zip(widths, pairwise([0, *upto]), strict=True):
        fits = chosen[order[start:end]]
        for some in fits.split(max(1, ENTRIES_AT_ONCE // width)) if end > start else ():
            yield some, width


def _with_rest(rows: Rows, width: int, tries: Tensor, slots: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """The first ``found`` slots of each row, and behind them the first of the others to arrive."""
    size, column = slots.size(1), torch.arange(width, device=found.device)
    position = (rows.first[:, None] + column).minimum((rows.first + rows.degree - 1)[:, None])
    words = draw(rows.key[:, None], rows.node[:, None], tries[:, None] + column)
    arrival = minus_log(words) / weights[position].to(torch.float64).clamp_(min=LEAST_WEIGHT)
    is_found = column[:size] < found[:, None]
    is_out = torch.zeros(len(slots), width + 1, dtype=torch.bool, device=found.device)
    is_out.scatter_(1, torch.where(is_found, slots, width), True)
    is_out = is_out[:, :width] | (column >= rows.degree[:, None])
    rest = least(arrival.masked_fill_(is_out, torch.inf), size)
    return torch.where(is_found, slots, rest.gather(1, (column[:size] - found[:, None]).clamp_(min=0)))


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
