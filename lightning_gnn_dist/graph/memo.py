"""What is found out about a graph once, and kept for as long as somebody holds the graph."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _Memory:
    """The lock lets one thread at a time find out, so that no two do the same work."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # what is found out may need something else of the same graph
        self.known: dict[Hashable, Any] = {}


_MEMORIES: weakref.WeakKeyDictionary[object, _Memory] = weakref.WeakKeyDictionary()


def remembered(graph: object, key: Hashable, find: Callable[[], T]) -> T:
    """What ``find`` returned for this graph and this key, at the first call. It must not refer to the graph."""
    memory = _memory_of(graph)
    if key not in memory.known:
        with memory.lock:
            if key not in memory.known:
                memory.known[key] = find()
    found: T = memory.known[key]
    return found


@contextmanager
def memory_of(graph: object) -> Iterator[dict[Hashable, Any]]:
    """All that is known of a graph, for what is not kept for good. No other thread looks at the same time."""
    memory = _memory_of(graph)
    with memory.lock:
        yield memory.known


def of_all_graphs(key: Hashable) -> list[Any]:
    """What is known under this key, of every graph that has it."""
    memories = list(_MEMORIES.values())
    return [memory.known[key] for memory in memories if key in memory.known]


def _memory_of(graph: object) -> _Memory:
    memory = _MEMORIES.get(graph)  # without making a lock each time
    return _MEMORIES.setdefault(graph, _Memory()) if memory is None else memory


def _unlock() -> None:
    for memory in list(_MEMORIES.values()):
        memory.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # the thread that held a lock is not in the child
    os.register_at_fork(after_in_child=_unlock)
