"""Batch sources: they take seeds and keys, and return batches.

    keys -> seeds -> source.make(seeds, keys) -> batches

A loader decides on the order of seeds, the threads and the look-ahead; a source knows graph, sampler and device.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.assembling import Content, Taken, assemble, made_of
from lightning_gnn_dist.batches.batch import LABELS, SampledData, bytes_of, device_of_batch
from lightning_gnn_dist.batches.device_stream import Crossing, DeviceStream, handed_out
from lightning_gnn_dist.batches.hetero import store_of_seeds
from lightning_gnn_dist.batches.part_batch import Run, part_batch_of
from lightning_gnn_dist.batches.pool import BufferPool, Pool, Widen, gather_rows
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler


class FileRows:
    """Assembles batches from a graph's files: slower than from its maps, with less memory.

    Args:
        graph: The graph. Those of its arrays that are in RAM are read there.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, types, maps = graph, graph.types, all_maps()
        self._structure = [MappedRows(array, maps) for array in (graph.indptr, graph.indices, types.edge_type)]
        of_types = [*types.node_arrays.values(), *types.edge_arrays.values()]
        self._files = {id(array): MappedRows(array, maps) for arrays in of_types for array in arrays.values()}

    def assemble(self, sample: Sample, *, widen: Widen = True, all_labels: bool = True) -> SampledData:
        """Make a batch, as :func:`~lightning_gnn_dist.batches.assembling.assemble` does."""
        return self.made_of(Content.of(self._graph, sample), widen=widen, all_labels=all_labels)

    def made_of(self, content: Content, *, widen: Widen = True, all_labels: bool = True) -> SampledData:
        """Make a batch of what is taken of the graph's arrays."""
        num_labels = [None if all_labels else per_hop[0] for per_hop in content.apart.num_sampled]
        nodes = [self._read(*taken) for taken in zip(content.nodes, num_labels, strict=True)]
        content = content._replace(nodes=nodes, edges=[self._read(taken) for taken in content.edges])
        return made_of(content, widen=widen, all_labels=all_labels)

    def _read(self, taken: Taken, num_labels: int | None = None) -> Taken:
        """Return the rows that a batch takes of the arrays of a type."""
        rows = taken.rows
        if rows is None:
            return taken
        read = {
            name: self.take(array, rows[:num_labels] if name == LABELS else rows)
            for name, array in taken.arrays.items()
        }
        return Taken(read)

    def take(self, array: Tensor, rows: Tensor) -> Tensor:
        """Return rows of an array; of one that is not the graph's own, such as a copy on a device, from where it is."""
        file = self._files.get(id(array))
        return gather_rows(array, rows) if file is None else file.take(rows)

    def release(self) -> None:
        """Release the pages of edges that sampling has read."""
        for array in self._structure:
            array.release()


WRITTEN = (
    "Something was written into a batch of the whole part, whose tensors all its batches share: write into a copy, "
    "batch.clone()."
)


Inputs = Sequence[Tensor]  # for each batch, the place of each seed in what its loader was asked for
BulkSeeds = tuple[Sequence[Tensor], Sequence[BatchKey], Inputs | None]  # seeds, keys and inputs of a bulk
MadeBulk = tuple[int, Iterator[SampledData]]  # how many batches, and the batches


class BatchSource(ABC):
    """Makes batches of seeds. A batch depends on its seeds and its key alone. A subclass says how a bulk is made.

    Args:
        num_ids: Seeds must lie below this number.
        stream: Brings batches to a device. With None they stay where they are made.

    Attributes:
        is_remote: Whether rows are asked of other ranks or of files: once for a bulk, by one thread, bulk after bulk.
        is_short: Whether there is so little memory that full neighbourhoods are made one at a time.
    """

    is_remote = False
    is_short = False

    def __init__(self, num_ids: int, stream: DeviceStream | None) -> None:
        self.num_ids, self._stream, self._num_buffers = num_ids, stream, 0
        self._pools: dict[str, BufferPool] = {}

    @abstractmethod
    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        """The batches around each entry of ``seeds``, with an ``input_id`` for each seed if ``inputs`` has them.

        The call does all the work, and may come from a background thread. Iterating only waits for a device, and must
        happen in the thread that trains.
        """

    def make_in_turn(self, bulks: Iterator[BulkSeeds]) -> Iterator[MadeBulk]:
        """What :meth:`make` returns for one bulk after the other. It may look at the next ones before they are due."""
        return ((len(asked[0]), self.make(*asked)) for asked in bulks)

    def depth(self, prefetch: int) -> int:
        """How many bulks may be made ahead of the one that is consumed, where the loader would make ``prefetch``."""
        return prefetch

    def order(self, seeds: Tensor, seed: int, epoch: int) -> Tensor | None:
        """The order in which a pass deals the seeds, as positions in ``seeds``, or None for any order."""
        return None

    def keep_buffers(self, count: int) -> None:
        """Set how many batches will exist at a time, so that as many buffers are kept for new ones."""
        self._num_buffers = count

    def spare_memory(self) -> None:  # noqa: B027
        """From now on, keep no pages of mapped files in memory, if there are any; making batches takes longer."""

    def close(self) -> None:
        """Free buffers and memory of the device. The source can be used again."""
        self._pools.clear()

    def _pool_of(self, name: str) -> Pool | None:
        if self._stream is not None:
            return self._stream.pool
        if not self._num_buffers:
            return None
        pool = self._pools.get(name)
        if pool is None:  # one pool for each array, because its buffers have nearly the same size
            pool = self._pools.setdefault(name, BufferPool(self._num_buffers))
        return pool


