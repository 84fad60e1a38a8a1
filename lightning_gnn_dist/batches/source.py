"""Batch sources: they take seeds and keys, and return batches.

    keys -> seeds -> source.make(seeds, keys) -> batches

A loader decides on the order of seeds, the threads and the look-ahead; a source knows graph, sampler and device.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import (
    ENDS,
    LABELS,
    LABELS_OF_LINKS,
    PoolOf,
    SampledData,
    SampledHeteroData,
    blocks_of,
    device_of_batch,
    ends_of,
    gathered,
    store_of_seeds,
)
from lightning_gnn_dist.batches.pool import BufferPool, Pool, Widen
from lightning_gnn_dist.engine.apart import in_types, places_of, take_apart
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.sample import SEED_TIME, Apart, BatchKey, Sample, of_one_type
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.names import offered
from lightning_gnn_dist.sampling.base import OrdersSeeds, Sampler


class Stream(Protocol):
    """Brings batches to a device beside the work of the thread that trains."""

    @property
    def device(self) -> torch.device:
        """The device that trains."""
        ...

    @property
    def pool(self) -> Pool:
        """Lends memory that batches are brought from."""
        ...

    def open(self) -> AbstractContextManager[None]:
        """What this thread launches in the block runs on the device, on a stream beside the training."""
        ...

    def load(self, batches: Iterable[SampledData]) -> deque[Any]:
        """Make a bulk of which :meth:`receive` takes one batch after the other."""
        ...

    def receive(self, bulk: deque[Any]) -> SampledData:
        """Take the first batch. Work that this thread launches from here on waits until it is complete."""
        ...


def handed_out(make: Callable[[], Iterable[SampledData]], stream: Stream | None) -> Iterator[SampledData]:
    """Call ``make`` now, on the stream if there is one, and return an iterator over its batches.

    Iterating waits for the device, so the thread that trains must do it. A batch is not held once it was taken.
    """
    if stream is None:
        made = deque(make())
        return (made.popleft() for _ in range(len(made)))
    with stream.open():
        bulk = stream.load(make())
    return (stream.receive(bulk) for _ in range(len(bulk)))


def stream_to(device: torch.device) -> Any:
    """A stream that brings batches to a CUDA device; None for another device, which needs none.

    Where the extension that has it was taken out, batches stay in RAM, and the trainer brings them.
    """
    found = offered("stream to a device") if device.type == "cuda" else None
    return None if found is None else found(device)


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
        if sample.target_type is not None:
            return cls(types, apart, nodes, edges, seed_type or types.edge_types[sample.target_type], extra)
        found = [kind for kind, counts in zip(types.node_types, apart.num_sampled, strict=True) if counts[0]]
        if seed_type is None and len(found) > 1:
            raise ValueError(f"The seeds of a batch must be nodes of one type, got some of {found}.")
        if seed_type is None:  # of a batch without seeds, that of the training nodes
            seed_type = found[0] if found else types.seed_type()
        return cls(types, apart, nodes, edges, seed_type, extra)


def taken_of_edges(graph: Graph, apart: Apart) -> list[Taken]:
    """Return what a batch takes of the arrays of each edge type, by where its edges stand in a graph or in a shard."""
    of_edges = zip(graph.types.edge_arrays.values(), apart.rows, strict=True)
    return [
        Taken(arrays, places_of(graph, number, rows.edge_ids)) if arrays else Taken({})
        for number, (arrays, rows) in enumerate(of_edges)
    ]


def assemble(
    graph: Graph, sample: Sample, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch of a sample, with the rows of the graph's arrays for its nodes and edges.

    Args:
        graph: The graph that was sampled. With types, the batch is a
            :class:`~lightning_gnn_dist.batches.batch.SampledHeteroData`.
        sample: The batch's nodes and edges.
        pool_of: Returns the pool that lends memory for the array of a name, or None.
        widen: Convert float16 and bfloat16 to float32; a type keeps that one, but in ``y``. False: arrays keep their
            types.
        all_labels: Give ``y`` a row for each node. Otherwise it has one for each seed, and no more.
    """
    return made_of(Content.of(graph, sample), pool_of, widen=widen, all_labels=all_labels)


