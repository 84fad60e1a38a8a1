r"""KaMinPar: deep multilevel graph partitioning (Gottesbüren et al., ESA 2021, arXiv:2105.02022).

.. math::
    \min_{\pi} \; \bigl|\{ \{u, v\} \in E : \pi(u) \ne \pi(v) \}\bigr|
    \qquad\text{such that}\qquad
    \sum_{v : \pi(v) = p} w_v \;\le\; (1 + \epsilon) \, \frac{1}{P} \sum_v w_v \quad\text{for every part } p
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from lightning_gnn_dist.checks import check_fields, within
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.npy import FULL
from lightning_gnn_dist.partition.base import MAX_SHARE, Partition, check_request
from lightning_gnn_dist.partition.kernels import Array
from lightning_gnn_dist.partition.multilevel import Balance, groups, refuse_beyond, repair, undirected

try:
    import kaminpar
except ImportError:  # an extra
    kaminpar = None  # type: ignore[assignment]

WAY_TO_KAMINPAR = 'pip install "lightning-gnn-dist[kaminpar]"'
BYTES_PER_EDGE = 25  # of RAM, at most, with parts few beside nodes: benchmarks/partitioners.md
_LIMIT, _LEAST = 2**31 - 1, 0.001  # of what it counts, and of the imbalance that it takes
_VERSION = 1 | 2 | 8  # of a ParHIP file: without weights of edges and of nodes, with ids of 32 bits


@dataclass(frozen=True)
class KaMinParPartitioner:
    r"""Few cut edges, for graphs too large for METIS: as few as it, in half the time and a quarter of the memory.

    KaMinPar sees the graph without directions, self loops and duplicate edges. It reads it from a file of 4 bytes
    for each direction of an edge, which is written beside a saved graph, or in the system's folder of temporary files,
    and deleted afterwards. One thread computes, so that the same seed gives the same parts everywhere.

    Args:
        balance: What parts hold equally many of: ``"nodes"``, or with ``"train"`` training nodes *and* nodes, in a
            graph with types of each type, by a last pass as in :class:`MetisPartitioner`.
        imbalance: The share :math:`\epsilon` by which a part may exceed the average, rounded down to whole nodes.
    """

    balance: Balance = "nodes"
    imbalance: Annotated[float, within(0, MAX_SHARE, "0.03 lets a part hold 3% more than the average")] = 0.03

    def __post_init__(self) -> None:
        if not is_available():
            raise ValueError(
                f"KaMinParPartitioner() needs KaMinPar, which is not installed: {WAY_TO_KAMINPAR}; or take "
                "StreamingPartitioner(), which needs nothing."
            )
        check_fields(self)

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        shared = groups(graph, num_parts, self.balance)
        if num_parts == 1:
            return Partition(torch.zeros(graph.num_nodes, dtype=torch.int32), 1)
        place = graph.path.parent if graph.path is not None and os.access(graph.path.parent, os.W_OK) else None
        try:
            with tempfile.TemporaryDirectory(dir=place, prefix=".kaminpar-") as folder:
                assignment = self._cut(graph, Path(folder) / "graph.parhip", shared, num_parts, seed)
        except OSError as error:
            if error.errno not in FULL:
                raise
            told = f"the disk of {place or tempfile.gettempdir()} has no room for the file that KaMinPar reads"
            raise OSError(errno.ENOSPC, f"{told}, 4 bytes for each of {graph.num_edges:,} edges, or 8") from error
        return Partition(torch.from_numpy(assignment), num_parts)

    def _cut(self, graph: Graph, file: Path, shared: list[Array], num_parts: int, seed: int) -> Array:
        start, neighbors = undirected(graph, lambda start: _file(file, start))
        kaminpar.reseed(int(seed) % 2**31)
        of_file = kaminpar.load_graph(str(file), kaminpar.GraphFileFormat.PARHIP)
        partitioner = kaminpar.KaMinPar(1, kaminpar.context_by_name("default"))
        assignment = np.array(partitioner.compute_partition(of_file, num_parts, max(self.imbalance, _LEAST)), np.int32)
        repair(start, neighbors, shared, assignment, num_parts, self.imbalance)
        return assignment


def is_available() -> bool:
    """Whether KaMinPar is installed."""
    return kaminpar is not None


def _file(file: Path, start: Array) -> Array:
    """Begin a ParHIP file of a graph with these row starts, and return its neighbours, to be filled, mapped from it."""
    num_nodes, num_edges = start.size - 1, int(start[-1])
    refuse_beyond(_LIMIT, num_nodes, "nodes", "KaMinPar")
    refuse_beyond(_LIMIT, num_edges, "edges, counted in both directions,", "KaMinPar")
    first = 8 * (3 + start.size)
    with file.open("wb") as stream:
        np.array([_VERSION, num_nodes, num_edges], np.uint64).tofile(stream)
        (4 * start.astype(np.uint64) + np.uint64(first)).tofile(stream)
        stream.truncate(first + 4 * num_edges)
        if hasattr(os, "posix_fallocate") and num_edges:
            os.posix_fallocate(stream.fileno(), first, 4 * num_edges)  # a map of a full disk would end the process
    if not num_edges:
        return np.empty(0, np.uint32)
    return np.asarray(np.memmap(file, np.uint32, "r+", first, (num_edges,)))
