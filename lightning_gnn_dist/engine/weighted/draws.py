"""Compiled draws by weight from one row, with and without replacement.

Without replacement edges are drawn one after the other in proportion to their weights, among those not drawn yet.

* Of a short row the first edges to arrive at the rates of their weights are drawn, which has this law.
* Of a longer row edges are drawn from its alias table. An edge that comes again is passed over, so the next one comes
  in proportion to its weight among the others. Where some weigh much more than others that may take long: after
  :func:`num_tries` tries those that are missing are the first to arrive among the edges not drawn yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_gnn_dist.engine.compiling import inlined, part
from lightning_gnn_dist.engine.intrinsics import prefetch
from lightning_gnn_dist.engine.rng import draw
from lightning_gnn_dist.engine.weighted.alias import Array, chosen_slot, fill_row, slot_and_coin
from lightning_gnn_dist.engine.weighted.arrivals import arrive, put_first

SHORT = 20  # edges of a row whose arrivals are computed sooner than its table gives different edges
LINE = 64  # bytes of a cache line
_U = np.uint64


class Weights(NamedTuple):
    """The weights of a graph's edges.

    Attributes:
        values: A weight for each edge, float32; empty if all edges are equally likely.
        table: The alias tables of all rows, int64; empty if a row's table is to be made whenever it is drawn from.
    """

    values: Array
    table: Array


EVEN = Weights(np.empty(0, np.float32), np.empty(0, np.int64))


class Aside(NamedTuple):
    """Working memory of draws by weight, as long as the longest row.

    Attributes:
        arrivals: When each edge of a row arrives, float64.
        times: The same of the first ones, in their order.
        order: Which edges these are, int64.
        table: The table of one row, int64; empty if those of all rows are kept.
    """

    arrivals: Array
    times: Array
    order: Array
    table: Array


@part
def aside_for(weights: Weights, longest: int) -> Any:
    """Working memory to draw from rows of up to ``longest`` edges."""
    room = longest if len(weights.values) else 0
    table = np.empty(0 if len(weights.table) else room, np.int64)
    return Aside(np.empty(room), np.empty(room), np.empty(room, np.int64), table)


@inlined
def num_tries(fanout: int, degree: Any) -> Any:
    """How often the table of a row is asked for different edges; no more, as all arrivals take as long by then."""
    return 0 if degree <= max(SHORT, fanout + fanout // 2) else fanout + degree // 2


@inlined
def prefetch_weights(
    weights: Weights, first: int, degree: int, fanout: int, replace: bool, key: np.uint64, node: int
) -> None:
    """Ask for what draws from a row will read first."""
    if replace or num_tries(fanout, degree):
        for i in range(fanout):
            slot, _ = slot_and_coin(draw(key, node, i), degree)
            prefetch(weights.table, first + slot)
    else:
        for slot in range(0, degree, LINE // 4):
            prefetch(weights.values, first + slot)


@part
def draw_by_weight(
    indices: Array,
    weights: Weights,
    first: int,
    degree: int,
    fanout: int,
    replace: bool,
    key: np.uint64,
    node: int,
    aside: Aside,
    positions: Array,
    out: int,
) -> None:
    """Draw ``fanout`` edges of a row, which has more of them if none may come twice."""
    tries = num_tries(fanout, degree)
    found: Any = 0
    if replace or tries:
        table, start = weights.table, first
        if len(table) == 0:
            table, start = aside.table, 0
            fill_row(weights.values, first, degree, aside.order, table, start)
        for i in range(fanout):  # these wait for nothing
            positions[_U(out + i)] = first + chosen_slot(draw(key, node, i), degree, table, start)
        found = fanout if replace else _different(positions, out, fanout)
        for i in range(fanout, 0 if found == fanout else tries):
            edge = first + chosen_slot(draw(key, node, i), degree, table, start)
            is_new = not _is_among(positions, out, found, edge)
            positions[_U(out + found)] = edge
            found += np.int64(is_new)
            if found == fanout:
                break
    if found < fanout:
        _draw_rest(weights.values, first, degree, fanout, found, tries, key, node, aside, positions, out)
    for i in range(fanout):
        prefetch(indices, positions[_U(out + i)])


@inlined
def _different(positions: Array, out: int, count: int) -> Any:
    """Keep the first of edges that are equal, in their order; return how many are left."""
    found: Any = 0
    for i in range(count):
        edge = positions[_U(out + i)]
        is_new = not _is_among(positions, out, i, edge)
        positions[_U(out + found)] = edge
        found += np.int64(is_new)
    return found


@inlined
def _is_among(positions: Array, out: int, count: int, edge: int) -> bool:
    is_there = False
    for j in range(count):
        is_there |= positions[_U(out + j)] == edge
    return is_there


@inlined
def _draw_rest(
    weights: Array,
    first: int,
    degree: int,
    fanout: int,
    found: int,
    tries: int,
    key: np.uint64,
    node: int,
    aside: Aside,
    positions: Array,
    out: int,
) -> None:
    """Draw the edges that are missing after the first ``found``, by random words that no try has used."""
    arrivals = aside.arrivals[:degree]
    arrive(weights, first, key, node, tries, arrivals)
    for j in range(found):
        arrivals[_U(positions[_U(out + j)] - first)] = np.inf
    put_first(arrivals, fanout - found, aside.times, aside.order)
    for i in range(fanout - found):
        positions[_U(out + found + i)] = first + aside.order[_U(i)]
