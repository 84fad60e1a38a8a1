"""Draws as torch operators, for graphs on a device: the random words, edges and layers of the compiled loops.

int64 arithmetic wraps as uint64 does; only a shift to the right has to clear the copies of the sign. Sums of layer-wise
draws are added up in another order than there, so weights may differ in their last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.engine.weighted import LEAST_WEIGHT, LOG_2, OTHER, SHORT, SQRT_HALF, T3, T5, T7, T9, T11, T13


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


def minus_log(words: Tensor) -> Tensor:
    """The negative logarithms of numbers in ``(0, 1]``, float64, as in :mod:`weighted`."""
    bits = _shift(words, 11).add_(1).to(torch.float64).mul_(2.0**-53).view(torch.int64)
    k = (bits - SQRT_HALF) >> 52
    m = (bits - (k << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = z * T13
    for term in (T11, T9, T7, T5, T3):
        series.add_(term).mul_(z)
    return series.add_(1.0).mul_(s + s).add_(k.to(torch.float64) * LOG_2).neg_()


def below(words: Tensor, bound: Tensor) -> Tensor:
    """Numbers in ``[0, bound)``; ``bound`` must not exceed ``2**31``."""
    return (_shift(words, 32) * bound) >> 32


def _mix_(words: Tensor) -> Tensor:
    words.bitwise_xor_(_shift(words, 30)).mul_(_MIX_1)
    words.bitwise_xor_(_shift(words, 27)).mul_(_MIX_2)
    return words.bitwise_xor_(_shift(words, 31))


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


ENTRIES_AT_ONCE = 1 << 21  # of a matrix of weighted rows: several fit a GPU's cache
LONGEST_ROW = 1 << 40


class Frontier(NamedTuple):
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

    def at(self, slots: Tensor) -> Frontier:
        return Frontier(*(vector[slots] for vector in self))


class TensorWeights(NamedTuple):
    """The weights of a graph's edges, on its device.

    Attributes:
        values: A weight for each edge, float32.
        table: The alias tables of all rows, int64.
    """

    values: Tensor
    table: Tensor


def words_of(rows: Frontier, count: int) -> Tensor:
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


def by_weight(rows: Frontier, size: int, *, replace: bool, weights: TensorWeights) -> Tensor:
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


def _chosen(rows: Frontier, count: int, table: Tensor) -> Tensor:
    """The slots that the first ``count`` random words of each row choose by its alias table."""
    height = unit(words_of(rows, count)) * rows.degree[:, None]
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


def _with_rest(rows: Frontier, width: int, tries: Tensor, slots: Tensor, found: Tensor, weights: Tensor) -> Tensor:
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


def scales(importance: Tensor, size: int) -> Tensor:
    """The factor with which each row's ``min(1, factor * row)`` sums to ``size``; infinite if no more are above 0."""
    factor = importance.new_zeros(importance.size(0))
    previous = factor - 1
    while bool((factor > previous).any()):  # an entry that reaches 1 takes no more, so the factor of the others grows
        is_certain, previous = factor[:, None] * importance >= 1, factor
        room, mass = size - is_certain.sum(1), importance.masked_fill(is_certain, 0.0).sum(1)
        factor = torch.where((room > 0) & (mass > 0), (room / mass).maximum(factor), factor)
    return factor.masked_fill((importance > 0).sum(1) <= size, torch.inf)
