"""Edges drawn in proportion to their weights, from one row at a time, with and without replacement.

An edge is drawn in constant time from an alias table (Walker, Electronics Letters 1974):

    u = a random number in [0, 1),   slot = floor(u d),   coin = u d - slot
    the edge = slot  if  coin < threshold[slot]  else  other[slot]

The weights of a row's ``d`` edges, scaled to a mean of 1, are dealt into ``d`` boxes that hold 1 each, of two edges at
most. They are dealt in one sweep over the light and one over the heavy edges (Huebschle-Schneider, Sanders, ESA 2019,
arXiv:1903.00227), without further memory. An edge's box is one int64: its threshold, a float32, in the upper half, and
the slot of the other edge in the lower half. So probabilities are as exact as the weights, which are float32 too.

Without replacement edges are drawn one after the other in proportion to their weights, among those not drawn yet.

* Of a short row the first edges to arrive at the rates of their weights are drawn, which has this law (Efraimidis,
  Spirakis, IPL 2006): arrival = -log(v) / weight, where v is a random number in (0, 1].
* Of a longer row edges are drawn from its alias table. An edge that comes again is passed over, so the next one comes
  in proportion to its weight among the others. Where some weigh much more than others that may take long: after
  :func:`num_tries` tries those that are missing are the first to arrive among the edges not drawn yet.

The logarithm is made of single additions, products and quotients, to 12 digits: so a compiler handles several edges at
once, and every device and library rounds it alike.

    v = 2**k m,  s = (m - 1) / (m + 1):    log(v) = k log(2) + 2 (s + s**3 / 3 + ... + s**13 / 13)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import compiled, inlined, part
from lightning_gnn_dist.engine.intrinsics import LINE, prefetch
from lightning_gnn_dist.engine.rng import draw, unit
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.storage.mapped import MappedRows

T = TypeVar("T")
Array = npt.NDArray[Any]
NONE: Array = np.empty(0, np.float32)  # tells a kernel that edges have no weights
Weight = Annotated[str, "edge_weight"] | None  # the name of an edge array

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


SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of the square root of 1/2: m lies between it and twice as much
LOG_2 = 0.6931471805599453
T3, T5, T7, T9, T11, T13 = (1.0 / n for n in (3, 5, 7, 9, 11, 13))
RANKED = 32  # edges of a row that is sorted by counting which are earlier
_STEP = 2.0**-53


@part
def arrive(weights: Array, first: int, key: np.uint64, node: int, word: int, arrivals: Array) -> None:
    """Write when each edge of a row arrives, by the random words of the node from ``word`` on."""
    for slot in range(len(arrivals)):
        v = np.float64((draw(key, node, word + slot) >> _U(11)) + _U(1)) * _STEP
        weight = max(np.float64(weights[_U(first + slot)]), LEAST_WEIGHT)
        arrivals[_U(slot)] = np.divide(minus_log(v), weight)


@inlined
def minus_log(v: float) -> Any:
    bits: Any = np.float64(v).view(np.int64)
    k = (bits - SQRT_HALF) >> 52
    m: Any = np.int64(bits - (k << 52)).view(np.float64)
    s: Any = np.divide(m - 1.0, m + 1.0)  # as an operator it would look for a divisor of 0, one edge after the other
    z = s * s
    series = (((((T13 * z + T11) * z + T9) * z + T7) * z + T5) * z + T3) * z + 1.0
    return -(np.float64(k) * LOG_2 + (s + s) * series)


@part
def put_first(arrivals: Array, count: int, times: Array, order: Array) -> None:
    """Write which ``count`` edges arrive first, the earliest first, to the beginning of ``order``."""
    degree = len(arrivals)
    for i in range(count):
        times[_U(i)], order[_U(i)] = np.inf, 0  # weights of NaN, should a file get them, must not lead out of the row
    if degree <= RANKED:  # quadratic, but without a branch that depends on what was drawn
        for slot in range(degree):
            rank: Any = 0
            time = arrivals[_U(slot)]
            for other in range(degree):
                before = arrivals[_U(other)]
                rank += np.int64((before < time) | ((before == time) & (other < slot)))
            order[_U(rank)] = slot
        return
    last = _U(count - 1)
    for slot in range(degree):
        time, at = arrivals[_U(slot)], count - 1
        if time >= times[last]:
            continue
        while at > 0 and times[_U(at - 1)] > time:
            times[_U(at)] = times[_U(at - 1)]
            order[_U(at)] = order[_U(at - 1)]
            at -= 1
        times[_U(at)] = time
        order[_U(at)] = slot


SHORT = 20  # edges of a row whose arrivals are computed sooner than its table gives different edges


class Weights(NamedTuple):
    """The weights of a graph's edges.

    Attributes:
        values: A weight for each edge, float32.
        table: The alias tables of all rows, int64; empty if a row's table is to be made whenever it is drawn from.
    """

    values: Array
    table: Array


class Rule(NamedTuple):
    """How a row's edges are drawn.

    Attributes:
        weights: How likely each edge of the graph is; None if all are equally likely.
        replace: Whether an edge may be drawn more than once.
    """

    weights: Weights | None
    replace: bool


class Piece(NamedTuple):
    """A row, or the edges of one type in it, and what is drawn from these.

    Attributes:
        first: Its first edge.
        degree: How many edges it has.
        fanout: How many are drawn.
        key: The key of the draw.
        node: The node whose row it is.
    """

    first: int
    degree: int
    fanout: int
    key: np.uint64
    node: int


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
    """Working memory to draw by weight from rows of up to ``longest`` edges."""
    table = np.empty(0 if len(weights.table) else longest, np.int64)
    return Aside(np.empty(longest), np.empty(longest), np.empty(longest, np.int64), table)


@inlined
def num_tries(fanout: int, degree: Any) -> Any:
    """How often the table of a row is asked for different edges; no more, as all arrivals take as long by then."""
    return 0 if degree <= max(SHORT, fanout + fanout // 2) else fanout + degree // 2


@inlined
def prefetch_weights(piece: Piece, replace: bool, weights: Weights) -> None:
    """Ask for what draws from a row will read first."""
    if replace or num_tries(piece.fanout, piece.degree):
        for i in range(piece.fanout):
            slot, _ = slot_and_coin(draw(piece.key, piece.node, i), piece.degree)
            prefetch(weights.table, piece.first + slot)
    else:
        for slot in range(0, piece.degree, LINE // 4):
            prefetch(weights.values, piece.first + slot)


@part
def draw_by_weight(
    indices: Array, piece: Piece, replace: bool, weights: Weights, aside: Aside, positions: Array, out: int
) -> None:
    """Draw ``fanout`` edges of a row, which has more of them if none may come twice."""
    first, degree, fanout, key, node = piece
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
        _draw_rest(weights.values, piece, found, tries, aside, positions, out)
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
def _draw_rest(weights: Array, piece: Piece, found: int, tries: int, aside: Aside, positions: Array, out: int) -> None:
    """Draw the edges that are missing after the first ``found``, by random words that no try has used."""
    arrivals, missing = aside.arrivals[: piece.degree], piece.fanout - found
    arrive(weights, piece.first, piece.key, piece.node, tries, arrivals)
    for j in range(found):
        arrivals[_U(positions[_U(out + j)] - piece.first)] = np.inf
    put_first(arrivals, missing, aside.times, aside.order)
    for i in range(missing):
        positions[_U(out + found + i)] = piece.first + aside.order[_U(i)]


def edge_weights(graph: Graph, name: str) -> Array:
    """The edge array ``name`` as float32, one finite number of at least 0 for each edge.

    A float32 array is used as it is, also if it is mapped. Others are copied once: to compile kernels for another type
    would take every user some seconds.
    """
    weights: Array = checked_weights(graph, name).numpy()
    return weights


def checked_weights(graph: Graph, name: str) -> Tensor:
    """The same as :func:`edge_weights`, as a tensor on the graph's device."""
    return _kept(graph, name, "weights", lambda: _checked(graph, name))


