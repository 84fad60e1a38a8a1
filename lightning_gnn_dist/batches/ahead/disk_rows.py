"""Rows of a graph's files, held in a cache of a size that the user chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple, Self

from torch import Tensor

from lightning_gnn_dist.batches.ahead.merged_reads import MergedReads
from lightning_gnn_dist.batches.ahead.row_cache import RowCache, Rows
from lightning_gnn_dist.batches.batch import LABELS
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of
from lightning_gnn_dist.graph.storage.mapped import Map, all_maps, file_of
from lightning_gnn_dist.graph.typed.names import have_names

LEAST_WIDTH = 32  # bytes; of narrower rows a page holds so many that the system's own cache does better


class FoundRows(NamedTuple):
    """Where the rows of some nodes are: below each other, those held in the cache and those that were read.

    Attributes:
        places: The place of each row.
        held: The rows in the cache, by name.
        read: The rows that were read.
    """

    places: Tensor
    held: Rows
    read: Rows


class DiskRows:
    """Reads rows of those arrays of a graph that lie in files, and holds those that are needed again.

    Args:
        graph: The graph.
        nodes: The arrays of nodes that are read, by name.
        cache_bytes: Memory for rows of these arrays.
        edges: The arrays of edges that are read, of which none is held.

    Attributes:
        cache: Holds rows of nodes.
        making: Held by the thread that makes a bulk from the cache.
    """

    def __init__(self, graph: Graph, nodes: Rows, cache_bytes: int, edges: Rows) -> None:
        maps = all_maps()
        self._indptr, self._arrays = graph.indptr, nodes
        self._nodes = {name: MergedReads(array, maps) for name, array in nodes.items()}
        self._edges = {name: MergedReads(array, maps) for name, array in edges.items()}
        num_rows = min(cache_bytes // max(1, bytes_per_row(nodes)), graph.num_nodes)
        self.cache, self.making = RowCache(nodes, num_rows, self._count), Lock()

    @classmethod
    def of(cls, graph: Graph, cache_bytes: int) -> Self | None:
        """Return the rows that are read from the graph's files; None if the cache would hold all of them."""
        maps = all_maps()
        nodes, edges = (wide_arrays_in_files(arrays, maps) for arrays in (graph.node_arrays, graph.edge_arrays))
        total = sum(array.nbytes for array in nodes.values())
        return None if total <= cache_bytes else cls(graph, nodes, cache_bytes, edges)

    @property
    def bytes_read(self) -> int:
        """The bytes that were asked of files so far."""
        return sum(reads.bytes_read for reads in (*self._nodes.values(), *self._edges.values()))

    def are_rows_of(self, graph: Graph) -> bool:
        """Return whether these are rows of a graph's own arrays."""
        return all(graph.node_arrays.get(name) is array for name, array in self._arrays.items())

    def find(self, distinct: Tensor, inverse: Tensor, coming: Sequence[Tensor]) -> FoundRows:
        """Read the rows of nodes that are not held.

        Args:
            distinct: The nodes, each once, increasing.
            inverse: Where each row that is asked for stands among them.
            coming: The ``distinct`` of what will be asked next, as far as it is known.
        """
        at, missing = self.cache.look_up(distinct, coming)
        read = {name: reads.take(missing) for name, reads in self._nodes.items()}
        self.cache.offer(missing, read)
        return FoundRows(at[inverse], self.cache.rows, read)

    def edge_rows(self, edges: Tensor) -> Rows:
        """Return rows of the arrays of edges that are read, by name."""
        if not self._edges:
            return {}
        distinct, inverse = edges.unique(return_inverse=True)
        return {name: reads.take(distinct)[inverse] for name, reads in self._edges.items()}

    def close(self) -> None:
        """Close the files, once no bulk is being read. Nothing can be read any more."""
        with self.making:
            for reads in (*self._nodes.values(), *self._edges.values()):
                reads.close()

    def _count(self, ids: Tensor) -> Tensor:
        """Return the in-degrees of nodes: in most graphs, who receives much sends much."""
        return degrees_of(self._indptr, ids)


def wide_arrays(arrays: Mapping[str, Tensor]) -> Rows:
    """Return the arrays with rows of at least 32 bytes, but labels, which seeds alone need."""
    return {name: array for name, array in arrays.items() if array[:1].nbytes >= LEAST_WIDTH and name != LABELS}


def wide_arrays_in_files(arrays: Mapping[str, Tensor], maps: list[Map] | None = None) -> Rows:
    """Return those of the wide arrays that lie in files."""
    wide = wide_arrays(arrays)
    maps = all_maps() if maps is None and wide else maps
    return {name: array for name, array in wide.items() if file_of(array, maps) is not None}


def check_rows_in_files(graph: Graph, cache_bytes: int) -> None:
    """Refuse a cache for rows of files where no rows come from files."""
    if have_names(graph.types):
        raise ValueError(
            f"Loading(cache_bytes={cache_bytes}) reads rows of graphs without types, and this one has types: leave "
            "cache_bytes out, and the system reads its files."
        )
    if not wide_arrays_in_files(graph.node_arrays):
        raise ValueError(
            f"Loading(cache_bytes={cache_bytes}) is for a graph in files, and of this one no array with at least "
            f"{LEAST_WIDTH} bytes a node, but labels, lies in a file: give the path of a saved graph, or leave "
            "cache_bytes out."
        )
