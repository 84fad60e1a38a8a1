"""Batch sources: they take seeds and keys, and return batches.

    keys -> seeds -> source.make(seeds, keys) -> batches

A loader decides on the order of seeds, the threads and the look-ahead; a source knows graph, sampler and device.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.batches.batch import (
    ENDS,
    LABELS,
    LABELS_OF_LINKS,
    PoolOf,
    SampledData,
    SampledHeteroData,
    blocks_of,
    bytes_of,
    device_of_batch,
    ends_of,
    gathered,
    store_of_seeds,
)
from lightning_gnn_dist.batches.pool import BufferPool, Pool, Widen, gather_rows
from lightning_gnn_dist.engine.apart import in_types, places_of, take_apart
from lightning_gnn_dist.engine.lending import pinned_pool, sent
from lightning_gnn_dist.engine.sample import SEED_TIME, Apart, BatchKey, Sample, of_one_type
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeNames, have_names
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler


class Sent(NamedTuple):
    """A batch on its way to the device.

    Attributes:
        batch: The batch on the device; its tensors may not be complete yet.
        event: An event that is recorded when they are complete.
    """

    batch: SampledData
    event: torch.cuda.Event


InFlight: TypeAlias = deque[SampledData | Sent]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each device, so that one loader may read what another has left in a cache."""
    return torch.cuda.Stream(device)


class DeviceStream:
    """Brings batches to a CUDA device.

    Of a bulk that was made on the CPU, the first batch is sent at once, and each other one when the one before it is
    received, so few are on the device. Batches that were made on the device are only waited for.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = pinned_pool()
        self._stream = _side_stream(device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """What this thread launches in the block runs on the device, on a stream beside the training."""
        # The device is set first, or the end of the stream's block would open a context on another device.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def load(self, batches: Iterable[SampledData]) -> InFlight:
        """Make a bulk of which :meth:`receive` takes one batch after the other."""
        with self.open():
            bulk: InFlight = deque(self._loaded(batch) for batch in batches)
            if bulk:
                bulk[0] = self.send(bulk[0])
        return bulk

    def _loaded(self, batch: SampledData) -> SampledData | Sent:
        is_there = device_of_batch(batch) == self.device
        return self.send(batch) if is_there else batch.apply(self.pool.copied)

    def bring(self, batch: SampledData) -> SampledData:
        """Bring a batch to the device, of which some arrays may be there; the host does not wait for it."""
        return self.receive(self.load([batch]))

    def send(self, batch: SampledData | Sent) -> Sent:
        """Begin the copy of a batch; the host does not wait for it."""
        if isinstance(batch, Sent):
            return batch
        with self.open():
            source = None if device_of_batch(batch) == self.device else copy.copy(batch)
            sent = Sent(batch.to(self.device, non_blocking=True), self._stream.record_event())
        if source is not None:
            self.pool.hold(source, sent.event)
        return sent

    def receive(self, bulk: InFlight) -> SampledData:
        """Take the first batch. Work that this thread launches from here on waits until it is complete."""
        sent = self.send(bulk.popleft())
        if bulk:
            bulk[0] = self.send(bulk[0])
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent.event)
        sent.batch.record_stream(current)  # otherwise its memory could be reused while this stream reads it
        return sent.batch


def handed_out(make: Callable[[], Iterable[SampledData]], stream: DeviceStream | None) -> Iterator[SampledData]:
    """Call ``make`` now, on the stream if there is one, and return an iterator over its batches.

    Iterating waits for the device, so the thread that trains must do it. A batch is not held once it was taken.
    """
    if stream is None:
        made = deque(make())
        return (made.popleft() for _ in range(len(made)))
    with stream.open():
        bulk = stream.load(make())
    return (stream.receive(bulk) for _ in range(len(bulk)))


def device_of(trainer: Trainer | None) -> torch.device:
    """The device that trains; the CPU without a trainer."""
    return trainer.strategy.root_device if trainer is not None else torch.device("cpu")


def stream_to(device: torch.device) -> DeviceStream | None:
    """A stream that brings batches to a CUDA device; None for another device, which needs none."""
    if device.type != "cuda":
        return None
    return DeviceStream(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


class Crossing:
    """Counts what crosses the bus between RAM and a device, and how many rows need not. Threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.num_bytes, self.asked, self.hits = 0, 0, 0

    def __reduce__(self) -> Any:  # a copy counts for itself, as in a process that Lightning spawns
        return Crossing, ()

    def add(self, num_bytes: int, asked: int = 0, hits: int = 0) -> None:
        """Count bytes, and rows that batches needed, some of which were on the device."""
        with self._lock:
            self.num_bytes, self.asked, self.hits = self.num_bytes + num_bytes, self.asked + asked, self.hits + hits

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        figures = {"data/bus_bytes": float(self.num_bytes)} if self.num_bytes else {}
        if not self.asked:
            return figures
        hits = {"data/cache_hits": float(self.hits), "data/cache_hit_rate": self.hits / self.asked}
        return figures | {"data/cache_asked": float(self.asked)} | hits


