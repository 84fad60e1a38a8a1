"""Results that are computed once per graph, and kept as long as the graph is."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Memory:
    """The results of one graph by key. The lock lets one thread at a time compute, so that no work is done twice."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # computing one result may ask for another of the same graph
        self.known: dict[Hashable, Any] = {}


class _Made(NamedTuple):
    """A result, and the arrays that it was made of, with the numbers of changes that they had seen."""

    arrays: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    result: Any

    def is_of(self, arrays: tuple[Tensor | None, ...], versions: tuple[int, ...]) -> bool:
        same = len(arrays) == len(self.arrays) and all(map(operator.is_, arrays, self.arrays))
        return same and versions == self.versions


_MEMORIES: weakref.WeakKeyDictionary[object, _Memory] = weakref.WeakKeyDictionary()


def remembered(graph: object, key: Hashable, find: Callable[[], T]) -> T:
    """Return ``find()``, called once per graph and key. If its result referred to the graph, neither would be freed."""
    memory = _memory_of(graph)
    if key not in memory.known:
        with memory.lock:
            if key not in memory.known:
                memory.known[key] = find()
    found: T = memory.known[key]
    return found


def remembered_of(graph: object, key: Hashable, arrays: Sequence[Tensor | None], find: Callable[[], T]) -> T:
    """As :func:`remembered`, but find again once one of ``arrays`` is another one, or torch has written to it."""
    memory, of = _memory_of(graph), tuple(arrays)
    versions = tuple(0 if array is None or array.is_inference() else array._version for array in of)
    made = memory.known.get(key)
    if made is None or not made.is_of(of, versions):
        with memory.lock:
            made = memory.known.get(key)
            if made is None or not made.is_of(of, versions):
                made = memory.known[key] = _Made(of, versions, find())
    found: T = made.result
    return found


@contextmanager
def memory_of(graph: object) -> Iterator[dict[Hashable, Any]]:
    """The dict of a graph's results, for callers that also remove some. Other threads wait until the block ends."""
    memory = _memory_of(graph)
    with memory.lock:
        yield memory.known


def of_all_graphs(key: Hashable) -> list[Any]:
    """The results under this key, of all graphs that have one."""
    memories = list(_MEMORIES.values())
    return [memory.known[key] for memory in memories if key in memory.known]


def _memory_of(graph: object) -> _Memory:
    memory = _MEMORIES.get(graph)  # without making a new lock on every call
    return _MEMORIES.setdefault(graph, _Memory()) if memory is None else memory


def _unlock() -> None:
    for memory in list(_MEMORIES.values()):
        memory.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a lock may be held by a thread that the child does not have
    os.register_at_fork(after_in_child=_unlock)
