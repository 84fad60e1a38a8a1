"""When edges arrive at the rates of their weights, w: the law of drawing them by weight, one after the other.

    v = a random number in (0, 1],   arrival = -log(v) / w          (Efraimidis, Spirakis, IPL 2006)

The logarithm is made of single additions, products and quotients, to 12 digits: so a compiler handles several edges at
once, and every device and library rounds it alike.

    v = 2**k m,  s = (m - 1) / (m + 1):    log(v) = k log(2) + 2 (s + s**3 / 3 + ... + s**13 / 13)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_gnn_dist.engine.compiling import inlined, part
from lightning_gnn_dist.engine.rng import draw
from lightning_gnn_dist.engine.weighted.alias import LEAST_WEIGHT, Array

SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of the square root of 1/2: m lies between it and twice as much
LOG_2 = 0.6931471805599453
T3, T5, T7, T9, T11, T13 = (1.0 / n for n in (3, 5, 7, 9, 11, 13))
RANKED = 32  # edges of a row that is sorted by counting which are earlier
_U = np.uint64
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
