"""Laws of what is kept of kernels on disk."""

import os
import re
import subprocess
import sys
import threading
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from numba import config, njit
from numba.core import event

from lightning_gnn_dist import ShadowSampler
from lightning_gnn_dist.engine import compiling, subgraph_kernels
from lightning_gnn_dist.graph.storage.mapped import _reader
from tests.sampling.neighborhoods import PLACE
from tests.sampling.reference import random_graph


def test_any_change_of_any_source_gives_another_digest(tmp_path: Path) -> None:
    digests = {compiling.digest_of(tmp_path)}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        (tmp_path / name).write_text(text)
        digests.add(compiling.digest_of(tmp_path))
    assert len(digests) == 4


def test_a_kernel_is_kept_under_the_sources_of_its_parts_too() -> None:
    graph = random_graph()
    seeds = graph.indices[:1].long()
    ShadowSampler([2], num_hops=1).sample_bulk(graph, [seeds], [PLACE])
    digest = compiling.digest_of(Path(compiling.__file__).parent)
    pattern = (
        f"*sample_egos_{digest}*.py{sys.version_info.major}{sys.version_info.minor}.nbi"  # others keep theirs there
    )
    assert len(list(Path(subgraph_kernels.sample_egos.stats.cache_path).glob(pattern))) == 1  # type: ignore[attr-defined]


def test_one_rank_says_once_that_kernels_of_the_package_are_compiled(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(notice: compiling.Notice, kernel: Any) -> int:
        logged.clear()
        for status in (event.EventStatus.START, event.EventStatus.END):
            notice.notify(event.Event("numba:compile", status, {"dispatcher": kernel}))
        return len(logged)

    notice, ours, theirs = compiling.Notice(), subgraph_kernels.sample_egos, njit(lambda number: number)
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


def compiled_anew(kernel: Any, expected: int) -> bool:
    assert kernel(1) == expected
    hits, misses = (sum(counts.values()) for counts in (kernel.stats.cache_hits, kernel.stats.cache_misses))
    assert hits + misses == 1
    return bool(misses)


def test_kernels_are_kept_for_every_environment_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one, other = tmp_path / "one", tmp_path / "other"
    kernel = installed(one, 1, monkeypatch)
    assert not compiling.is_kept(kernel)
    assert compiled_anew(kernel, 2) and compiling.is_kept(kernel)
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


def test_a_folder_that_is_removed_while_a_kernel_is_compiled_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)

    def gone(locator: Any) -> None:
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", gone)
        assert compiled_anew(kernel, 2)
    assert not compiling.is_kept(kernel)
    assert compiled_anew(installed(tmp_path / "other", 1, monkeypatch), 2) and compiling.is_kept(kernel)


def test_the_folder_that_numba_is_told_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "told"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert compiled_anew(kernel, 2) and compiling.is_kept(kernel)
    assert Path(kernel.stats.cache_path).is_relative_to(tmp_path / "told")


def test_without_a_folder_of_the_user_kernels_are_kept_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert compiled_anew(kernel, 2) and Path(kernel.stats.cache_path) == tmp_path / "one" / "__pycache__"


def test_where_nothing_can_be_written_kernels_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def refuse(locator: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("numba.core.caching._CacheLocator.ensure_cache_path", refuse)
    kernel = installed(tmp_path / "one", 1, monkeypatch)
    assert kernel(1) == 2 and not compiling.is_kept(kernel)
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
