"""Switches a rank from part to part: the next one is read while the current one trains."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from torch import Tensor

from lightning_gnn_dist.batches.loader import THREAD_NAME
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.part_reader import Part, PartReader

log = logging.getLogger(__name__)


class PartSwitcher:
    """Holds the part of the running super-epoch, and reads the next one in the background if parts change.

    Args:
        reader: Reads the parts.
        in_background: Whether a thread reads ahead. Without it, a part is read when it is due.
    """

    def __init__(self, reader: PartReader, *, in_background: bool) -> None:
        self._reader = reader
        self._changes = reader.holding.residency.sweep(reader.world_size) > 1
        self._thread = ThreadPoolExecutor(1, f"{THREAD_NAME}.parts") if in_background and self._changes else None
        self._current: tuple[int, Part] | None = None
        self._next: tuple[int, Future[Part]] | None = None
        self.switches = 0
        self.bytes_read = 0
        self.waited_seconds = 0.0
        self.coverage: float | None = None  # the mean over the seeds of the running part

    def at(self, super_epoch: int) -> Graph:
        """Return the part of a super-epoch, and forget the part before."""
        super_epoch = super_epoch if self._changes else 0
        if self._current is None or self._current[0] != super_epoch:
            started = time.perf_counter()
            part = self._take(super_epoch)
            self._record(super_epoch, part, time.perf_counter() - started)
            self._current = super_epoch, part if self._changes else replace(part, rows=None)
            self._read_ahead(super_epoch + 1, part)
        return self._current[1].graph

    def current(self) -> Graph:
        """Return the part that was asked for last, and at first the part of super-epoch 0."""
        return self.at(self._current[0] if self._current else 0)

    @property
    def is_resident(self) -> Tensor:
        """Which nodes of the running part the boundary did not add."""
        self.current()
        assert self._current is not None
        return self._current[1].is_resident

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: what switching parts cost, and the coverage of the running part."""
        figures = {
            "data/switches": float(self.switches),
            "data/switch_bytes": float(self.bytes_read),
            "data/switch_waited_seconds": self.waited_seconds,
        }
        return figures if self.coverage is None else figures | {"data/coverage": self.coverage}

    def close(self) -> None:
        """End what runs in the background."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._next = self._current = None

    def _take(self, super_epoch: int) -> Part:
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == super_epoch:
            return ahead[1].result()
        return self._reader.read(super_epoch, self._current[1] if self._current else None)

    def _read_ahead(self, super_epoch: int, part: Part) -> None:
        if self._thread is not None:
            self._next = super_epoch, self._thread.submit(self._reader.read, super_epoch, part)

    def _record(self, super_epoch: int, part: Part, waited: float) -> None:
        self.switches += self._current is not None
        self.bytes_read += part.bytes_read
        self.waited_seconds += waited
        if "coverage" in part.graph.node_arrays:
            self.coverage = float(part.graph.node_arrays["coverage"][part.graph.split("train")].mean())
        log.info(
            "Super-epoch %d: %d nodes, %d edges; read %.1f MB in %.2f s, of which training waited %.2f s",
            super_epoch,
            part.graph.num_nodes,
            part.graph.num_edges,
            part.bytes_read / 1e6,
            part.seconds,
            waited,
        )