class GraphSource(BatchSource):
    """Makes batches of a graph that this process holds.

    Args:
        graph: The graph to sample, in RAM or memory-mapped, or on a device with a sampler that draws there.
        sampler: Draws the neighbourhoods.
        widen: Convert float16, bfloat16 and int8 with scales to float32 as they are gathered, or all but one type.
        all_labels: Give ``y`` a row for each node, not for each seed alone.
        num_ids: Seeds must lie below this number. Default: the number of nodes.
        stream: Brings batches to a device. Default: they stay where they are made.
        run: Runs layers on the batches, whose edges are then not handed out. Default: layers run on these edges.
        crossing: Counts the bytes of batches in RAM that are sent to a device.
    """

    def __init__(
        self,
        graph: Graph,
        sampler: Sampler,
        *,
        widen: Widen = True,
        all_labels: bool = True,
        num_ids: int | None = None,
        stream: DeviceStream | None = None,
        run: Run | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        if not isinstance(sampler, Sampler) or isinstance(sampler, type):
            raise TypeError(f"sampler must be one like NeighborSampler([15, 10]), got {sampler!r}.")
        super().__init__(graph.num_nodes if num_ids is None else num_ids, stream)
        self._graph, self._sampler = graph, sampler
        self._widen, self._all_labels, self._run, self._crossing = widen, all_labels, run, crossing
        self._files: FileRows | None = None
        self._constant: tuple[Sample, SampledData, list[int]] | None = None

    def order(self, seeds: Tensor, seed: int, epoch: int) -> Tensor | None:
        sampler = self._sampler
        return sampler.order(self._graph, seeds, seed, epoch) if isinstance(sampler, OrdersSeeds) else None

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        graph, sampler = self._where()
        how = graph, sampler, seeds, keys, inputs
        batches, run = handed_out(lambda: self._batches_around(*how), self._stream), self._run
        return batches if run is None else (part_batch_of(batch, run) for batch in batches)

    def spare_memory(self) -> None:
        self._files = FileRows(self._graph)

    def close(self) -> None:
        super().close()
        self._constant = None

    def _where(self) -> tuple[Graph, Sampler]:
        """Return the graph that is sampled, perhaps a copy on a device, and what draws from it."""
        return self._graph, self._sampler

    def _batches_around(
        self, graph: Graph, sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None
    ) -> list[SampledData]:
        samples = sampler.sample_bulk(graph, seeds, keys)
        batches = self._assembled(graph, samples)
        if inputs is not None:
            for batch, sample, ids, given in zip(batches, samples, seeds, inputs, strict=True):
                numbers = _sorted_as(sample, ids, given) if sample.is_constant else given
                store_of_seeds(batch).input_id = sent(numbers, device_of_batch(batch))
        return batches

    def _assembled(self, graph: Graph, samples: Sequence[Sample]) -> list[SampledData]:
        self._release(graph)
        batches = [self._assemble(graph, sample) for sample in samples]
        if self._stream is not None and self._crossing is not None:
            self._crossing.add(sum(bytes_of(batch) for batch in batches if device_of_batch(batch).type == "cpu"))
        return batches

    def _release(self, graph: Graph) -> None:
        if self._files is not None and graph is self._graph:  # a copy on a device has no pages of files
            self._files.release()

    def _rows_of(self, name: str, array: Tensor, rows: Tensor) -> Tensor:
        """Return rows of an array, in lent memory."""
        return gather_rows(array, rows, self._pool_of(name)) if self._files is None else self._files.take(array, rows)

    def _assemble(self, graph: Graph, sample: Sample) -> SampledData:
        how: Any = {"widen": self._widen, "all_labels": self._all_labels}
        if self._files is not None and graph is self._graph:
            return self._files.assemble(sample, **how)
        if not sample.is_constant:
            return assemble(graph, sample, self._pool_of, **how)
        kept = self._constant
        if kept is None or kept[0] is not sample:
            whole = assemble(graph, sample, **how)
            whole = whole if self._stream is None else whole.to(self._stream.device)
            self._constant = kept = sample, whole, writes_of(whole)
        elif kept[2] != writes_of(kept[1]):
            raise RuntimeError(WRITTEN)
        return copy.copy(kept[1])  # the user may set or delete attributes of a batch


def writes_of(batch: Any) -> list[int]:
    """How often each of the batch's tensors was written to. Does not build a promised ``edge_index``."""
    values = [value for store in batch.stores for value in store._mapping.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _sorted_as(sample: Sample, seeds: Tensor, given: Tensor) -> Tensor:
    """What was given for each seed, in the order of the seeds of a sample that orders them itself."""
    nodes = sample.nodes[: seeds.numel()].to(seeds.device)
    order = seeds.argsort()
    return given[order[torch.searchsorted(seeds[order], nodes)]]