class Taken(NamedTuple):
    """The arrays of a type, and the rows that a batch takes of them.

    Attributes:
        arrays: By name.
        rows: Which rows. None where the arrays are the batch's own already, and labels are as it is to have them.
    """

    arrays: Mapping[str, Tensor]
    rows: Tensor | None = None


class Content(NamedTuple):
    """What a batch is made of, in the order of the types.

    Attributes:
        types: The types of the graph.
        apart: The batch by types.
        nodes: The arrays of each node type.
        edges: The arrays of each edge type.
        seed_type: The node type of the seeds, or the edge type of the targets.
        extra: What the sampler says of all nodes, of the edges of a graph without types, and of the seeds or targets.
        coverage: That of the seeds, where it is no array of a type.
    """

    types: TypeNames
    apart: Apart
    nodes: Sequence[Taken]
    edges: Sequence[Taken]
    seed_type: str | EdgeType
    extra: Mapping[str, Tensor]
    coverage: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, sample: Sample, seed_type: str | None = None) -> Content:
        """Return the content of a sample of a graph, whose seeds may be of several types if one is named."""
        types, of_nodes, of_edges = graph.types, graph.types.node_arrays, graph.types.edge_arrays
        is_one = len(types.node_types) == len(types.edge_types) == 1
        apart = of_one_type(sample) if is_one else take_apart(graph, sample, with_ids=any(of_edges.values()))
        nodes = [Taken(of_nodes[kind], ids) for kind, ids in zip(types.node_types, apart.nodes, strict=True)]
        edges = taken_of_edges(graph, apart) if sample.edge_ids is not None else [Taken({})] * len(apart.rows)
        content = cls.by_types(types, apart, sample, nodes, edges, seed_type)
        coverage = vars(graph).get("node_arrays", {}).get("coverage")
        if coverage is None or any("coverage" in arrays for arrays in of_nodes.values()):  # an array like any other
            return content
        return content._replace(coverage=coverage[sample.nodes[: sample.num_sampled_nodes[0]]])

    @classmethod
    def by_types(
        cls,
        types: TypeNames,
        apart: Apart,
        sample: Sample,
        nodes: Sequence[Taken],
        edges: Sequence[Taken],
        seed_type: str | None = None,
    ) -> Content:
        """Return the content of a sample that was taken apart."""
        weights = {"edge_weight": sample.edge_weight, "node_norm": sample.node_norm}  # of samplers that know no types
        extra = {name: array for name, array in weights.items() if array is not None} | dict(sample.extra)
        seeds = _seed_type(types, apart, sample) if seed_type is None else seed_type
        return cls(types, apart, nodes, edges, seeds, extra)


def taken_of_edges(graph: Graph, apart: Apart) -> list[Taken]:
    """Return what a batch takes of the arrays of each edge type, by where its edges stand in a graph or in a shard."""
    of_edges = zip(graph.types.edge_arrays.values(), apart.rows, strict=True)
    return [
        Taken(arrays, places_of(graph, number, rows.edge_ids)) if arrays else Taken({})
        for number, (arrays, rows) in enumerate(of_edges)
    ]


