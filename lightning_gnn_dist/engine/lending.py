"""Memory that is lent and comes back by itself, page-locked for copies to a device that the host does not wait for."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

LEAST_BYTES = 1 << 12  # a page


class Event(Protocol):
    """What a stream records behind a copy."""

    def query(self) -> bool:
        """Whether the copy is done."""
        ...


def lent(buffer: Bytes, view: Bytes, free: deque[Bytes]) -> Tensor:
    """A tensor on a view of a buffer, which is free again when no tensor shares its memory any more.

    Buffers come back from whichever thread drops the last tensor, even in the middle of a garbage collection, where a
    lock could already be held. A deque's append and pop are atomic.
    """
    # Each loan has a view object of its own. torch.from_numpy() keeps it alive for as long as any
    # tensor shares the memory, so the end of the view is the end of the loan.
    weakref.finalize(view, _give_back, weakref.ref(free), buffer).atexit = False
    return torch.from_numpy(view)


def _give_back(free: weakref.ref[deque[Bytes]], buffer: Bytes) -> None:
    """Put a buffer back into its pool, unless the pool is gone: a loan does not keep it alive."""
    waiting = free()
    if waiting is not None:
        waiting.append(buffer)


class PinnedPool:
    """Lends page-locked memory, in pieces of powers of two, and keeps it: the system takes long to lock new pages.

    What a device copies from must stay as it is until the copy is done, so it is held here until then.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[Bytes]] = defaultdict(deque)
        self._held: deque[tuple[Event, Any]] = deque()

    def take(self, num_bytes: int) -> Tensor:
        """``num_bytes`` bytes, uint8, not initialised."""
        self._drop_copied()
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        for free in (self._free[size], self._free[2 * size]):
            try:
                buffer = free.pop()
            except IndexError:
                continue
            return lent(buffer, buffer[:num_bytes], free)
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return lent(buffer, buffer[:num_bytes], self._free[size])

    def copied(self, array: Tensor) -> Tensor:
        """The array in page-locked memory; itself, if it is there or on a device, or has nothing to copy."""
        if array.is_cuda or array.is_pinned() or not array.numel():
            return array
        return self.take(array.nbytes).view(array.dtype).view(array.shape).copy_(array)

    def hold(self, held: Any, event: Event) -> None:
        """Keep what holds lent memory until an event behind all copies from it."""
        self._held.append((event, held))

    def _drop_copied(self) -> None:
        for _ in range(len(self._held)):
            try:
                held = self._held.popleft()
            except IndexError:  # another thread was faster
                return
            if not held[0].query():
                self._held.append(held)


@cache
def pinned_pool() -> PinnedPool:
    """The pool of this process."""
    return PinnedPool()


def sent(array: Tensor, device: torch.device) -> Tensor:
    """The array on a device, in the order of the current stream. The array in RAM may be changed at once."""
    if device.type != "cuda" or array.is_cuda:
        return array.to(device)
    pool = pinned_pool()
    source = pool.copied(array)
    copy = source.to(device, non_blocking=True)
    pool.hold(source, torch.cuda.current_stream(device).record_event())
    return copy
