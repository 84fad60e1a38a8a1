"""Draws that never change, memory that is lent, and kernels that are kept."""

import os
import re
import subprocess
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import config, njit
from numba.core import event
from torch import Tensor

from lightning_gnn_dist.engine import compiling, lending, rng
from lightning_gnn_dist.engine.kernels import sample
from lightning_gnn_dist.engine.lending import PinnedPool, sent
from lightning_gnn_dist.graph.storage.mapped import _reader

# Randomness is a function of its key, and the same function everywhere.


@njit
def compiled_draw(key: np.uint64, node: int, i: int) -> np.uint64:
    return rng.draw(key, node, i)


def test_draws_never_change():
    # Weights trained with a seed depend on these numbers: to change them is to change results.
    assert int(rng.key(0, 0, 0, 0)) == 0x2130748AAAC80268
    assert int(rng.key(-1, 5, 2**70, 3)) == 0xFA98348B45B3DB31
    assert int(compiled_draw(rng.key(0, 0, 0, 0), 7, 3)) == 0x7396BD9C45BAEF6F
    assert rng.permutation(8, seed=3, epoch=4).tolist() == [7, 5, 4, 3, 0, 2, 1, 6]


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
    for each in events:
        array = pool.copied(torch.arange(1000.0))
        addresses.append(array.data_ptr())
        pool.hold([array], each)
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


# Laws of what is kept of kernels on disk.


def test_any_change_of_any_source_gives_another_digest(tmp_path: Path) -> None:
    digests = {compiling.digest_of(tmp_path)}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        (tmp_path / name).write_text(text)
        digests.add(compiling.digest_of(tmp_path))
    assert len(digests) == 4


def test_one_rank_says_once_that_kernels_of_the_package_are_compiled(logged, monkeypatch) -> None:
    def said(notice: compiling.Notice, kernel: Any) -> int:
        logged.clear()
        for status in (event.EventStatus.START, event.EventStatus.END):
            notice.notify(event.Event("numba:compile", status, {"dispatcher": kernel}))
        return len(logged)

    notice, ours, theirs = compiling.Notice(), sample, njit(lambda number: number)
    assert [said(notice, kernel) for kernel in (theirs, _reader(), ours, ours)] == [0, 0, 1, 0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert said(compiling.Notice(), ours) == 0


KERNEL = """
from lightning_gnn_dist.engine.compiling import compiled
@compiled
def plus(number):
    return number + {}
"""


def installed(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel of a module that is imported from a folder, as another process would have it."""
    folder.mkdir(exist_ok=True)
    (folder / "of_this_test.py").write_text(KERNEL.format(number))
    spec: Any = spec_from_file_location("of_this_test", folder / "of_this_test.py")
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "of_this_test", module)
    compiling._digest_of_file.cache_clear()
    spec.loader.exec_module(module)
    return module.plus


def is_kept(kernel: Any) -> bool:
    folder = kernel.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"*{kernel.py_func.__qualname__}*.nbi"))


def compiled_anew(kernel: Any, expected: int) -> bool:
    assert kernel(1) == expected
    hits, misses = (sum(counts.values()) for counts in (kernel.stats.cache_hits, kernel.stats.cache_misses))
    assert hits + misses == 1
    return bool(misses)


def test_kernels_are_kept_for_every_environment_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = tmp_path / "one", tmp_path / "other"
    kernel = installed(one, 1, monkeypatch)
    assert not is_kept(kernel)
    assert compiled_anew(kernel, 2) and is_kept(kernel)
    assert not compiled_anew(installed(other, 1, monkeypatch), 2), "of another environment"
    assert compiled_anew(installed(other, 40, monkeypatch), 41), "of another version"
    (one / "of_this_test.py").unlink()
    assert not compiled_anew(installed(one, 1, monkeypatch), 2), "installed again"
    assert not compiled_anew(installed(other, 40, monkeypatch), 41), "both are kept"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lightning_gnn_dist"]


def test_one_process_compiles_a_kernel_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert compiled_anew(kernel, 2)
    index = Path(kernel._cache._cache_file._index_path)
    lock: Any = compiling.locked(index.with_name(f"{index.name}.lock"), seconds=0.0)
    assert lock is not None, "free again once the kernel is there"
    assert compiling.locked(Path(lock.name), seconds=0.0) is None, "taken"
    index.rename(index.with_suffix(".there"))

    def compile_slowly() -> None:
        index.with_suffix(".there").rename(index)
        lock.close()

    waiting = threading.Timer(0.3, compile_slowly)
    waiting.start()
    assert not compiled_anew(installed(tmp_path / "other", 1, monkeypatch), 2)
    waiting.join()


def test_the_folder_that_numba_is_told_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "told"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert compiled_anew(kernel, 2) and is_kept(kernel)
    assert Path(kernel.stats.cache_path).is_relative_to(tmp_path / "told")


def test_without_a_folder_of_the_user_kernels_are_kept_beside_the_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert compiled_anew(kernel, 2) and Path(kernel.stats.cache_path) == tmp_path / "one" / "__pycache__"


def test_where_nothing_can_be_written_kernels_run_all_the_same(tmp_path, monkeypatch, logged) -> None:
    def refuse(locator: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refuse)
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert kernel(1) == 2 and not is_kept(kernel)
    assert "Kernels are compiled by every process" in "".join(logged)


FIRST_BATCH = """
from numba.core import event
from lightning_gnn_dist import NeighborSampler, PartitionedDataModule, communities
data = PartitionedDataModule(communities(20_000, 3, num_features=64), sampler=NeighborSampler([15, 10]))
with event.install_recorder("numba:compile") as compiled:
    next(iter(data.train_dataloader()))
print("compiled:", *(each.data["dispatcher"].py_func.__name__ for _, each in compiled.buffer))
"""


@pytest.mark.slow
def test_a_first_batch_compiles_what_its_graph_has_once_on_a_machine(tmp_path: Path) -> None:
    variables, names = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, list[set[str]]()
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", FIRST_BATCH], env=variables, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        names.append({*re.findall("compiled:(.*)", ran.stdout)[0].split()})
    assert {"sample", "expand"} <= names[0] and not {"draw_by_weight", "aside_for", "end_of_piece"} & names[0]
    assert not names[1]


def test_a_folder_that_is_removed_while_a_kernel_is_compiled_does_no_harm(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)

    def gone(locator: Any) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", gone)
        assert compiled_anew(kernel, 2)
    assert not is_kept(kernel)
    assert compiled_anew(installed(tmp_path / "other", 1, monkeypatch), 2) and is_kept(kernel)
