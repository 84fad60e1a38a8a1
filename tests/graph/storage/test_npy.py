"""``.npy`` files in pieces: the bytes that ``np.save`` writes, and no number out of a damaged file."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh64

from lightning_gnn_dist import Graph, RandomPartitioner
from lightning_gnn_dist.graph.storage.npy import NpyFile, checksum_of, save_for_good
from lightning_gnn_dist.partition.cache import cached_partition
from tests.ranks import run_ranks

ARRAYS: list[Any] = [
    np.arange(12, dtype=np.int32),
    np.random.default_rng(0).normal(size=(5, 3)).astype(np.float16),
    np.array([True, False]),
    np.zeros((0, 4)),
]


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


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (50_000, 3)])
def test_what_is_saved_for_good_is_what_numpy_saves(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = np.random.default_rng(0).random(shape)
    np.save(tmp_path / "by_numpy.npy", array)
    checksum = save_for_good(tmp_path / "here.npy", np.asarray(array))
    assert (tmp_path / "here.npy").read_bytes() == (tmp_path / "by_numpy.npy").read_bytes()
    assert checksum == checksum_of(tmp_path / "here.npy") == xxh64((tmp_path / "here.npy").read_bytes()).hexdigest()


def save_under_a_limit(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    graph = Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.int64), 60, {"x": torch.ones(60, 4)})
    said = []
    for limit in (900, 200):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            if limit == 900:
                graph.save(folder / "graph")
            else:
                cached_partition(graph, RandomPartitioner(), 2, 0, folder / "cache")
        except OSError as error:
            said.append(str(error))
    return said, sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_a_file_that_may_not_grow_is_no_success(tmp_path: Path) -> None:
    ((said, left),) = run_ranks(save_under_a_limit, 1, tmp_path)
    assert len(said) == 2 and all("a file may not grow" in sentence for sentence in said)
    assert left == ["cache"]
