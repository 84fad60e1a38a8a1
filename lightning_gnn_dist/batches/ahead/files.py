"""Batches of a graph in files: rows of coming batches are read in the background, near ones at once, and some are held.

A cache of a size that the user chooses holds the rows that coming batches need again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.merged_reads import MergedReads
from lightning_gnn_dist.batches.ahead.row_cache import Arrays, RowCache
from lightning_gnn_dist.batches.ahead.source import AheadSource
from lightning_gnn_dist.batches.ahead.tables import Table, Tables
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.placing.device_stream import DeviceStream
from lightning_gnn_dist.batches.placing.memory_plan import LEAST_WIDTH, wide_arrays
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of
from lightning_gnn_dist.graph.storage.mapped import Map, MappedRows, all_maps, file_of
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from lightning_gnn_dist.sampling.turns import Steps, at_once


class DiskRows(Tables[GraphTypes]):
    """Reads rows of those arrays of a graph that lie in files, and holds those that are needed again.

    Args:
        graph: The graph. Its narrow arrays are read through the maps.
        nodes: The arrays of nodes that are read, by name.
        cache_bytes: Memory for rows of these arrays.
        edges: The arrays of edges that are read, of which none is held.
    """

    def __init__(self, graph: Graph, nodes: Arrays, cache_bytes: int, edges: Arrays) -> None:
        maps = all_maps()
        self._arrays, self._reads = nodes, list[MergedReads]()
        num_rows = min(cache_bytes // max(1, bytes_per_row(nodes)), graph.num_nodes)
        # In most graphs, who receives much sends much.
        cache = RowCache(nodes, num_rows, lambda ids: degrees_of(graph.indptr, ids))
        of_nodes = Table(graph.node_arrays, 0, 0, cache, self._reader(nodes, maps))
        of_edges = Table(graph.edge_arrays, 0, 0, RowCache(edges, 0), self._reader(edges, maps))
        super().__init__(graph.types, [of_nodes], {0: of_edges} if graph.edge_arrays else {})

    @classmethod
    def of(cls, graph: Graph, cache_bytes: int) -> Self | None:
        """Return the rows that are read from the graph's files; None if the cache would hold all of them."""
        maps = all_maps()
        nodes, edges = (wide_arrays_in_files(arrays, maps) for arrays in (graph.node_arrays, graph.edge_arrays))
        total = sum(array.nbytes for array in nodes.values())
        return None if total <= cache_bytes else cls(graph, nodes, cache_bytes, edges)

    @property
    def fetched_bytes(self) -> int:
        """The bytes that were asked of files so far, gaps between rows too."""
        return sum(reads.bytes_read for reads in self._reads)

    def are_rows_of(self, graph: Graph) -> bool:
        """Return whether these are rows of a graph's own arrays."""
        return all(graph.node_arrays.get(name) is array for name, array in self._arrays.items())

    def close(self) -> None:
        """Close the files, once no bulk is being read. Nothing can be read any more."""
        with self.making:
            for reads in self._reads:
                reads.close()

    def _reader(self, arrays: Arrays, maps: list[Map]) -> Callable[[Tensor], Steps[Arrays]]:
        """Return what reads rows of arrays from their files."""
        reads = {name: MergedReads(array, maps) for name, array in arrays.items()}
        self._reads += reads.values()
        return lambda ids: at_once({name: of.take(ids) for name, of in reads.items()})


class FileSource(AheadSource):
    """Makes the batches that a :class:`GraphSource` would make, and reads wide rows from files, not through maps.

    Args:
        graph: The graph to sample, memory-mapped. Its edges and narrow arrays are read through the maps.
        rows: Its rows.
        sampler: Draws the neighbourhoods.
        loading: How batches are made.
        num_ids: Seeds must lie below this number. Default: the number of nodes.
        stream: Brings batches to a device. With None they stay in RAM.
        stays: The type narrower than float32 that a step computes in, if there is one.
    """

    def __init__(
        self,
        graph: Graph,
        rows: DiskRows,
        sampler: Sampler,
        loading: Loading,
        *,
        num_ids: int | None = None,
        stream: DeviceStream | None = None,
        stays: torch.dtype | None = None,
    ) -> None:
        super().__init__(rows, graph.num_nodes if num_ids is None else num_ids, loading, stream, stays)
        self._graph, self._sampler = graph, sampler
        self._mapped: list[MappedRows] = []  # of which pages are released

    def order(self, seeds: Tensor, seed: int, epoch: int) -> Tensor | None:
        sampler = self._sampler
        return sampler.order(self._graph, seeds, seed, epoch) if isinstance(sampler, OrdersSeeds) else None

    def spare_memory(self) -> None:
        self._mapped = [MappedRows(self._graph.indptr), MappedRows(self._graph.indices)]

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        samples = self._sampler.sample_bulk(self._graph, seeds, keys)
        for array in self._mapped:
            array.release()
        return at_once(samples)


def wide_arrays_in_files(arrays: Mapping[str, Tensor], maps: list[Map] | None = None) -> Arrays:
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
