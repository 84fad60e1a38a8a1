"""An edge of a row, drawn by weight in constant time: alias tables (Walker, Electronics Letters 1974).

    u = a random number in [0, 1),   slot = floor(u d),   coin = u d - slot
    the edge = slot  if  coin < threshold[slot]  else  other[slot]

The weights of a row's ``d`` edges, scaled to a mean of 1, are dealt into ``d`` boxes that hold 1 each, of two edges at
most. They are dealt in one sweep over the light and one over the heavy edges (Huebschle-Schneider, Sanders, ESA 2019,
arXiv:1903.00227), without further memory. An edge's box is one int64: its threshold, a float32, in the upper half, and
the slot of the other edge in the lower half. So probabilities are as exact as the weights, which are float32 too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.rng import unit

Array = npt.NDArray[Any]

LEAST_WEIGHT = 1e-290  # replaces 0, so such edges are drawn when no others are left
OTHER = 0xFFFFFFFF  # the lower half of a box
_U = np.uint64


@compiled
def fill_table(indptr: Array, weights: Array, low: int, high: int, table: Array) -> None:
    """Make the tables of the rows ``low`` to ``high``. What cannot be a row is left out, as draws refuse it.

    Args:
        indptr: The row starts, int64.
        weights: The weight of each edge, float32.
        low: The first row.
        high: The row behind the last one.
        table: Receives a box for each edge, int64.
    """
    order = np.empty(0, np.int64)
    for row in range(low, high):
        first, last = indptr[_U(row)], indptr[_U(row + 1)]
        if 0 <= first < last <= len(weights):
            if last - first > len(order):
                order = np.empty(2 * (last - first), np.int64)
            fill_row(weights, first, last - first, order, table, first)


@part
def fill_row(weights: Array, first: int, degree: int, order: Array, table: Array, start: int) -> None:
    """Make the table of a row.

    Args:
        weights: The weight of each edge of the graph, float32.
        first: The row's first edge.
        degree: How many it has, at least 1.
        order: Working memory, as long as the row.
        table: Receives a box for each of them, int64.
        start: Where the first one goes.
    """
    total = 0.0
    for slot in range(degree):
        total += _weight(weights, first, slot)
    scale = degree / total
    num_light: Any = 0
    num_heavy: Any = 0
    for slot in range(degree):  # the light ones from the start of ``order``, the heavy ones from its end
        is_heavy = np.int64(_weight(weights, first, slot) * scale > 1.0)
        order[_U(num_light)] = slot
        order[_U(degree - 1 - num_heavy)] = slot
        num_heavy += is_heavy
        num_light += 1 - is_heavy
    light, heavy, end = 0, degree - 1, degree - 1 - num_heavy
    left = _weight(weights, first, order[_U(heavy)]) * scale  # of the heavy edge
    while heavy > end:
        box = order[_U(heavy)]
        if left > 1.0:
            if light == num_light:
                break
            weight = _weight(weights, first, order[_U(light)]) * scale
            table[_U(start + order[_U(light)])] = _box(weight, box)
            light += 1
        else:
            if heavy - 1 == end:
                break
            heavy -= 1
            weight = _weight(weights, first, order[_U(heavy)]) * scale
            table[_U(start + box)] = _box(left, order[_U(heavy)])
        left = (left + weight) - 1.0
    last = order[_U(heavy)]
    while heavy > end:  # what rounding leaves over, and the last heavy edge itself
        table[_U(start + order[_U(heavy)])] = _box(1.0, order[_U(heavy)])
        heavy -= 1
    while light < num_light:
        table[_U(start + order[_U(light)])] = _box(_weight(weights, first, order[_U(light)]) * scale, last)
        light += 1


@inlined
def _weight(weights: Array, first: int, slot: int) -> Any:
    return max(np.float64(weights[_U(first + slot)]), LEAST_WEIGHT)


@inlined
def _box(threshold: float, other: int) -> Any:
    bits: Any = np.float32(threshold).view(np.int32)
    return (np.int64(bits) << 32) | np.int64(other)


@inlined
def slot_and_coin(word: np.uint64, degree: int) -> Any:
    """The box that a random word chooses, and how far into it."""
    height = unit(word) * degree
    slot = np.int64(height)
    return slot, height - slot


@inlined
def chosen_slot(word: np.uint64, degree: int, table: Array, start: int) -> Any:
    """The edge that a random word chooses from a row whose table begins at ``start``."""
    slot, coin = slot_and_coin(word, degree)
    box = table[_U(start + slot)]
    threshold: Any = np.int32(box >> 32).view(np.float32)
    # A branch would be foreseen wrongly half of the time, and compilers make one of any other choice between two.
    upper: Any = (np.float64(coin - threshold).view(np.int64) >> 58) & 32  # 32 where coin < threshold, else 0
    return min((((slot << 32) | (box & OTHER)) >> upper) & OTHER, degree - 1)  # also if the graph has been changed
