"""The cache: one computation, whoever asks, and never a damaged answer."""

import dataclasses
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, MetisPartitioner, Partition, RandomPartitioner, SuperNodePartitioner
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.cache import cached_partition, identity
from tests.partition.graphs import path_graph

GRAPH = path_graph(50)


@dataclasses.dataclass(frozen=True)
class Counting:
    """Writes a file each time it is called, so that calls in all processes can be counted."""

    folder: str

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        calls = Path(self.folder)
        (calls / f"{os.getpid()}-{len(list(calls.iterdir()))}").touch()
        # Unlike any proper partitioner it depends on the process: who asks must get what was stored.
        return RandomPartitioner()(graph, num_parts, seed + os.getpid())

    @property
    def calls(self) -> int:
        return len(list(Path(self.folder).iterdir()))


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    (tmp_path / "calls").mkdir()
    return Counting(str(tmp_path / "calls"))


def entries(directory: Path) -> list[Path]:
    """Everything in the cache, so also what should have been tidied up."""
    return sorted(directory.iterdir())


def test_the_second_time_it_is_read(counting: Counting, tmp_path: Path) -> None:
    first, second = (cached_partition(GRAPH, counting, 4, 0, tmp_path / "cache") for _ in range(2))
    assert counting.calls == 1
    assert torch.equal(first.assignment, second.assignment)
    assert second.num_parts == 4
    second.assignment[0] = 0  # it is the caller's own: no warning, and the entry stays as it is
    assert torch.equal(cached_partition(GRAPH, counting, 4, 0, tmp_path / "cache").assignment, first.assignment)


def test_whatever_changes_the_result_is_another_entry(tmp_path: Path) -> None:
    requests: list[tuple[Graph, Partitioner, int, int]] = [
        (GRAPH, RandomPartitioner(), 4, 0),
        (path_graph(51), RandomPartitioner(), 4, 0),
        (GRAPH, RandomPartitioner(), 5, 0),
        (GRAPH, RandomPartitioner(), 4, 1),
        (GRAPH, MetisPartitioner(), 4, 0),
        (GRAPH, MetisPartitioner(imbalance=0.5), 4, 0),
        (GRAPH, MetisPartitioner(balance="train"), 4, 0),
        (GRAPH, SuperNodePartitioner(10), 4, 0),
    ]
    for request in requests * 2:
        partition = cached_partition(*request, tmp_path)
        assert torch.equal(partition.assignment, request[1](request[0], *request[2:]).assignment)
    assert len(entries(tmp_path)) == len(requests)


def test_in_the_users_cache_for_a_graph_in_ram(cache: Path) -> None:
    cached_partition(GRAPH, RandomPartitioner(), 4, 0)
    assert len(entries(cache / "lightning_gnn_dist" / "partitions")) == 1


def test_in_the_home_directory_without_a_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    cached_partition(GRAPH, RandomPartitioner(), 4, 0)
    assert len(entries(tmp_path / ".cache" / "lightning_gnn_dist" / "partitions")) == 1


def test_beside_a_saved_graph_only_if_one_can_write_there(tmp_path, cache, monkeypatch) -> None:
    GRAPH.save(tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    # Tests may run as root, who may write anywhere: let the system say no.
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(tmp_path))
    cached_partition(graph, RandomPartitioner(), 4, 0)
    assert len(entries(cache / "lightning_gnn_dist" / "partitions")) == 1
    with pytest.raises(PermissionError, match=r"mine \(one cannot write there\): choose another .*cache_dir="):
        cached_partition(graph, RandomPartitioner(), 4, 0, tmp_path / "mine")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/proc/nobody")
    for given in (None, "/proc/nobody/cache"):
        with pytest.raises(PermissionError, match=r"in /proc/nobody/.* \(No such file or directory\): choose another"):
            cached_partition(GRAPH, RandomPartitioner(), 4, 0, given)


def flip(entry: Path) -> None:
    assignment = np.load(entry / "assignment.npy")
    assignment[7] = (assignment[7] + 1) % 4
    np.save(entry / "assignment.npy", assignment)


def misplace(entry: Path) -> None:
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps(meta | {"seed": 17}))


