"""Batches of a graph in files: rows of coming batches are read in the background, near ones at once, and some are held.

    increasing rows -> runs with gaps of at most 16 kB -> requests of at most 1 MB -> a few threads -> the wanted rows

A map would fetch the pages one after the other, each with what the system believes to come next, and would hold them as
memory of the process. Where the file system allows it, the system does not cache what is read here, or it would throw
out pages of the edges for rows that nobody needs again. A cache of a size that the user chooses holds the rows that
coming batches need again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numba
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.batches.source import Finish, stream_to
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.engine.apart import places_of, take_apart
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.sample import Apart, Sample
from lightning_gnn_dist.extensions.asking.turns import Steps, at_once
from lightning_gnn_dist.extensions.larger_than_memory.ahead import AheadSource, Arrays, RowCache, Table, Tables
from lightning_gnn_dist.extensions.larger_than_memory.placement import LEAST_WIDTH, wide_arrays
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of
from lightning_gnn_dist.graph.storage.mapped import Map, all_maps, file_of
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.run import Host
from lightning_gnn_dist.homes.settings import BatchSettings, Loading
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler
from lightning_gnn_dist.sampling.whole import WholePartSampler

Bytes = npt.NDArray[Any]

BLOCK_BYTES = 4096  # what is read past the system's cache begins and ends at multiples of this
GAP_BYTES = 1 << 14  # a disk reads over as much sooner than it begins another request
REQUEST_BYTES = 1 << 20
IN_FLIGHT = 16  # requests
THREAD_NAME = "lightning_gnn_dist.extensions.larger_than_memory.files"


class MergedReads:
    """Reads rows of an array from the file that it is mapped from. Close it at the end.

    Args:
        array: An array with a row per node or edge that lies in a mapped file.
        maps: The result of ``all_maps()``, for callers with several arrays. Default: asked for here.

    Attributes:
        bytes_read: What was read of the file so far: whole blocks, as a disk has them, with gaps between rows.
    """

    def __init__(self, array: Tensor, maps: list[Map] | None = None) -> None:
        place = file_of(array, maps)
        if place is None:
            raise ValueError("These rows do not lie in a file that this process has mapped: read them from RAM.")
        self._array, self._name = array, place.name
        self._offset = array.data_ptr() - place.start + place.offset
        self._file = _opened(place.name)
        self._end = weakref.finalize(self, os.close, self._file)
        self._width, self.bytes_read = array[:1].nbytes, 0

    def take(self, rows: Tensor) -> Tensor:
        """Return a copy of some increasing rows."""
        if not self._end.alive:
            raise RuntimeError(f"{self._name} was closed while rows of it were asked for.")
        found = self._array.new_empty((len(rows), *self._array.shape[1:]))
        if not found.nbytes:
            return found
        starts = _requests(rows, self._width)  # and where the last one ends
        begins, ends = (self._offset + row * self._width for row in (rows[starts[:-1]], rows[starts[1:] - 1] + 1))
        self.bytes_read += int((-(-ends // BLOCK_BYTES) - begins // BLOCK_BYTES).sum()) * BLOCK_BYTES
        num_threads = min(IN_FLIGHT, len(starts) - 1)
        bounds = np.linspace(0, len(starts) - 1, num_threads + 1).astype(np.int64)
        read = partial(self._read, rows.numpy(), found.view(-1).view(torch.uint8).numpy())
        pieces = [starts[first : last + 1].numpy() for first, last in pairwise(bounds)]
        if num_threads == 1:
            read(pieces[0])
        else:
            with ThreadPoolExecutor(num_threads, THREAD_NAME) as threads:
                list(threads.map(read, pieces))
        return found

    def _read(self, rows: Any, out: Any, starts: Any) -> None:
        """Read some requests."""
        scratch = np.empty(REQUEST_BYTES + self._width + 3 * BLOCK_BYTES, np.uint8)
        scratch = scratch[-scratch.ctypes.data % BLOCK_BYTES :]
        where = self._file, self._offset, self._width
        failed = _read_rows(*where, rows, starts, out, scratch, scratch.ctypes.data)
        if failed >= 0:
            raise OSError(f"Row {int(rows[failed])} of {self._name} cannot be read: was the file changed?")

    def close(self) -> None:
        """Close the file. Nothing can be read any more."""
        self._end()


def _opened(name: str) -> int:
    """Open a file for reads past the system's cache; where that cannot be, for reads of no more than is asked for."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT)
    except (OSError, AttributeError):  # a file system, or a system, without
        file = os.open(name, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file


def _requests(rows: Tensor, width: int) -> Tensor:
    """Return where among increasing rows each request begins, and where the last one ends."""
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = rows.diff() * width > GAP_BYTES + width
    from_first = rows - rows[is_first][is_first.cumsum(0) - 1]
    piece = from_first * width // REQUEST_BYTES  # a longer run is several requests
    is_first[1:] |= piece[1:] != piece[:-1]
    return torch.cat([is_first.nonzero().view(-1), torch.tensor([len(rows)])])


# The system's own, by its name: numba keeps on disk what calls it so.
_OF_PREAD: Any = numba.int64(numba.int32, numba.int64, numba.int64, numba.int64)
_pread: Any = numba.types.ExternalFunction("pread", _OF_PREAD)


@compiled
def _read_rows(
    file: int, offset: int, width: int, rows: Bytes, starts: Bytes, out: Bytes, scratch: Bytes, to: int
) -> int:
    """Read requests into ``scratch``, which lies at ``to``, and copy their rows; a row that it cannot read, or -1."""
    for request in range(len(starts) - 1):
        first, last = starts[request], starts[request + 1] - 1
        start, end = offset + rows[first] * width, offset + (rows[last] + 1) * width
        block, got = start // BLOCK_BYTES * BLOCK_BYTES, 0
        while block + got < end:
            got = got // BLOCK_BYTES * BLOCK_BYTES
            more = _pread(file, to + got, -(-(end - block - got) // BLOCK_BYTES) * BLOCK_BYTES, block + got)
            if more < min(BLOCK_BYTES, end - block - got):
                return int(first)
            got += more
        for i in range(first, last + 1):
            row = start - block + (rows[i] - rows[first]) * width
            out[i * width : (i + 1) * width] = scratch[row : row + width]
    return -1


_OF_CACHE = 8  # an evaluation takes half of what is free at most; the rest is for rows read ahead, and pages of edges


class DiskRows(Tables[GraphTypes]):
    """Reads rows of those arrays of a graph that lie in files, and holds those that are needed again.

    Args:
        graph: The graph. Its narrow arrays are read through the maps.
        nodes: For each node type the arrays that are read, by name.
        cache_bytes: Memory for rows of these arrays, of all types together.
        edges: For each edge type the arrays that are read, of which none is held.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Arrays], cache_bytes: int, edges: Sequence[Arrays]) -> None:
        types, maps = graph.types, all_maps()
        self._graph, self._arrays, self._reads = graph, nodes, list[MergedReads]()

        def table(arrays: Mapping[str, Tensor], wide: Arrays, length: int, cache: RowCache) -> Table:
            return Table(dict(arrays), 0, 0 if wide else length, cache, self._reader(wide, maps))

        of_nodes = [
            table(arrays, wide, count, _cache_of(graph, wide, cache_bytes, range(first, first + count)))
            for arrays, wide, first, count in zip(
                types.node_arrays.values(), nodes, types.offsets, types.num_nodes.values(), strict=False
            )
        ]
        of_edges = {
            number: table(arrays, wide, count, RowCache(wide, 0))
            for number, (arrays, wide, count) in enumerate(
                zip(types.edge_arrays.values(), edges, types.num_edges, strict=True)
            )
            if arrays
        }
        super().__init__(types, of_nodes, of_edges, cache_bytes)

    @classmethod
    def of(cls, graph: Graph, cache_bytes: int) -> Self | None:
        """Return the rows that are read from the graph's files; None if the cache would hold all of them."""
        maps, types = all_maps(), graph.types
        nodes, edges = (
            [wide_arrays_in_files(arrays, maps) for arrays in of_types.values()]
            for of_types in (types.node_arrays, types.edge_arrays)
        )
        total = sum(array.nbytes for arrays in nodes for array in arrays.values())
        return None if total <= cache_bytes else cls(graph, nodes, cache_bytes, edges)

    def take_apart(self, sample: Sample) -> Apart:
        apart = take_apart(self._graph, sample, with_ids=bool(self.of_edges))
        rows = [
            of._replace(edge_ids=places_of(self._graph, number, of.edge_ids)) if number in self.of_edges else of
            for number, of in enumerate(apart.rows)
        ]
        return apart._replace(rows=rows)

    @property
    def fetched_bytes(self) -> int:
        """The bytes that were read of files so far: whole blocks, with gaps between rows."""
        return sum(reads.bytes_read for reads in self._reads)

    def are_rows_of(self, graph: Graph) -> bool:
        """Return whether these are rows of a graph's own arrays."""
        of_types = zip(graph.types.node_arrays.values(), self._arrays, strict=False)
        return graph.types.node_types == self.types.node_types and all(
            arrays.get(name) is array for arrays, known in of_types for name, array in known.items()
        )

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
        options: What :class:`AheadSource` takes.
    """

    def __init__(self, graph: Graph, rows: DiskRows, sampler: Sampler, loading: Loading, **options: Any) -> None:
        super().__init__(rows, lambda *bulk: at_once(sampler.sample_bulk(graph, *bulk)), loading, **options)
        self._graph, self._sampler = graph, sampler

    def order(self, seeds: Tensor, seed: int, epoch: int) -> Tensor | None:
        sampler = self._sampler
        return sampler.order(self._graph, seeds, seed, epoch) if isinstance(sampler, OrdersSeeds) else None


def wide_arrays_in_files(arrays: Mapping[str, Tensor], maps: list[Map] | None = None) -> Arrays:
    """Return those of the wide arrays that lie in files."""
    wide = wide_arrays(arrays)
    maps = all_maps() if maps is None and wide else maps
    return {name: array for name, array in wide.items() if file_of(array, maps) is not None}


def check_rows_in_files(graph: Graph, cache_bytes: int) -> None:
    """Refuse a cache for rows of files where no rows come from files."""
    maps = all_maps()
    if not any(wide_arrays_in_files(arrays, maps) for arrays in graph.types.node_arrays.values()):
        raise ValueError(
            f"Loading(cache_bytes={cache_bytes}) is for a graph in files, and of this one no array with at least "
            f"{LEAST_WIDTH} bytes a node, but labels, lies in a file: give the path of a saved graph, or leave "
            "cache_bytes out."
        )


def _cache_of(graph: Graph, arrays: Arrays, num_bytes: int, nodes: range) -> RowCache:
    """Return an empty cache for rows of nodes of a type, of which those stay first that receive much.

    In most graphs, who receives much sends much.
    """
    width = bytes_per_row(arrays)
    num_rows = min(num_bytes // width, len(nodes)) if width else 0
    return RowCache(arrays, num_rows, lambda ids: degrees_of(graph.indptr, ids + nodes.start))


class RowsInFiles:
    """Reads rows from a graph's files ahead, not through maps, whose pages would drive out others that are needed.

    Args:
        cache_bytes: Memory for rows that are needed again.
        spares: Whether memory is short: then no more is read ahead than the cache has, for one batch at a time.
    """

    def __init__(self, cache_bytes: int, *, spares: bool = False) -> None:
        self._cache_bytes, self._spares = cache_bytes, spares
        self.rows: DiskRows | None = None

    @classmethod
    def of(cls, settings: BatchSettings, graph: Graph) -> Self:
        """Return what ``Loading(cache_bytes=...)`` asks for; refuse it where there is nothing to read ahead."""
        cache_bytes = settings.loading.cache_bytes
        assert cache_bytes is not None
        _check_reads_ahead(settings)
        check_rows_in_files(graph, cache_bytes)
        return cls(cache_bytes)

    @classmethod
    def beyond_memory(cls, graph: Graph, host: Host) -> Self | None:
        """Return what reads the rows of an evaluation where a host has no room for the graph; None if it is in RAM."""
        made = cls(host.free // host.ranks // _OF_CACHE, spares=True)
        made.rows = DiskRows.of(graph, made._cache_bytes)
        if made.rows is None:
            return None
        rank_zero_info(
            f"The graph has {in_bytes(graph.num_bytes)}, and {in_bytes(host.free)} are free: an "
            f"evaluation reads rows from its files ahead, and {in_bytes(made._cache_bytes)} hold those that come "
            "again, as with Loading(cache_bytes=...)."
        )
        return made

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"rows": None}

    @property
    def figures(self) -> dict[str, float]:
        return {} if self.rows is None else self.rows.figures

    def source(self, home: LocalGraph, graph: Graph, sampler: Sampler, finish: Finish | None) -> FileSource | None:
        """Return the source of batches of the whole graph; None of a part, and if the cache would hold all rows."""
        if finish is not None:
            return None
        if self.rows is None:
            self.rows = DiskRows.of(home.graph, self._cache_bytes)
        if self.rows is None or not self.rows.are_rows_of(graph):
            return None
        loading, stream = home.running.settings.loading, stream_to(home.running.device)
        if self._spares:
            loading = replace(loading, ahead_bytes=min(loading.ahead_bytes, self.rows.cache.num_bytes))
        source = FileSource(graph, self.rows, sampler, loading, stream=stream, widen=home.running.widen)
        source.is_short = self._spares
        return source

    def close(self, graph: Graph) -> None:
        """Close the files."""
        if self.rows is not None:
            self.rows.close()
        self.rows = None


def _check_reads_ahead(settings: BatchSettings) -> None:
    loading = settings.loading
    if loading.sample_on != "cpu":
        raise ValueError(
            f"Loading(cache_bytes={loading.cache_bytes}) makes batches in RAM, and sample_on is "
            f"{loading.sample_on!r}: leave one of them out."
        )
    if WholePartSampler in (type(settings.training_sampler), type(settings.global_batching.sampler)):
        raise ValueError(
            f"Loading(cache_bytes={loading.cache_bytes}) holds rows that coming batches need, and a "
            "WholePartSampler has one batch of all rows: draw with a NeighborSampler, or leave cache_bytes out."
        )
