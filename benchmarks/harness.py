"""What benchmarks share: the machine that they ran on, runs kept in a file, and memory as Linux counts it."""

from __future__ import annotations

import json
import os
import platform
import threading
from pathlib import Path
from typing import Any


def machine() -> str:
    """The processor, its cores, the memory, and how busy all of it is: the first line that a benchmark prints."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")] or [platform.machine()]
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model[0]}, {os.cpu_count()} cores, {gigabytes:.0f} GB; load {os.getloadavg()[0]:.1f}"


def keep(file: Path | None, run: dict[str, Any]) -> None:
    """Append a run to the file of ``--out``, if there is one, as a line of JSON."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(run) + "\n")


def held(kind: str) -> int:
    """Bytes of a kind of /proc/self/status: RssAnon (without files), VmRSS, VmHWM (its peak), VmData, VmSize."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[kind].split()[0]) * 1024


class Peak:
    """The most memory of a kind that this process held, beyond what it had when it began to look."""

    def __init__(self, kind: str) -> None:
        self._kind, self._before, self._most = kind, held(kind), 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(0.01):
            self._most = max(self._most, held(self._kind) - self._before)

    def stop(self) -> int:
        """Bytes."""
        self._stopped.set()
        self._thread.join()
        return self._most
