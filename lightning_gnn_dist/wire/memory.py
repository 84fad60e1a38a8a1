"""How much memory a host or a device has, how much of it is free, and how much this process holds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

_ROOT, _OWN, _STATUS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), "/proc/self/status"
_GROUPS = {  # limits, and what counts that the system cannot take back: of version 2, then of version 1
    "": (("memory.max", "memory.high"), ("anon", "shmem")),
    "memory": (("memory.limit_in_bytes",), ("total_rss", "total_shmem")),
}


def free_bytes() -> int:
    """Return the bytes of RAM that are free for this process; a very large number where the system does not say."""
    return _least("MemAvailable", is_used=True)


def memory_bytes() -> int:
    """Return the bytes of RAM that this process might have if no other took any, the same from run to run."""
    return _least("MemTotal", is_used=False)


def _least(of_system: str, *, is_used: bool) -> int:
    said = _entry("/proc/meminfo", of_system)
    found = [1 << 62 if said is None else said]
    for folder, names, counted in _groups():
        limits = [(folder / name).read_text().strip() for name in names if (folder / name).exists()]
        if (folder / "memory.stat").exists() and (most := [int(limit) for limit in limits if limit.isdigit()]):
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            found.append(min(most) - is_used * sum(int(stat.get(name, 0)) for name in counted))
    return max(0, min(found))


def _groups() -> Iterator[tuple[Path, Sequence[str], Sequence[str]]]:
    """Yield the folder of each group of processes that may limit this one, the files of its limits, what it counts."""
    for line in _OWN.read_text().splitlines() if _OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in _GROUPS:
            root = _ROOT / controllers
            inner = root / path.strip("/")
            around = (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))
            yield from ((folder, *_GROUPS[controllers]) for folder in around)


def ranks_here(num_ranks: int) -> int:
    """Return how many of the ranks run on this host, as their launcher says; all of them if it does not."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() and 0 < int(local) <= num_ranks else num_ranks


def peak_bytes() -> int | None:
    """Return the most memory that this process has held since :func:`reset_peak`; None where no system says it."""
    return _entry(_STATUS, "VmHWM")


def held_bytes() -> int | None:
    """Return the memory that this process holds; None where no system says it."""
    return _entry(_STATUS, "VmRSS")


def own_bytes() -> int | None:
    """Return the memory that is this process's alone, no page of a file; None where no system says it."""
    return _entry(_STATUS, "RssAnon")


def _entry(path: str, name: str) -> int | None:
    """Return the bytes of a line "name: 5 kB" in a file of the system; None where it has none."""
    if not Path(path).exists():
        return None
    lines = dict(line.split(":", 1) for line in Path(path).read_text().splitlines())
    return int(lines[name].split()[0]) << 10 if name in lines else None


def reset_peak() -> bool:
    """Let :func:`peak_bytes` count from now on. False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def free_on(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are free, including those that torch has reserved and does not use."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept
