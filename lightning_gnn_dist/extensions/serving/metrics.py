"""Numbers about a server in the text format that Prometheus reads (version 0.0.4)."""

from __future__ import annotations

import os
import resource
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

PREFIX = "lightning_gnn_dist"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOGETHER = (1, 2, 4, 8, 16, 32, 64)
_STATM = Path("/proc/self/statm")


class Histogram:
    """Counts values up to some bounds.

    Args:
        bounds: The bounds, increasing.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of the histogram."""
        counts = list(accumulate(self._counts))
        for bound, count in zip([*map(str, self._bounds), "+Inf"], counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {counts[-1]}"


class Metrics:
    """What a server counts.

    Attributes:
        answers: How many requests were answered with each status.
        nodes: For how many nodes a row was sent.
        seconds: How long requests took that were answered with a row.
        together: How many requests were answered together.
    """

    def __init__(self) -> None:
        self._start = time.time()
        self.answers, self.nodes = Counter[int](), 0
        self.seconds, self.together = Histogram(SECONDS), Histogram(TOGETHER)

    def text(self, waiting: int) -> str:
        """Return all numbers, also of so many requests that wait."""
        return "".join(f"{line}\n" for line in self._lines(waiting))

    def _lines(self, waiting: int) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests to /predict, by the status of the answer.")
        for status, count in sorted(self.answers.items()):
            yield f'{PREFIX}_requests_total{{status="{status}"}} {count}'
        yield from _single("nodes_total", "counter", "Nodes for which a row was sent.", self.nodes)
        yield from _single("waiting", "gauge", "Requests that wait to be computed.", waiting)
        yield from _head("request_seconds", "histogram", "Seconds that requests took that were answered with rows.")
        yield from self.seconds.lines(f"{PREFIX}_request_seconds")
        yield from _head("requests_together", "histogram", "Requests that were computed together.")
        yield from self.together.lines(f"{PREFIX}_requests_together")
        yield from _single("cpu_seconds_total", "counter", "CPU seconds of the process.", time.process_time())
        yield from _single("resident_bytes", "gauge", "Memory of the process.", resident_bytes())
        yield from _single("start_time_seconds", "gauge", "When the server began, since 1970.", self._start)


def resident_bytes() -> int:
    """Return the memory that this process has now; where the system does not tell, the most that it had."""
    if _STATM.is_file():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _head(name: str, kind: str, about: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}_{name} {about}"
    yield f"# TYPE {PREFIX}_{name} {kind}"


def _single(name: str, kind: str, about: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, about)
    yield f"{PREFIX}_{name} {value}"
