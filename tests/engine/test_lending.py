"""Page-locked memory is lent again when no tensor shares it and all copies from it are done, and not before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.engine import lending
from lightning_gnn_dist.engine.lending import PinnedPool, sent


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
