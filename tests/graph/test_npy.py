"""``.npy`` files in pieces: the bytes that ``np.save`` writes, and no number out of a damaged file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn_dist.graph.npy import NpyFile, append, cut_back, save, write_header

ARRAYS = [
    np.arange(12, dtype=np.int32),
    np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16),
    np.array([True, False]),
    np.zeros((0, 4)),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_pieces_make_the_file_of_the_whole(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "whole.npy", array)
    file = tmp_path / "pieces.npy"
    start = write_header(file, array.dtype, (0, *array.shape[1:]))
    for piece in np.array_split(array, 3):
        append(file, piece)
    assert write_header(file, array.dtype, array.shape) == start  # known at last
    save(tmp_path / "saved.npy", array)
    for other in (file, tmp_path / "saved.npy"):
        assert other.read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_headers_tell_and_numbers_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAYS[1])
    file = NpyFile.of(tmp_path / "a.npy")
    assert (file.shape, file.type, file.num_bytes, file.by_column) == ((5, 3), torch.float16, 30, False)
    assert np.array_equal(file.read(4, 6), ARRAYS[1].reshape(-1)[4:10])
    file.path.write_bytes(file.path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"became shorter while it was read"):
        file.read(0, 15)
    with pytest.raises(ValueError, match=r"is truncated: it has 148 bytes, and its header promises 158"):
        NpyFile.of(file.path)


def test_files_are_cut_back_never_stretched(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    cut_back(file, 0)  # made, if it is not there
    file.write_bytes(b"12345678")
    cut_back(file, 5)
    assert file.read_bytes() == b"12345"
    with pytest.raises(ValueError, match="is shorter than was recorded"):
        cut_back(file, 6)
