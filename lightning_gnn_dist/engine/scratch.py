"""Working memory of the sampling kernels, one for each thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gnn_dist.engine.intrinsics import RUN
from lightning_gnn_dist.engine.kernels import AT_ONCE, Array, Table, Work

DIRECT_NODES = 1 << 21  # a graph of up to so many nodes gets a table with a slot for every node
ENTRY_LIMIT = 1 << 32  # entries of the table are uint32

_THREAD = threading.local()


class Scratch:
    """Arrays that a thread uses again for every batch: new ones would take as long as the sampling.

    The table's ``epoch`` grows with every batch, so no batch has to clear what earlier ones wrote. A graph
    of up to ``DIRECT_NODES`` nodes has a slot for every node: 4 bytes a node, at most 8 MiB a thread. A larger
    graph, perhaps one of 10**9 nodes behind a memory map, gets a hash table: 6 to 15 bytes for every edge of
    a batch, whatever the size of the graph. Measured, direct and hashed, in ns per edge: 14 and 19 with 1M nodes,
    29 and 26 with 4M, 40 and 25 with 16M, where the direct table no longer fits the caches. The other arrays
    take about 50 bytes for every edge of the largest batch so far.
    """

    def __init__(self, dtype: npt.DTypeLike, kinds: npt.DTypeLike) -> None:
        self.dtype, self.kinds = np.dtype(dtype), np.dtype(kinds)
        self.reserve(1 << 14)
        self._entries: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._epoch = 1

    def reserve(self, entries: int) -> None:
        """Make room for a batch of ``entries`` seeds and edges, and a quarter more."""
        size = entries + entries // 4
        longs: list[Array] = [np.empty(size + AT_ONCE, np.int64) for _ in range(4)]  # starts have one more
        starts, positions, first, degree = longs
        nodes, columns = np.empty(size, self.dtype), np.empty(size, self.dtype)
        weights, kinds = np.empty(size, np.float32), np.empty(size + RUN, self.kinds)
        self.work = Work(nodes, starts, positions[:size], columns, first, degree, weights, kinds)

    @property
    def capacity(self) -> int:
        return len(self.work.positions)

    def open_table(self, num_nodes: int, times: int) -> Table:
        """A table without valid entries, for a batch of a graph with ``num_nodes`` nodes.

        A kernel may open it ``times`` times, each time with an epoch that is greater by :attr:`capacity`.
        """
        # At least a third of the hash table stays free, even if every edge of the batch leads to another node.
        bits = 0 if num_nodes <= DIRECT_NODES else (self.capacity + self.capacity // 2).bit_length()
        slots = 1 << bits if bits else num_nodes
        if self._entries.size < slots or self._epoch + (times + 1) * self.capacity >= ENTRY_LIMIT:
            self._entries = np.zeros(max(slots, self._entries.size), np.uint32)
            self._epoch = 1
        epoch = self._epoch
        self._epoch += times * self.capacity
        return Table(self._entries[:slots], 64 - bits if bits else 0, epoch)


def scratch_of_thread(dtype: npt.DTypeLike, kinds: npt.DTypeLike = np.uint8) -> Scratch:
    """The calling thread's own scratch for graphs whose ``indices``, and numbers of edge types, have these types."""
    mine: dict[Any, Scratch] = _THREAD.__dict__
    name = f"{np.dtype(dtype).name} {np.dtype(kinds).name}"
    if name not in mine:
        mine[name] = Scratch(dtype, kinds)
    return mine[name]
