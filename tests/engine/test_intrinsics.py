"""Runs of items, which vectors compare and fill."""

import numpy as np
import pytest
from numba import njit

from lightning_gnn_dist.engine.intrinsics import RUN, fill_run, run_length


@njit
def lengths(array, out):
    for i in range(len(out)):
        out[i] = run_length(array, i)


@njit
def fill(array, index, value):
    fill_run(array, index, value)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_the_length_of_a_run_is_that_of_a_loop(dtype):
    counts = [1, 2, RUN - 1, RUN, RUN + 1, 5] * 10
    array = np.repeat(np.random.default_rng(0).integers(250, 256, len(counts)), counts).astype(dtype)
    out = np.empty(len(array) - RUN + 1, np.int64)
    lengths(array, out)
    for i, found in enumerate(out.tolist()):
        differs = np.flatnonzero(array[i : i + RUN] != array[i])
        assert found == (differs[0] if len(differs) else RUN)


@pytest.mark.parametrize(("dtype", "value"), [(np.uint8, 255), (np.int16, 2**15 - 1)])
def test_a_run_is_filled_and_nothing_beside_it(dtype, value):
    array = np.zeros(RUN + 8, dtype)
    fill(array, 3, value)
    assert array.tolist() == [0] * 3 + [value] * RUN + [0] * 5
