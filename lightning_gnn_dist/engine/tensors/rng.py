"""The draws of :mod:`rng` as torch operators: the same words, for tensors on any device.

int64 arithmetic wraps as uint64 does; only a shift to the right has to clear the copies of the sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.engine.weighted.arrivals import LOG_2, SQRT_HALF, T3, T5, T7, T9, T11, T13


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63


_NODE, _STEP = _signed(0xD1342543DE82EF95), _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def keys_of(batch_keys: Sequence[BatchKey], hop: int, device: torch.device) -> Tensor:
    """The key of a hop in each batch, int64, shape (k,)."""
    return torch.tensor([_signed(int(key(*batch_key, hop))) for batch_key in batch_keys], device=device)


def draw(keys: Tensor, nodes: Tensor, i: Tensor | int) -> Tensor:
    """The ``i``-th random word of each node under its key; the arguments broadcast."""
    return _mix_(_mix_(keys + _NODE * nodes) + _STEP * torch.as_tensor(i, device=keys.device))


def unit(words: Tensor) -> Tensor:
    """Numbers in ``[0, 1)``, float64."""
    return _shift(words, 11).to(torch.float64).mul_(2.0**-53)


def minus_log(words: Tensor) -> Tensor:
    """The negative logarithms of numbers in ``(0, 1]``, float64, as in :mod:`weighted.arrivals`."""
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