class Stores(NamedTuple):
    """An empty batch, and its stores: of each type, of the seeds' type, and of what belongs to no type."""

    batch: Any
    nodes: Sequence[Any]
    edges: Sequence[Any]
    of_seeds: Any
    of_all: Any

    @classmethod
    def of(cls, types: TypeNames, seed_type: str | EdgeType) -> Stores:
        """Return those of a ``HeteroData``, or of a ``Data`` if the types have no names."""
        if have_names(types):
            batch = SampledHeteroData.of(types, seed_type)
            return cls(batch, batch.node_stores, batch.edge_stores, batch[seed_type], batch._global_store)
        plain = SampledData()
        store = plain._store
        return cls(plain, [store], [store], store, store)


def assemble(
    graph: Graph, sample: Sample, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch of a sample, with the rows of the graph's arrays for its nodes and edges.

    Args:
        graph: The graph that was sampled. With types, the batch is a
            :class:`~lightning_gnn_dist.batches.batch.SampledHeteroData`.
        sample: The batch's nodes and edges.
        pool_of: Returns the pool that lends memory for the array of a name, or None.
        widen: Convert float16, bfloat16 and int8 with scales to float32; a type keeps that one, but in ``y``. False:
            arrays keep their types.
        all_labels: Give ``y`` a row for each node. Otherwise it has one for each seed, and no more.
    """
    return made_of(Content.of(graph, sample), pool_of, widen=widen, all_labels=all_labels)


def made_of(
    content: Content, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch, as :func:`assemble` does, of what is taken of arrays."""
    stores, asked = Stores.of(content.types, content.seed_type), ends_of(content.seed_type)
    kinds = zip(content.types.node_types, stores.nodes, content.nodes, content.apart.num_sampled, strict=True)
    for kind, store, (arrays, rows), counts in kinds:
        if not all_labels and kind not in asked:
            arrays = {name: array for name, array in arrays.items() if name != LABELS}
        num_labels = None if all_labels else counts[0]
        store._mapping |= gathered(arrays, rows, pool_of, widen=widen, num_labels=num_labels, kind=kind)
    for store, ids in zip(stores.nodes, content.apart.nodes, strict=True):
        store._mapping.setdefault("n_id", ids)
    for edge_type, store, (arrays, rows) in zip(content.types.edge_types, stores.edges, content.edges, strict=True):
        store._mapping |= gathered(arrays, rows, pool_of, widen=widen, kind=edge_type)
        store._edge_arrays = frozenset(arrays)
    is_plain = stores.of_all is stores.of_seeds  # which decides in what order batches list what was drawn
    if content.extra and is_plain:
        _add_extra(stores, content)
    _add_sizes(stores, content)
    if content.extra and not is_plain:
        _add_extra(stores, content)
    made: SampledData = stores.batch
    return made


def _add_sizes(stores: Stores, content: Content) -> None:
    """Write how many nodes and edges the hops have, and promise the edges."""
    types, apart, asked = content.types, content.apart, ends_of(content.seed_type)
    stores.of_all._mapping["batch_size"] = sum(per_hop[0] for per_hop in apart.num_sampled)
    if content.coverage is not None:
        stores.of_all._mapping["coverage"] = content.coverage
    for kind, store, ids, per_hop in zip(types.node_types, stores.nodes, apart.nodes, apart.num_sampled, strict=True):
        if store is not stores.of_all:  # a ``Data`` counts them itself
            store._mapping["num_nodes"] = ids.numel()
        store._mapping["num_sampled_nodes"] = list(per_hop)
        if kind in asked:
            store._mapping["batch_size"] = per_hop[0]
    x = {kind: store._mapping.get("x") for kind, store in zip(types.node_types, stores.nodes, strict=True)}
    upto = {kind: list(accumulate(counts)) for kind, counts in zip(types.node_types, apart.num_sampled, strict=True)}
    is_corrected = "edge_weight" in content.extra
    for (sender, _, receiver), store, rows in zip(types.edge_types, stores.edges, apart.rows, strict=True):
        store._mapping["num_sampled_edges"] = list(rows.num_sampled)
        weight, csr = store._mapping.get("edge_weight"), (rows.indptr, rows.indices)
        ends = upto[receiver], upto[sender]
        blocks = blocks_of(*ends, rows.num_sampled, csr, x[sender], weight, is_corrected=is_corrected)
        store.promise(blocks, len(rows.num_sampled))


def _add_extra(stores: Stores, content: Content) -> None:
    """Give each type its rows of what the sampler says of all nodes, and the seeds or targets what it says of them."""
    num_seeds = [per_hop[0] for per_hop in content.apart.num_sampled]
    for name, array in content.extra.items():
        if name == SEED_TIME or name.startswith(LABELS_OF_LINKS):
            stores.of_seeds._mapping[name] = in_types(array, num_seeds) if name == ENDS else array
            continue
        for number, store in enumerate(stores.nodes):
            store._mapping[name] = array if len(stores.nodes) == 1 else array[content.apart.kinds == number]


def pools_of_type(pool_of: PoolOf, kind: str | EdgeType) -> PoolOf:
    """Return the pools of the arrays of a type."""
    return lambda name: pool_of(f"{kind} {name}")


def _seed_type(types: TypeNames, apart: Apart, sample: Sample) -> str | EdgeType:
    """The type of the seeds; of a batch without any, that of the training nodes."""
    if sample.target_type is not None:
        return types.edge_types[sample.target_type]
    found = [kind for kind, counts in zip(types.node_types, apart.num_sampled, strict=True) if counts[0]]
    if len(found) > 1:
        raise ValueError(f"The seeds of a batch must be nodes of one type, got some of {found}.")
    return found[0] if found else types.seed_type()


class FileRows:
    """Assembles batches from a graph's files: slower than from its maps, with less memory.

    Args:
        graph: The graph. Those of its arrays that are in RAM are read there.
    """

    def __init__(self, graph: Graph) -> None:
        types, maps = graph.types, all_maps()
        self._structure = [MappedRows(array, maps) for array in (graph.indptr, graph.indices, types.edge_type)]
        of_types = [*types.node_arrays.values(), *types.edge_arrays.values()]
        self._files = {id(array): MappedRows(array, maps) for arrays in of_types for array in arrays.values()}

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
Finish = Callable[[SampledData], SampledData]
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
        finish: Makes of each batch what is handed out. Default: the batch itself.
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
        finish: Finish | None = None,
        crossing: Crossing | None = None,
    ) -> None:
        if not isinstance(sampler, Sampler) or isinstance(sampler, type):
            raise TypeError(f"sampler must be one like NeighborSampler([15, 10]), got {sampler!r}.")
        super().__init__(graph.num_nodes if num_ids is None else num_ids, stream)
        self._graph, self._sampler = graph, sampler
        self._widen, self._all_labels, self._finish, self._crossing = widen, all_labels, finish, crossing
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
        batches = handed_out(partial(self._batches_around, *how), self._stream)
        return batches if self._finish is None else map(self._finish, batches)

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
                device = device_of_batch(batch)
                store_of_seeds(batch).input_id = numbers if numbers.device == device else sent(numbers, device)
        return batches

    def _assembled(self, graph: Graph, samples: Sequence[Sample]) -> list[SampledData]:
        if self._files is not None:
            self._release(graph)
        how: Any = {"widen": self._widen, "all_labels": self._all_labels}
        batches = []
        for sample in samples:
            if self._files is not None and graph is self._graph:
                batches.append(self._files.made_of(Content.of(graph, sample), **how))
            elif sample.is_constant:
                batches.append(self._of_whole_part(graph, sample, how))
            else:
                batches.append(made_of(Content.of(graph, sample), self._pool_of, **how))
        if self._stream is not None and self._crossing is not None:
            self._crossing.add(sum(bytes_of(batch) for batch in batches if device_of_batch(batch).type == "cpu"))
        return batches

    def _release(self, graph: Graph) -> None:
        if self._files is not None and graph is self._graph:  # a copy on a device has no pages of files
            self._files.release()

    def _rows_of(self, name: str, array: Tensor, rows: Tensor) -> Tensor:
        """Return rows of an array, in lent memory."""
        return gather_rows(array, rows, self._pool_of(name)) if self._files is None else self._files.take(array, rows)

    def _of_whole_part(self, graph: Graph, sample: Sample, how: Any) -> SampledData:
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
