"""Rows that are read from a file in few requests are those of the array."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.larger_than_memory import merged_reads
from lightning_gnn_dist.extensions.larger_than_memory.merged_reads import THREAD_NAME, MergedReads


def mapped(path: Path, array: Tensor) -> Tensor:
    """As a saved graph has arrays: behind a header, so that rows do not begin where pages do."""
    np.save(path, array.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def some_rows(count: int, among: int) -> Tensor:
    return torch.randperm(among, generator=torch.Generator().manual_seed(count))[:count].sort().values


@pytest.mark.parametrize("gap", [0, 100, 1 << 14])
@pytest.mark.parametrize("shape", [(7,), (3, 5), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_rows_are_those_of_the_array(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_reads, "GAP_BYTES", gap)
    monkeypatch.setattr(merged_reads, "REQUEST_BYTES", 1000)
    array = mapped(tmp_path / "a.npy", torch.randint(0, 100, (2000, *shape)).to(dtype))
    reads = MergedReads(array)
    for rows in (
        *(some_rows(count, 2000) for count in (0, 1, 2, 500, 1999, 2000)),
        torch.tensor([1999]),
        torch.arange(90),
    ):
        assert reads.take(rows).equal(array[rows])
    reads.close()


def test_rows_are_read_in_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: rows of 100 bytes, gaps of at most 400, requests of at most 2000 beside the first row's offset.

    The rows stand behind a header of 128 bytes, and blocks of 4096 are read.
    """
    monkeypatch.setattr(merged_reads, "GAP_BYTES", 400)
    monkeypatch.setattr(merged_reads, "REQUEST_BYTES", 2000)
    array = mapped(tmp_path / "a.npy", torch.zeros(1000, 100, dtype=torch.uint8))
    reads = MergedReads(array)
    for rows, starts, blocks in (
        ((3, 4, 5), [0, 3], 1),
        ((0, 5, 10), [0, 3], 1),  # four rows between them
        ((0, 6, 12), [0, 1, 2, 3], 3),  # five, which is too far
        (tuple(range(50)), [0, 20, 40, 50], 1 + 2 + 1),  # bytes 128 to 2128, to 4128, to 5128
        ((0, 19, 20, 21), [0, 1, 4], 1 + 1),
        ((39,), [0, 1], 2),  # bytes 4028 to 4128
    ):
        before = reads.bytes_read
        reads.take(torch.tensor(rows))
        assert merged_reads._requests(torch.tensor(rows), 100).tolist() == starts
        assert reads.bytes_read - before == 4096 * blocks
    reads.close()


def test_without_a_way_past_the_cache_rows_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, rows = mapped(tmp_path / "a.npy", torch.randn(2000, 7)), some_rows(300, 2000)
    monkeypatch.delattr(os, "O_DIRECT")
    reads = MergedReads(array)
    assert reads.take(rows).equal(array[rows])
    reads.close()


def test_a_row_wider_than_a_request_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_reads, "REQUEST_BYTES", 64)
    array = mapped(tmp_path / "a.npy", torch.randn(20, 50))
    assert MergedReads(array).take(torch.tensor([0, 1, 7, 19])).equal(array[[0, 1, 7, 19]])


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    array = mapped(tmp_path / "a.npy", torch.randn(1000, 50))
    reads = MergedReads(array)
    os.truncate(tmp_path / "a.npy", 100_000)
    with pytest.raises(OSError, match=r"Row 999 of .*a.npy cannot be read: was the file changed\?"):
        reads.take(torch.tensor([0, 999]))


def test_arrays_in_ram_are_refused() -> None:
    with pytest.raises(ValueError, match="do not lie in a file"):
        MergedReads(torch.randn(1000, 50))


def openings(folder: Path) -> int:
    """How many files of a folder this process has open; others come and go with what other tests have left."""
    files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(file.is_symlink() and folder in file.readlink().parents for file in files)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    array = mapped(tmp_path / "a.npy", torch.randn(100_000, 16))
    before = openings(tmp_path)  # of the map
    reads = MergedReads(array)
    reads.take(torch.arange(0, 100_000, 2000))
    assert openings(tmp_path) == before + 1
    reads.close()
    reads.close()
    assert openings(tmp_path) == before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    with pytest.raises(RuntimeError, match="was closed while rows of it were asked for"):
        reads.take(torch.arange(3))
