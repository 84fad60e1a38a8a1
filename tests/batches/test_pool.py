"""Rows are copied exactly, and a buffer comes back only when nobody can see it."""

import gc
import threading

import pytest
import torch

from lightning_gnn_dist.batches import pool as of_pool
from lightning_gnn_dist.batches import pool as pools
from lightning_gnn_dist.batches.pool import BufferPool, gather_rows

ROWS = torch.tensor([3, 0, 3, 9, 5])


@pytest.fixture
def pool(monkeypatch) -> BufferPool:
    """A pool that also takes small arrays."""
    monkeypatch.setattr(pools, "SMALL_BYTES", 1)
    monkeypatch.setattr(pools, "POOLED_BYTES", 1)
    return BufferPool(max_free=2)


TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_any_type_are_copied(pool, name):
    dtype = getattr(torch, name)
    for shape in ((10,), (10, 1), (10, 7), (10, 64), (10, 3, 5), (10, 1433), (10, 0)):
        array = (torch.randn(shape) * 100).to(torch.int64).to(dtype)
        for rows in (ROWS, ROWS[:0]):
            out = gather_rows(array, rows, pool)
            assert out.dtype == dtype
            assert out.equal(array[rows])
            assert gather_rows(array, rows).equal(array[rows])


@pytest.mark.parametrize("width", [1, 2, 128, 1433])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_as_torch_does_it(pool, dtype, width):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    array = every.repeat(-(-10 * width // every.numel()) + 1)
    array = array[: array.numel() // width * width].view(-1, width)
    rows = torch.randint(len(array), (70_000 // width + 3,))
    out, expected = gather_rows(array, rows, pool, widen=True), array[rows].float()
    assert out.dtype == torch.float32
    assert out.isnan().equal(expected.isnan())
    assert out.nan_to_num(0.5).equal(expected.nan_to_num(0.5))
    assert out.nan_to_num(0.5).signbit().equal(expected.nan_to_num(0.5).signbit())  # a NaN may have any sign
    assert gather_rows(array, rows[:2], widen=True).nan_to_num(0.5).equal(expected[:2].nan_to_num(0.5))
    del out
    assert pool.num_free == 1


def test_every_half_is_widened_without_the_processors_help(monkeypatch):
    monkeypatch.setattr(of_pool, "WIDENS_HALVES", False)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 64)
    out, expected = gather_rows(every, torch.arange(len(every)), widen=True), every.float()
    assert out.nan_to_num(0.5).equal(expected.nan_to_num(0.5)) and out.isnan().equal(expected.isnan())


@pytest.mark.parametrize("shape", [(10, 7), (10, 3, 5), (10, 1433)])
@pytest.mark.parametrize("form", [(10,), (10, 1)])
def test_scaled_integers_are_multiplied(pool, shape, form):
    array, scale = torch.randint(-127, 128, shape, dtype=torch.int8), torch.rand(form)
    out = gather_rows(array, ROWS, pool, scale=scale)
    expected = array[ROWS].float() * scale.view(-1)[ROWS].view(-1, *[1] * (len(shape) - 1))
    assert out.dtype == torch.float32
    assert out.equal(expected)
    assert gather_rows(array, ROWS, scale=scale).equal(expected)


def test_without_being_asked_nothing_is_widened():
    assert gather_rows(torch.ones(4, 3, dtype=torch.float16), ROWS[1:3] * 0).dtype == torch.float16
    assert gather_rows(torch.ones(4, 3, dtype=torch.float64), ROWS[1:3] * 0, widen=True).dtype == torch.float64
    assert gather_rows(torch.ones(4, 3, dtype=torch.int8), ROWS[1:3] * 0, widen=True).dtype == torch.int8


def test_arrays_with_gaps_are_copied(pool):
    array = torch.randn(10, 8)[:, ::2]
    assert gather_rows(array, ROWS, pool).equal(array[ROWS])


def test_a_buffer_is_used_again_when_nobody_holds_it(pool):
    out = gather_rows(torch.randn(10, 8), ROWS, pool)
    address = out.data_ptr()
    assert address % 64 == 0
    assert pool.num_free == 0
    del out
    assert pool.num_free == 1
    assert gather_rows(torch.randn(10, 8), ROWS, pool).data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: x.view(torch.uint8),
        lambda x: x.numpy(),
        lambda x: (x * torch.ones(8, requires_grad=True)).sum(),  # autograd saves x
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    ],
)
def test_whoever_holds_a_part_of_a_buffer_keeps_it(pool, hold):
    array = torch.randn(10, 8)
    held = hold(gather_rows(array, ROWS, pool))
    gc.collect()
    assert pool.num_free == 0
    others = [gather_rows(torch.zeros(10, 8), ROWS, pool) for _ in range(5)]
    if isinstance(held, torch.Tensor) and held.requires_grad:
        held.sum().backward()  # reads what was saved
    del others, held
    gc.collect()
    assert pool.num_free == 2


def test_a_pool_may_go_before_its_buffers():
    pool = BufferPool(max_free=2)
    view = pool.take(1000)
    view[:] = 7
    del pool
    gc.collect()
    assert (view == 7).all()


def test_threads_share_a_pool(pool):
    array = torch.arange(100.0).repeat(16, 1).t().contiguous()
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            rows = torch.randint(100, (50,), generator=generator)
            first, second = gather_rows(array, rows, pool), gather_rows(array, rows.flip(0), pool)
            if not (first.equal(array[rows]) and second.equal(array[rows.flip(0)])):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.num_free == 2
