"""Counter-based randomness: a draw is a pure function of what it is for.

No generator carries state from one draw to the next, so a draw does not depend on the draws before it: not on the
size of a bulk, the number of threads or the place of a node in its batch. :func:`key` makes a key of (seed, epoch,
batch, hop), and :func:`draw` gives the ``i``-th random word of a node under it:

    draw(key, node, i) = mix(mix(key + A * node) + B * i)      mod 2**64

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). Only integer operations take part,
so the same words come out of numba, numpy and torch, on any device.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.compiling import inlined

_U = np.uint64
_NODE = _U(0xD1342543DE82EF95)
_STEP = _U(0x9E3779B97F4A7C15)
_MIX_1 = _U(0xBF58476D1CE4E5B9)
_MIX_2 = _U(0x94D049BB133111EB)
_UNIT = 2.0**-53
_MASK = 2**64 - 1
_ORDER = -1  # takes the place of the batch in a key, so that an order and a sampler never share one


@unique
class Purpose(IntEnum):
    """What is drawn beside the batches of local steps; added to the user's seed, so that no two draws share a key."""

    CORRECTIONS = 1 << 40
    ANCHORS = 1 << 41
    SURROUNDINGS = 1 << 42  # extra nodes of a part
    DEALS = 1 << 43  # which rank gets which chunk
    LINKS = 1 << 44  # which links are held out, and their negatives


def key(seed: int, epoch: int, batch: int, hop: int) -> np.uint64:
    """The key of one hop of one batch. The arguments may be any integers, also negative."""
    state = 0
    for part in (seed, epoch, batch, hop):
        state = _mix((state + int(_STEP) + int(part)) & _MASK)
    return _U(state)


def typed_keys(seed: int, epoch: int, batch: int, num_hops: int, num_types: int) -> np.ndarray[Any, Any]:
    """The key of each hop and edge type of a batch, uint64; those of type 0 are the keys of the hops."""
    state = 0
    for part in (seed, epoch, batch):
        state = _mix((state + int(_STEP) + int(part)) & _MASK)
    hops, kinds = np.ogrid[:num_hops, :num_types]
    kinds = kinds.astype(_U) << _U(32)
    keys: np.ndarray[Any, Any] = _mixed(_U((state + int(_STEP)) & _MASK) + hops.astype(_U) + kinds)
    return keys


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """The numbers below ``n`` in an order that depends on ``seed`` and ``epoch`` alone."""
    # numpy's own counter-based generator: sorting our words instead takes eight times as long.
    generator = np.random.Generator(np.random.Philox(key=int(key(seed, epoch, _ORDER, 0))))
    return torch.from_numpy(generator.permutation(n))


def draw_bits(key: np.uint64, ids: Tensor) -> Tensor:
    """A random bool for each id: the highest bit of ``draw(key, id, 0)``."""
    return torch.from_numpy((first_words(key, ids.numpy()) >> _U(63)).astype(np.bool_))


def first_words(keys: Any, nodes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``draw(key, node, 0)`` of keys and ids that numpy can add."""
    words: np.ndarray[Any, Any] = _mixed(_mixed(keys + _NODE * nodes.astype(np.uint64)))
    return words


def _mixed(words: Any) -> Any:
    """:func:`mix` for an array."""
    words = (words ^ (words >> _U(30))) * _MIX_1
    words = (words ^ (words >> _U(27))) * _MIX_2
    return words ^ (words >> _U(31))


def _mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * int(_MIX_1)) & _MASK
    word = ((word ^ (word >> 27)) * int(_MIX_2)) & _MASK
    return word ^ (word >> 31)


@inlined
def mix(word: np.uint64) -> np.uint64:
    """Mix 64 bits: every bit of ``word`` affects every bit of the result."""
    word = (word ^ (word >> _U(30))) * _MIX_1
    word = (word ^ (word >> _U(27))) * _MIX_2
    return word ^ (word >> _U(31))


@inlined
def draw(key: np.uint64, node: int, i: int) -> np.uint64:
    """The ``i``-th random word of ``node`` under ``key``."""
    return mix(mix(key + _NODE * _U(node)) + _STEP * _U(i))


@inlined
def unit(word: np.uint64) -> float:
    """A number in ``[0, 1)`` from the upper 53 bits of ``word``."""
    return (word >> _U(11)) * _UNIT


@inlined
def below(word: np.uint64, bound: int) -> int:
    """A number in ``[0, bound)`` from the upper half of ``word``; ``bound`` must not exceed ``2**32``.

    It takes one multiplication instead of a division (Lemire, TOMACS 2019). Lemire's rejection step is left out, so
    some numbers are likelier than others, by a share of at most ``bound / 2**32``.
    """
    return np.int64(((word >> _U(32)) * _U(bound)) >> _U(32))  # type: ignore[return-value]
