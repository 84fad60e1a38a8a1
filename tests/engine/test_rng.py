"""Randomness is a function of its key, and the same function everywhere."""

import numpy as np
import pytest
import torch
from numba import njit

from lightning_gnn_dist.engine import rng
from tests.sampling import reference


@njit
def compiled_draw(key: np.uint64, node: int, i: int) -> np.uint64:
    return rng.draw(key, node, i)


@njit
def compiled_histogram(key: np.uint64, num_nodes: int, bound: int) -> np.ndarray:
    counts = np.zeros(bound, np.int64)
    for node in range(num_nodes):
        counts[rng.below(rng.draw(key, node, 0), bound)] += 1
    return counts


@pytest.mark.parametrize("node", [0, 1, 2**31, 2**40])
def test_a_compiled_draw_is_the_same_as_with_python_integers(node):
    key = rng.key(1, 2, 3, 4)
    for i in range(20):
        assert int(compiled_draw(key, node, i)) == reference.draw(int(key), node, i)


def test_draws_never_change():
    # Weights trained with a seed depend on these numbers: to change them is to change results.
    assert int(rng.key(0, 0, 0, 0)) == 0x2130748AAAC80268
    assert int(rng.key(-1, 5, 2**70, 3)) == 0xFA98348B45B3DB31
    assert int(compiled_draw(rng.key(0, 0, 0, 0), 7, 3)) == 0x7396BD9C45BAEF6F
    assert rng.permutation(8, seed=3, epoch=4).tolist() == [7, 5, 4, 3, 0, 2, 1, 6]


def test_keys_differ_in_every_part():
    keys = {int(rng.key(s, e, b, h)) for s in range(4) for e in range(4) for b in range(4) for h in range(4)}
    assert len(keys) == 4**4
    assert rng.key(2**64, 0, 0, 0) == rng.key(0, 0, 0, 0)


def test_numbers_below_a_bound_are_uniform():
    counts = compiled_histogram(rng.key(0, 0, 0, 0), 20_000, 10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # the 0.999 quantile of chi-square with 9 degrees


def test_bits_of_neighbouring_draws_are_independent():
    key = rng.key(0, 0, 0, 0)
    words = [int(compiled_draw(key, node, i)) for node in range(64) for i in range(32)]
    bits = np.array([[word >> shift & 1 for shift in range(64)] for word in words])
    correlation = np.corrcoef(bits, rowvar=False) - np.eye(64)
    assert np.abs(correlation).max() < 5 / np.sqrt(len(bits))


def test_permutations():
    order = rng.permutation(1000, seed=0, epoch=1)
    assert order.sort().values.equal(torch.arange(1000))
    assert order.equal(rng.permutation(1000, seed=0, epoch=1))
    assert not order.equal(rng.permutation(1000, seed=0, epoch=2))
    assert not order.equal(rng.permutation(1000, seed=1, epoch=1))
    assert rng.permutation(0, seed=0, epoch=0).numel() == 0
