"""Writes a saved graph anew, chunk by chunk, so that a part of it is read in one go from a few places of each file.

nodes of chunk 0, nodes of chunk 1, ...     of a graph with types within the nodes of each type
"""

from __future__ import annotations

import errno
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_at_least, check_folder, check_instance, check_true_or_false
from lightning_gnn_dist.extensions.larger_than_memory.chunks import Chunks
from lightning_gnn_dist.extensions.larger_than_memory.whole_rows import order_of_types, whole_rows
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph, bytes_per_edge, bytes_per_node
from lightning_gnn_dist.graph.rows import degrees_of, starts_of
from lightning_gnn_dist.graph.storage import npy, store
from lightning_gnn_dist.graph.storage.files import folder_beside
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.prepare.arrays import GrowingArrays
from lightning_gnn_dist.prepare.journal import describe, map_arrays
from lightning_gnn_dist.prepare.prepare_graph import DEFAULT_MEMORY

_BYTES_PER_EDGE = 40  # that positions, senders and look-ups of an edge take while its row is copied
_ROWS_AT_ONCE = 1 << 22


def reorder_graph(
    graph: Graph,
    partition: Partition,
    path: str | Path,
    *,
    memory_bytes: int = DEFAULT_MEMORY,
    overwrite: bool = False,
) -> None:
    """Save a graph whose nodes lie chunk by chunk: a node's ``n_id`` is its old id, or what ``n_id`` was before.

    In a graph with types the nodes of each type lie chunk by chunk, and ``n_id`` of a type is that in the type. Rows
    keep their order of edges. The graph appears when all of it is written.

    Args:
        graph: The graph, usually a saved one.
        partition: The chunk of each node.
        path: The directory to write.
        memory_bytes: Bytes that copying may take, beside some 40 bytes for each node. The graph's files are read from
            front to back as often as they are larger than a third of this.
        overwrite: Replace a saved graph.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.open(path) gives it")
    check_instance("partition", partition, Partition, "a Partition, as MetisPartitioner()(graph, 512, seed=0) makes it")
    check_at_least(1, memory_bytes=memory_bytes)
    check_true_or_false(overwrite=overwrite)
    path = check_folder("path", path)
    store.check_target(path, overwrite=overwrite)
    graph.check_whole()
    _check_fits(graph, partition)
    _check_room(graph, path)
    with folder_beside(path) as draft:
        try:
            _write(graph, partition, draft, memory_bytes)
        except OSError as error:
            if error.errno not in npy.FULL:
                raise
            told = f"the disk of {path} is full ({error.strerror}): make room, and repeat"
            raise OSError(error.errno, told) from error
        store.replace(draft, path)


def _check_fits(graph: Graph, partition: Partition) -> None:
    if partition.assignment.numel() != graph.num_nodes:
        raise ValueError(
            f"The partition assigns {partition.assignment.numel()} nodes, but the graph has {graph.num_nodes}: reorder "
            "the graph that was partitioned."
        )
    if not (counts := partition.counts()).all():
        raise ValueError(f"Chunk {int(counts.argmin())} of the partition has no nodes: cut into fewer chunks.")


def _check_room(graph: Graph, path: Path) -> None:
    place = next(parent for parent in path.absolute().parents if parent.exists())
    needed, free = graph.num_bytes + 8 * graph.num_nodes, shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"{place} has {free:,} bytes free, and about {needed:,} are needed: choose another disk"
        )


def _write(graph: Graph, partition: Partition, draft: Path, memory_bytes: int) -> None:
    order = order_of_types(graph.types, partition)
    indptr = starts_of(degrees_of(graph.indptr, order))
    npy.save(draft / "indptr.npy", indptr.numpy())
    number = torch.empty(graph.num_nodes, dtype=index_dtype(graph.num_nodes))
    number[order] = torch.arange(graph.num_nodes, dtype=number.dtype)
    num_edges = torch.zeros(len(graph.types.edge_types), partition.num_parts, dtype=torch.int64)
    arrays = GrowingArrays(draft, draft)
    for window in _windows(graph, indptr, memory_bytes):
        rows = _in_order(graph, order[window], number)
        num_edges += _count_edges(rows, partition.assignment[order[window]], partition.num_parts)
        arrays.add({name: store.as_numpy(array) for name, array in rows.arrays.items() if name != "indptr"})
    arrays.finish()
    _describe(graph, draft)
    Chunks.counted(partition, graph.types, num_edges).write(draft)


def _windows(graph: Graph, indptr: Tensor, memory_bytes: int) -> Iterator[slice]:
    """Yield all nodes in slices whose rows take at most so many bytes to copy, or of one node that takes more."""
    of_node, of_edge = 2 * bytes_per_node(graph) + 16, 2 * bytes_per_edge(graph) + _BYTES_PER_EDGE
    first = 0
    while first < graph.num_nodes:
        limit = first * of_node + int(indptr[first]) * of_edge + memory_bytes
        ends = range(first + 1, graph.num_nodes + 1)
        last = first + bisect_right(ends, limit, key=lambda end: end * of_node + int(indptr[end]) * of_edge)
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def _in_order(graph: Graph, nodes: Tensor, number: Tensor) -> Graph:
    """The whole rows of some nodes in their order, with new numbers of senders. Files are read from front to back."""
    of_graph, place = nodes.sort()
    rows = whole_rows(graph, of_graph, number)
    return whole_rows(rows, torch.empty_like(place).scatter_(0, place, torch.arange(place.numel())))


def _count_edges(rows: Graph, chunk: Tensor, num_chunks: int) -> Tensor:
    """The edges of each type into each chunk, given the chunk of each row."""
    of_edge, num_kinds = chunk.to(torch.int64).repeat_interleave(rows.degrees()), len(rows.types.edge_types)
    of_edge += rows.types.edge_type.to(torch.int64) * num_chunks
    return torch.bincount(of_edge, minlength=num_kinds * num_chunks).view(num_kinds, num_chunks)


def _describe(graph: Graph, draft: Path) -> None:
    halves = {name.rpartition("/")[2] for name, a in graph.arrays.items() if a.dtype == torch.bfloat16}
    types = None
    if graph.types.have_names:
        types = store.types_from(graph.types.about, map_arrays(draft, sorted(draft.rglob("*.npy"))))
    names = [] if types else [*graph.node_arrays, "n_id"]
    describe(draft, list(dict.fromkeys(names)), halves, types, _ROWS_AT_ONCE, lambda share: None)
