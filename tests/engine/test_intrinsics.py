"""Runs of items, which vectors compare and fill."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from lightning_gnn_dist.engine import lending, rng
from lightning_gnn_dist.engine.intrinsics import RUN, fill_run, run_length
from lightning_gnn_dist.engine.lending import PinnedPool, sent
from tests.sampling import reference


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


# Randomness is a function of its key, and the same function everywhere.


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


# Page-locked memory is lent again when no tensor shares it and all copies from it are done, and not before.


class Event:
    is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all page-locked memory that the system was asked for, which here is other memory."""
    sizes, empty = list[int](), torch.empty

    def allocate(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> Tensor:
        assert pin_memory and device == "cpu"
        sizes.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    return sizes


def test_memory_is_lent_again_when_nobody_has_it(locked: list[int]) -> None:
    pool = PinnedPool()
    first = pool.take(5000)
    view, address = first[7:9], first.data_ptr()
    del first
    assert pool.take(5000).data_ptr() != address
    assert locked == [8192, 8192]
    del view
    assert {pool.take(8000).data_ptr() for _ in range(5)} == {address}
    assert pool.take(3000).data_ptr() == address  # also for somewhat less
    assert locked == [8192, 8192]
    pool.take(1)
    assert locked == [8192, 8192] and pool.take(9000).numel() == 9000
    assert locked == [8192, 8192, 16384]


def test_memory_is_held_until_it_was_copied(locked: list[int]) -> None:
    pool, events = PinnedPool(), [Event(), Event()]
    addresses = []
    for event in events:
        array = pool.copied(torch.arange(1000.0))
        addresses.append(array.data_ptr())
        pool.hold([array], event)
        del array
    assert len(locked) == len(set(addresses)) == 2
    pool.take(4000)
    assert len(locked) == 3
    events[1].is_done = True  # of another stream
    taken = pool.take(4000), pool.take(4000)
    assert addresses[1] in {memory.data_ptr() for memory in taken}
    assert addresses[0] not in {memory.data_ptr() for memory in taken}
    assert len(locked) == 3


@pytest.mark.parametrize("array", [torch.tensor(3.0), torch.tensor([[True], [False]]), torch.arange(12).view(3, 4).T])
def test_a_copy_is_what_was_copied(array: Tensor, locked: list[int]) -> None:
    found = PinnedPool().copied(array)
    assert found.equal(array) and found.dtype == array.dtype and found.data_ptr() != array.data_ptr()
    assert locked == [4096]
    empty = array.new_zeros(0, 3)
    assert PinnedPool().copied(empty) is empty


@pytest.mark.gpu
def test_nothing_is_overwritten_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, cuda = PinnedPool(), torch.device("cuda", 0)
    monkeypatch.setattr(lending, "pinned_pool", lambda: pool)
    weight, found = torch.randn(512, 512, device=cuda), list[Tensor]()
    for number in range(60):
        weight = (weight @ weight).tanh()  # the device is behind
        array = torch.full((1000 + number,), number)
        found.append(sent(array, cuda))
        array.fill_(-1)
    assert all(bool((array == number).all()) for number, array in enumerate(found))
    assert all(array.device == cuda for array in found)


@pytest.mark.gpu
def test_memory_is_locked_once() -> None:
    pretend: Any = pytest.importorskip("pretend", reason="only pretended devices count page-locked memory")
    counts, cuda = [], torch.device("cuda", 0)
    for number in range(40):
        sent(torch.arange(600 + number), cuda)
        counts.append(pretend.lib.counts(False).get("pinned allocations", 0))
    assert counts[-1] == counts[10]
