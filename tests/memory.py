"""What this process holds in memory, as Linux counts it, and the most that it held while something ran."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Literal

import numpy as np
import pytest
import torch

from lightning_gnn_dist.graph.storage.mapped import MappedRows

STATUS = Path("/proc/self/status")
M_MMAP_THRESHOLD = -3  # of malloc.h: pieces that large are maps of their own
Kind = Literal["RssAnon", "RssFile", "VmRSS"]  # of this process alone; pages of mapped files; both

reads_memory = pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's /proc")


def resident_bytes(kind: Kind) -> int:
    status = dict(line.split(":") for line in STATUS.read_text().splitlines())
    return int(status[kind].split()[0]) * 1024


def give_back_at_once() -> None:
    """From here on, what this process frees goes back to the system.

    By itself an allocator keeps it for what comes: which of it depends on how pieces happen to lie, and is up to as
    much again as the process needs, another number in every run.
    """
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1
    compile_reader()


def compile_reader() -> None:
    """Compile what reads rows of files, as each process does: the compiler's own pages are 26 MB, and no test's."""
    with TemporaryDirectory() as folder:
        np.save(file := Path(folder, "rows.npy"), np.zeros((1 << 14, 2)))
        MappedRows(torch.from_numpy(np.load(file, mmap_mode="r+"))).take(torch.zeros(1, dtype=torch.int64))


class Peak:
    """Looks every few milliseconds while its block runs: `added_bytes` is the most, beyond what there was before."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self._ended = kind, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.added_bytes = 0

    def __enter__(self) -> Peak:
        self._before = resident_bytes(self._kind)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self.added_bytes = max(self.added_bytes, resident_bytes(self._kind) - self._before)
