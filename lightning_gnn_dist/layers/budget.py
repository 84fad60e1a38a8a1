"""How much memory an evaluation may take: what the user allows, as far as the machine has it, and so how large a batch
may be.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_gnn_dist.joint import TrainsReplicasApart
from lightning_gnn_dist.wire.collectives import check_group, gather_numbers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

DEFAULT_BYTES = 4 << 30
LEAST_BYTES = 16 << 20  # with less, a sampler's table of nodes would leave no room for a batch
_FIRST = 4  # the first batch takes this part of what others may
_MEASURABLE = 4 << 20  # bytes; what smaller batches take is lost in what an allocator keeps
_LEAST_FACTOR = 0.1
_GROUPS = (("memory.max", "anon"), ("memory/memory.limit_in_bytes", "total_rss"))  # of cgroups, version 2 and 1


def agreed_budget(wanted: int | None, device: torch.device, trainer: Trainer | None) -> int:
    """Return the bytes that each rank of a trainer may take, as many as the one that may take least. Collective."""
    num_ranks = 1 if trainer is None else trainer.world_size
    if trainer is not None and not isinstance(trainer.strategy, TrainsReplicasApart):
        check_group(num_ranks)  # elastic ranks are groups of their own
    own = budget(wanted, device, ranks_here(num_ranks))
    of_ranks = gather_numbers([own], device) if num_ranks > 1 else [[own]]
    return min(of_ranks)[0]


def budget(wanted: int | None, device: torch.device, num_sharers: int) -> int:
    """Return the bytes that a rank may take: ``wanted``, halved until it is at most half of a rank's share of what is
    free.

    Args:
        wanted: The bytes that the user allows. Default: 4 GiB.
        device: The device that computes.
        num_sharers: How many ranks of this host share the memory.
    """
    free = free_bytes() // num_sharers
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info(device)[0])
    allowed = DEFAULT_BYTES if wanted is None else wanted
    while allowed > max(free // 2, LEAST_BYTES):
        allowed //= 2
    return max(allowed, LEAST_BYTES)


def free_bytes() -> int:
    """Return the bytes of RAM that are free for this process; a very large number where the system does not say."""
    found = [1 << 62]
    info = Path("/proc/meminfo")
    if info.exists():
        lines = dict(line.split(":") for line in info.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    for name, used in _GROUPS:
        limit = Path("/sys/fs/cgroup") / name
        stat = limit.with_name("memory.stat")
        if limit.exists() and stat.exists() and (most := limit.read_text().strip()).isdigit():
            found.append(int(most) - int(dict(line.split() for line in stat.read_text().splitlines()).get(used, 0)))
    return max(0, min(found))


def ranks_here(num_ranks: int) -> int:
    """Return how many of the ranks run on this host, as their launcher says; all of them if it does not."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and 0 < int(local) <= num_ranks else num_ranks


def peak_bytes() -> int | None:
    """Return the most memory that this process has held since :func:`reset_peak`; None where no system says it."""
    return _status("VmHWM")


def held_bytes() -> int | None:
    """Return the memory that this process holds; None where no system says it."""
    return _status("VmRSS")


def _status(kind: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines[kind].split()[0]) << 10 if kind in lines else None


def reset_peak() -> bool:
    """Let :func:`peak_bytes` count from now on. False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class Forecast:
    """Learns how many bytes a batch takes for each byte that was foreseen for it.

    A batch took at least what the process has grown by since the batch began, and at most what it has grown by since
    the work began: an allocator keeps much of what is freed, and uses it again. So a small batch after large ones tells
    little, and one with which the process holds more than ever before, and more than it may, was too large.

    Args:
        most_bytes: Bytes that a batch may take.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most, self._factor, self._is_first = most_bytes, 1.0, True
        self._base, self._highest = held_bytes(), 0

    @property
    def allowed(self) -> float:
        """The bytes that may be foreseen for the next batch."""
        return self._most / self._factor / (_FIRST if self._is_first else 1)

    def begin(self) -> None:
        """Note that a batch begins."""
        self._before = held_bytes() if reset_peak() else None

    def end(self, foreseen: float, held_by_tables: int) -> None:
        """Note what a batch was foreseen to take, and how many bytes tables of rows take beside it."""
        self._is_first = False
        peak = peak_bytes()
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
