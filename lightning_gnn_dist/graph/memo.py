"""Results that are computed once per graph, and kept as long as the graph is."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Memory:
    """The results of one graph by key. The lock lets one thread at a time compute, so that no work is done twice."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # computing one result may ask for another of the same graph
        self.known: dict[Hashable, Any] = {}


_MEMORIES: weakref.WeakKeyDictionary[object, _Memory] = weakref.WeakKeyDictionary()


def remembered(graph: object, key: Hashable, find: Callable[[], T], arrays: Sequence[Tensor | None] = ()) -> T:
    """Return ``find()``, called once per graph and key. If its result referred to the graph, neither would be freed.

    It is called again once one of ``arrays`` is another one, or torch has written to it.
    """
    memory = _memory_of(graph)
    of = [(array, 0 if array is None or array.is_inference() else array._version) for array in arrays]
    if not _is_of(memory.known.get(key), of):
        with memory.lock:
            if not _is_of(memory.known.get(key), of):
                memory.known[key] = of, find()
    found: T = memory.known[key][1]
    return found


def _is_of(made: tuple[list[Any], Any] | None, of: list[Any]) -> bool:
    """Whether a result is there, and was made of the same arrays, after as many changes of each."""
    if made is None or len(made[0]) != len(of):
        return False
    return all(one is other and seen == now for (one, seen), (other, now) in zip(made[0], of, strict=True))


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
