"""What memory a device has for a pass, and how large a batch may be, as batches before it have shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from lightning_gnn_dist.homes.run import halved
from lightning_gnn_dist.wire.memory import free_on, held_bytes, peak_bytes, reset_peak

_FIRST = 4  # the first batch takes this part of what others may
_MEASURABLE = 4 << 20  # bytes; what smaller batches take is lost in what an allocator keeps
_LEAST_FACTOR = 0.1


def bytes_there(wanted: int | None, device: torch.device) -> int:
    """Return the bytes of its own memory that a device may be asked for: ``wanted``, halved until it is at most half of
    what is free there now. By default it is that half; of a device without memory of its own, 0.
    """
    if device.type != "cuda":
        return 0
    free = free_on(device)
    return halved(free // 2 if wanted is None else wanted, free)


class Memory(NamedTuple):
    """A memory of which it is known how much is held.

    Attributes:
        held: Returns the bytes that are held; None where nobody says it.
        peak: Returns the most that have been held since ``reset_peak``; None where nobody says it.
        reset_peak: Counts the peak from now on. False where that is not possible.
    """

    held: Callable[[], int | None]
    peak: Callable[[], int | None]
    reset_peak: Callable[[], bool]

    @classmethod
    def of_device(cls, device: torch.device) -> Memory:
        """Return that of a CUDA device: what tensors take, launched or done, so that nobody waits for the device."""
        held, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        reset = torch.cuda.reset_peak_memory_stats
        return cls(partial(held, device), partial(peak, device), lambda: reset(device) is None)


RAM = Memory(held_bytes, peak_bytes, reset_peak)


class Forecast:
    """Learns how many bytes a batch takes for each byte that was foreseen for it.

    A batch took at least what the process has grown by since the batch began, and at most what it has grown by since
    the work began: an allocator keeps much of what is freed, and uses it again. So a small batch after large ones tells
    little, and one with which the process holds more than ever before, and more than it may, was too large.

    Args:
        most_bytes: Bytes that a batch may take.
        memory: Where it takes them.
    """

    def __init__(self, most_bytes: float, memory: Memory = RAM) -> None:
        self._most, self._factor, self._is_first = most_bytes, 1.0, True
        self._memory, self._base, self._highest = memory, memory.held(), 0

    @property
    def allowed(self) -> float:
        """The bytes that may be foreseen for the next batch."""
        return self._most / self._factor / (_FIRST if self._is_first else 1)

    def begin(self) -> None:
        """Note that a batch begins."""
        self._before = self._memory.held() if self._memory.reset_peak() else None

    def end(self, foreseen: float, held_by_tables: int) -> None:
        """Note what a batch was foreseen to take, and how many bytes tables of rows take beside it."""
        self._is_first = False
        peak = self._memory.peak()
        if peak is not None and self._base is not None and self._before is not None and foreseen > _MEASURABLE:
            least, most = peak - self._before, peak - self._base - held_by_tables
            fitting = min(max(self._factor, least / foreseen), most / foreseen)
            if most > max(self._most, self._highest):
                fitting = max(fitting, self._factor * most / self._most)
            self._highest = max(self._highest, most)
            self._factor = max(fitting, self._factor / 2, _LEAST_FACTOR)  # so batches grow step by step

    def was_too_much(self, foreseen: float) -> None:
        """Note that memory was short for a batch: from now on, half of it is the most."""
        self._most = min(self._most, foreseen * self._factor) / 2
