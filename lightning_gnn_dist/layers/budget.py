"""How much memory an evaluation may take: what the user allows, as far as the machine has it, and so how large a batch
may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from lightning_gnn_dist.wire.memory import free_bytes, free_on, held_bytes, peak_bytes, ranks_here, reset_peak

DEFAULT_BYTES = 4 << 30
LEAST_BYTES = 16 << 20  # with less, a sampler's table of nodes would leave no room for a batch
_FIRST = 4  # the first batch takes this part of what others may
_MEASURABLE = 4 << 20  # bytes; what smaller batches take is lost in what an allocator keeps
_LEAST_FACTOR = 0.1


class Host(NamedTuple):
    """What a host has.

    Attributes:
        free: Bytes that its processes may take beside what they hold, as the system or a control group allows.
        ranks: How many ranks run on it.
    """

    free: int
    ranks: int

    @classmethod
    def here(cls, num_ranks: int) -> Host:
        """Return what this host has, if so many ranks train."""
        return cls(free_bytes(), ranks_here(num_ranks))


def budget(wanted: int | None, device: torch.device, host: Host) -> int:
    """Return the bytes that a rank may take: ``wanted``, halved until it is at most half of a rank's share of what is
    free.

    Args:
        wanted: The bytes that the user allows. Default: 4 GiB.
        device: The device that computes.
        host: Whose memory the ranks share.
    """
    free = host.free // host.ranks
    if device.type == "cuda":
        free = min(free, free_on(device))
    return _halved(DEFAULT_BYTES if wanted is None else wanted, free)


def bytes_there(wanted: int | None, device: torch.device) -> int:
    """Return the bytes of its own memory that a device may be asked for: ``wanted``, halved until it is at most half of
    what is free there now. By default it is that half; of a device without memory of its own, 0.
    """
    if device.type != "cuda":
        return 0
    free = free_on(device)
    return _halved(free // 2 if wanted is None else wanted, free)


def _halved(allowed: int, free: int) -> int:
    while allowed > max(free // 2, LEAST_BYTES):
        allowed //= 2
    return max(allowed, LEAST_BYTES)


class Memory(Protocol):
    """A memory of which it is known how much is held."""

    def held(self) -> int | None:
        """The bytes that are held; None where nobody says it."""
        ...

    def peak(self) -> int | None:
        """The most bytes that have been held since :meth:`reset_peak`; None where nobody says it."""
        ...

    def reset_peak(self) -> bool:
        """Count the peak from now on. False where that is not possible."""
        ...


class _Ram:
    def held(self) -> int | None:
        return held_bytes()

    def peak(self) -> int | None:
        return peak_bytes()

    def reset_peak(self) -> bool:
        return reset_peak()


RAM: Memory = _Ram()


class OnDevice:
    """What tensors take on a CUDA device, launched or done: to ask for it, nobody waits for the device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int | None:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self._device)
        return True


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


class Forecasts:
    """Forecasts for several memories, of which a batch takes something each.

    Args:
        of_memories: One for each.
    """

    def __init__(self, of_memories: Sequence[Forecast]) -> None:
        self._of_memories = of_memories

    @property
    def allowed(self) -> float:
        """The bytes that may be foreseen for the next batch."""
        return min(each.allowed for each in self._of_memories)

    def begin(self) -> None:
        """Note that a batch begins."""
        for each in self._of_memories:
            each.begin()

    def end(self, foreseen: float, held_by_tables: Sequence[int]) -> None:
        """Note what a batch was foreseen to take, and how many bytes tables of rows take in each memory beside it."""
        for each, held in zip(self._of_memories, held_by_tables, strict=False):
            each.end(foreseen, held)

    def was_too_much(self, foreseen: float) -> None:
        """Note that some memory was short for a batch: from now on, half of it is the most."""
        for each in self._of_memories:
            each.was_too_much(foreseen)
