"""Arrays in RAM go into large pages, piece by piece; nothing else is touched."""

from __future__ import annotations

import ctypes
import errno
import os
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph
from lightning_gnn_dist.graph import large_pages
from lightning_gnn_dist.graph.large_pages import PAGE_BYTES, PIECE_BYTES, enlarge_pages
from lightning_gnn_dist.graph.storage.mapped import libc, maps_under

MANY = 5 * PIECE_BYTES // 4  # bytes of features, in two pieces


def graph_with(num_bytes: int) -> Graph:
    x = torch.arange(num_bytes // 4, dtype=torch.float32).view(-1, 64)
    indptr = torch.zeros(len(x) + 1, dtype=torch.int64)
    return Graph(indptr, torch.zeros(0, dtype=torch.int32), {"x": x})


def bytes_in_large_pages(array: Tensor) -> int:
    return sum(place.sizes["AnonHugePages"] for place in maps_under(array))


class Refusing:
    """A C library whose system answers every request with an error."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def madvise(self, start: int, length: int, advice: int) -> int:
        self.calls += 1
        ctypes.set_errno(self.number)
        return -1


class Recording:
    """The C library, and what its system said to every request."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.asked: list[tuple[int, int]] = []

    def madvise(self, start: int, length: int, advice: int) -> int:
        answer = libc().madvise(start, length, advice)
        self.answers.append(answer)
        self.asked.append((start, start + length))
        return int(answer)


def test_arrays_go_into_large_pages_and_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, system = graph_with(MANY), Recording()
    x = graph.node_arrays["x"]
    before = x.clone()
    if not maps_under(x):
        pytest.skip("this system does not tell what is in memory")
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    left = [enlarge_pages(graph)]
    while left[-1]:
        left.append(enlarge_pages(graph))
    assert torch.equal(x, before)
    if any(system.answers):
        pytest.skip("this system has no large pages to give, or not now")
    assert left == list(range(len(left) - 1, -1, -1)) and len(left) >= 2
    assert all(stop == start for (_, stop), (start, _) in pairwise(system.asked))
    first, last = system.asked[0][0] - x.data_ptr(), x.data_ptr() + MANY - system.asked[-1][1]
    assert 0 <= first < PAGE_BYTES and 0 <= last < PAGE_BYTES
    assert bytes_in_large_pages(x) > 0.5 * MANY  # the system may have divided some again


def test_what_is_mapped_from_files_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_with(MANY).save(tmp_path / "graph")
    system = Refusing(errno.EINVAL)
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    assert enlarge_pages(Graph.open(tmp_path / "graph")) == 0
    assert system.calls == 0


def test_what_processes_share_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(MANY)
    for array in (graph.indptr, graph.node_arrays["x"]):
        array.share_memory_()
    system = Refusing(errno.EINVAL)
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    assert enlarge_pages(graph) == 0
    assert system.calls == 0


@pytest.mark.parametrize(("number", "calls"), [(errno.EINVAL, 1), (errno.ENOMEM, 1), (errno.EAGAIN, 3)])
def test_a_system_without_large_pages_is_not_asked_again(
    number: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, system = graph_with(2 * MANY), Refusing(number)
    if not maps_under(graph.node_arrays["x"]):
        pytest.skip("this system does not tell what is in memory")
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    for _ in range(3):
        enlarge_pages(graph)
    assert system.calls == calls


def test_small_graphs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Refusing(errno.EINVAL)
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    assert enlarge_pages(graph_with(1 << 12)) == 0
    assert system.calls == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_nothing_more_is_done_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, system = graph_with(2 * MANY), Refusing(errno.EAGAIN)
    if not maps_under(graph.node_arrays["x"]):
        pytest.skip("this system does not tell what is in memory")
    monkeypatch.setattr(large_pages, "libc", lambda: system)
    assert enlarge_pages(graph) > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
        child = os.fork()
    if child == 0:
        os._exit(enlarge_pages(graph))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert enlarge_pages(graph) == 0
    assert system.calls == 1