def made_of(
    content: Content, pool_of: PoolOf = lambda _: None, *, widen: Widen = True, all_labels: bool = True
) -> SampledData:
    """Make a batch, as :func:`assemble` does, of what is taken of arrays: a ``HeteroData`` if its types have names."""
    types, apart, asked = content.types, content.apart, ends_of(content.seed_type)
    batch: Any = SampledHeteroData.of(types, content.seed_type) if types.have_names else SampledData()
    nodes, edges, of_all = batch.node_stores, batch.edge_stores, batch.stores[0]._mapping
    num_seeds, x, upto = [per_hop[0] for per_hop in apart.num_sampled], dict[str, Any](), dict[str, list[int]]()
    of_nodes = zip(types.node_types, nodes, content.nodes, apart.nodes, apart.num_sampled, strict=True)
    for kind, store, (arrays, rows), ids, per_hop in of_nodes:
        if not all_labels and kind not in asked:
            arrays = {name: array for name, array in arrays.items() if name != LABELS}
        num_labels = None if all_labels else per_hop[0]
        store._mapping |= gathered(arrays, rows, pool_of, widen=widen, num_labels=num_labels, kind=kind)
        store._mapping.setdefault("n_id", ids)
        x[kind], upto[kind] = store._mapping.get("x"), list(accumulate(per_hop))
    for edge_type, store, (arrays, rows) in zip(types.edge_types, edges, content.edges, strict=True):
        store._mapping |= gathered(arrays, rows, pool_of, widen=widen, kind=edge_type)
        store._edge_arrays = frozenset(arrays)
    for name, array in content.extra.items():
        if name == SEED_TIME or name.startswith(LABELS_OF_LINKS):  # of the seeds or targets alone
            store_of_seeds(batch)._mapping[name] = in_types(array, num_seeds) if name == ENDS else array
            continue
        for number, store in enumerate(nodes):
            store._mapping[name] = array if len(nodes) == 1 else array[apart.kinds == number]
    of_all["batch_size"] = sum(num_seeds)
    if content.coverage is not None:
        of_all["coverage"] = content.coverage
    for kind, store, ids, per_hop in zip(types.node_types, nodes, apart.nodes, apart.num_sampled, strict=True):
        if store._mapping is not of_all:  # a ``Data`` counts them itself
            store._mapping["num_nodes"] = ids.numel()
        store._mapping["num_sampled_nodes"] = list(per_hop)
        if kind in asked:
            store._mapping["batch_size"] = per_hop[0]
    is_corrected = "edge_weight" in content.extra
    for (sender, _, receiver), store, of_type in zip(types.edge_types, edges, apart.rows, strict=True):
        weight = store._mapping.get("edge_weight")
        store._mapping["num_sampled_edges"] = list(of_type.num_sampled)
        blocks = blocks_of(of_type, upto[receiver], upto[sender], x[sender], weight, is_corrected=is_corrected)
        store.promise(blocks, len(of_type.num_sampled))
    made: SampledData = batch
    return made


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
        stream: Brings batches to a device. With None they stay where they are made.

    Attributes:
        is_remote: Whether rows are asked of other ranks or of files: once for a bulk, by one thread, bulk after bulk.
        is_short: Whether there is so little memory that full neighbourhoods are made one at a time.
    """

    is_remote = False
    is_short = False

    def __init__(self, stream: Stream | None) -> None:
        self._stream, self._num_buffers = stream, 0
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
        widen: Convert float16 and bfloat16 to float32 as they are gathered, or all but one type.
        all_labels: Give ``y`` a row for each node, not for each seed alone.
        stream: Brings batches to a device. Default: they stay where they are made.
        finish: Makes of each batch what is handed out. Default: the batch itself.
    """

    def __init__(
        self,
        graph: Graph,
        sampler: Sampler,
        *,
        widen: Widen = True,
        all_labels: bool = True,
        stream: Stream | None = None,
        finish: Finish | None = None,
    ) -> None:
        super().__init__(stream)
        self._graph, self._sampler = graph, sampler
        self._widen, self._all_labels, self._finish = widen, all_labels, finish
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
        how: Any = {"widen": self._widen, "all_labels": self._all_labels}
        return [
            self._of_whole_part(graph, sample, how)
            if sample.is_constant
            else made_of(Content.of(graph, sample), self._pool_of, **how)
            for sample in samples
        ]

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