def empty(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda entry: os.truncate(entry / "assignment.npy", (entry / "assignment.npy").stat().st_size - 8),
    "flipped": flip,
    "no json": lambda entry: (entry / "meta.json").write_text('{"version"'),
    "a list": lambda entry: (entry / "meta.json").write_text("[]"),
    "misplaced": misplace,
    "other bytes": lambda entry: (entry / "assignment.npy").write_bytes(b"\xff" * 300),
    "empty": empty,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_computed_again(name: str, counting: Counting, tmp_path: Path, logged: list[str]) -> None:
    directory = tmp_path / "cache"
    first = cached_partition(GRAPH, counting, 4, 0, directory)
    DAMAGES[name](entries(directory)[0])
    again = cached_partition(GRAPH, counting, 4, 0, directory)
    assert "computed again" in "".join(logged)
    assert name != "a list" or "(it holds a list, not an object)): it is computed again" in "".join(logged)
    assert torch.equal(first.assignment, again.assignment)
    assert counting.calls == 2
    cached_partition(GRAPH, counting, 4, 0, directory)
    assert counting.calls == 2
    assert len(entries(directory)) == 1


def test_a_partitioner_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be at least num_parts"):
        cached_partition(GRAPH, SuperNodePartitioner(2), 4, 0, tmp_path)
    assert entries(tmp_path) == []


@dataclasses.dataclass(frozen=True)
class Overtaken:
    """While it computes for the first time, somebody else asks for the same, and is faster."""

    folder: str

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        calls = len(list(Path(self.folder).iterdir()))
        (Path(self.folder) / str(calls)).touch()
        if calls == 0:
            cached_partition(graph, self, num_parts, seed, Path(self.folder).parent / "cache")
        return RandomPartitioner()(graph, num_parts, seed=calls)


def test_who_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "calls").mkdir()
    partition = cached_partition(GRAPH, Overtaken(str(tmp_path / "calls")), 4, 0, tmp_path / "cache")
    assert torch.equal(partition.assignment, RandomPartitioner()(GRAPH, 4, seed=1).assignment)
    assert len(entries(tmp_path / "calls")) == 2
    assert len(entries(tmp_path / "cache")) == 1


@dataclasses.dataclass
class Thawed:
    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        return RandomPartitioner()(graph, num_parts, seed)


@dataclasses.dataclass(frozen=True)
class Within:
    inner: object
    also: tuple[object, ...] = (1, "two", None)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        return RandomPartitioner()(graph, num_parts, seed)


@pytest.mark.parametrize("partitioner", [Thawed(), Within(Thawed()), Within(torch.ones(3)), lambda *_: None])
def test_what_does_not_identify_itself_is_refused(partitioner: Partitioner, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must be a frozen dataclass"):
        cached_partition(GRAPH, partitioner, 4, 0, tmp_path)


def test_identity_names_the_class_in_full_and_every_field() -> None:
    assert identity(Within(RandomPartitioner())) == (
        "tests.partition.test_cache.Within(inner=lightning_gnn_dist.partition.random.RandomPartitioner(), "
        "also=(1, 'two', None))"
    )


def test_one_line_is_logged(tmp_path: Path, informed: list[str]) -> None:
    cached_partition(GRAPH, RandomPartitioner(), 4, 0, tmp_path)
    (computed,) = informed
    assert computed.startswith("Partitioned 50 nodes into 4 parts by RandomPartitioner() in 0.")
    assert computed.endswith("% of the edges are cut")
    informed.clear()
    cached_partition(GRAPH, RandomPartitioner(), 4, 0, tmp_path)
    (read,) = informed
    assert read.startswith("Read the partition into 4 parts by RandomPartitioner() from ")


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Returns something else than was asked for."""

    parts: int

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        assignment = torch.zeros(graph.num_nodes, dtype=torch.int32)
        return Partition(assignment, self.parts) if self.parts else assignment  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("parts", "message"), [(0, r"What Wrong\(parts=0\) returns must be a Partition"), (7, "returned 7 parts, and was")]
)
def test_what_is_no_answer_is_not_kept(parts: int, message: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cached_partition(GRAPH, Wrong(parts), 2, 0, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache_dir must be a folder"):
        cached_partition(GRAPH, RandomPartitioner(), 2, 0, tmp_path / "file")


def ask(barrier: Barrier, counting: Counting, directory: Path, answers: Path) -> None:
    barrier.wait(timeout=240)
    partition = cached_partition(path_graph(200_000), counting, 4, 0, directory)
    np.save(answers / f"{os.getpid()}.npy", partition.assignment.numpy())


@pytest.mark.slow
def test_processes_that_ask_at_once_get_the_same_parts(counting: Counting, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    (tmp_path / "answers").mkdir()
    arguments = (barrier, counting, tmp_path / "cache", tmp_path / "answers")
    processes = [context.Process(target=ask, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=240)
        assert process.exitcode == 0
    first, second = (np.load(file) for file in entries(tmp_path / "answers"))
    assert np.array_equal(first, second)
    assert counting.calls in (1, 2)
    assert len(entries(tmp_path / "cache")) == 1