def weights_of(graph: Graph, name: str, *, draws: bool) -> Weights:
    """What compiled draws need of the edge array ``name``.

    Args:
        graph: The graph.
        name: The edge array.
        draws: Whether any row is drawn from by its table, and not all taken whole.
    """
    weights = checked_weights(graph, name)
    values: Array = weights.numpy()
    # A graph in files may be larger than memory, so the table of a row is made whenever the row is drawn from.
    if not draws or _kept(graph, name, "weights in a file", lambda: MappedRows(weights).is_read_from_file):
        return Weights(values, np.empty(0, np.int64))
    return Weights(values, _kept(graph, name, "alias table", lambda: _tables(graph.indptr.numpy(), values)))


def _tables(indptr: Array, weights: Array) -> Array:
    """The alias tables of all rows, 8 bytes for each edge, made by as many threads as torch uses."""
    table = np.empty(len(weights), np.int64)  # of a large array numpy asks for large pages
    pieces = max(1, torch.get_num_threads())
    bounds = np.searchsorted(indptr, np.arange(1, pieces) * len(weights) // pieces).tolist()
    with ThreadPoolExecutor(pieces) as threads:
        lows, highs = [0, *bounds], [*bounds, len(indptr) - 1]
        list(threads.map(lambda low, high: fill_table(indptr, weights, low, high, table), lows, highs))
    return table


def _kept(graph: Graph, name: str, what: str, find: Callable[[], T]) -> T:
    """Return ``find()``, called once per graph and edge array, and again after the array has changed."""
    return remembered(graph, (what, name), find, [graph.edge_arrays.get(name)])


def _checked(graph: Graph, name: str) -> Tensor:
    if name not in graph.edge_arrays:
        raise ValueError(
            f"The graph has no edge array {name!r} to weigh edges by (it has: {sorted(graph.edge_arrays)}). "
            f"Set data.{name}, one number per edge, before Graph.from_pyg(data)."
        )
    weights = graph.edge_arrays[name]
    if weights.numel() != graph.num_edges or weights.dtype == torch.bool or weights.is_complex():
        raise ValueError(
            f"Edges are weighed by one number each, but {name} has shape {tuple(weights.shape)} of {weights.dtype}."
        )
    weights = weights.to(torch.float32).contiguous().view(-1)
    for piece in weights.split(EDGES_AT_ONCE):
        _check_range(piece, name)
    return weights


def _check_range(weights: Tensor, name: str) -> None:
    wrong = ~torch.isfinite(weights) | (weights < 0)
    if bool(wrong.any()):
        raise ValueError(
            f"Weights of edges must be finite and at least 0, but {name} holds {float(weights[wrong][0])}. "
            f"For instance: data.{name} = data.{name}.nan_to_num().clamp(min=0)."
        )
