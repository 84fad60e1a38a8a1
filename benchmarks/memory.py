"""What a benchmark's process holds in memory, as Linux counts it, and the most that it held."""

from __future__ import annotations

import threading
from pathlib import Path


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
