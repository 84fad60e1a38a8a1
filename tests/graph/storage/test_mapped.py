"""Rows of mapped arrays: those of the array, whatever it is mapped from, and no memory for what was only looked at."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage import mapped, store
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from tests.memory import give_back_at_once, resident_bytes
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not mapped.MAPS.exists(), reason="reads Linux's /proc")
ROWS = torch.tensor([5, 6, 7, 2, 2, 0, 99, 98, 99, 5])


def saved(folder: Path, array: Tensor) -> Tensor:
    store.write(folder, {"nodes/x": array}, "", overwrite=True)
    arrays = store.read(folder)[0]
    return arrays["nodes/x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(100,), (100, 7), (100, 3, 2), (100, 0)])
def test_rows_are_those_of_the_array(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = (100 * torch.rand(shape)).to(dtype)
    for found in (array, saved(tmp_path / "graph", array)):
        rows = MappedRows(found)
        assert torch.equal(rows.take(ROWS), array[ROWS]) and rows.take(ROWS).dtype == dtype
        rows.release()
        assert torch.equal(found, array)
        assert rows.take(ROWS[:0]).shape == (0, *shape[1:])
    assert rows.is_read_from_file == (array.numel() > 0)


@pytest.mark.parametrize("rows_a_look", [0, 4, 10**9])
def test_few_rows_are_those_of_many(rows_a_look: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "ROWS_A_LOOK", rows_a_look)
    monkeypatch.setattr(mapped, "WINDOW_BYTES", 1 << 14)
    array = torch.rand(20_000, 9)
    rows = MappedRows(saved(tmp_path / "graph", array))
    for nodes in (torch.randint(20_000, (700,)), torch.arange(20_000), torch.arange(5000, 5100)):
        assert torch.equal(rows.take(nodes), array[nodes])


def test_parts_of_a_map_have_their_own_place(tmp_path: Path) -> None:
    array = torch.rand(3000, 5)
    found = saved(tmp_path / "graph", array)
    for place in (slice(7, None), slice(1500, 2900)):
        rows = MappedRows(found[place])
        assert rows.is_read_from_file and torch.equal(rows.take(ROWS), array[place][ROWS])
    assert torch.equal(MappedRows(found[::2]).take(ROWS), array[::2][ROWS])  # whose rows do not follow each other
    assert torch.equal(MappedRows(found.T).take(ROWS[5:6]), array.T[:1])


def test_what_was_changed_in_memory_is_read_there_and_stays(tmp_path: Path) -> None:
    found = saved(tmp_path / "graph", torch.zeros(3000, 5))
    found[6] = 1
    rows = MappedRows(found)
    assert not rows.is_read_from_file and rows.take(ROWS)[1].tolist() == [1] * 5
    rows.release()
    assert found[6].tolist() == [1] * 5


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    found = saved(tmp_path / "graph", torch.ones(100, 5))
    saved(tmp_path / "graph", torch.zeros(100, 5))
    rows = MappedRows(found)
    assert not rows.is_read_from_file and rows.take(ROWS).min() == 1


def test_a_file_that_became_shorter_is_noticed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((5000, 100)))
    rows = MappedRows(torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c")))
    with (tmp_path / "x.npy").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(OSError, match=r"Row 4000 of .*x\.npy cannot be read"):
        rows.take(torch.tensor([3, 4000]))


def growth(rank: int, world_size: int, path: Path, every: int) -> tuple[int, int, int]:
    """Bytes that taking some rows, looking at all, and letting go of them adds."""
    give_back_at_once()
    array = torch.from_numpy(np.load(path, mmap_mode="c"))
    nodes, rows = torch.arange(0, len(array), every), MappedRows(array)
    rows.take(nodes[:10])
    before = resident_bytes("VmRSS")
    rows.take(nodes)
    taken = resident_bytes("VmRSS")
    array.sum()
    looked = resident_bytes("VmRSS")
    rows.release()
    return taken - before, looked - taken, resident_bytes("VmRSS") - taken


@pytest.mark.parametrize("every", [50, 450])
def test_what_was_read_is_no_memory_of_the_process(every: int, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1 << 20, 32), np.float32))
    ((taken, looked, released),) = run_ranks(growth, 1, tmp_path / "x.npy", every)
    whole = 4 * 32 << 20
    assert looked > whole / 4
    assert taken < whole / 16 and released < whole / 16
