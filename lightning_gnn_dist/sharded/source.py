"""The source of batches of a sharded graph: other ranks are asked for what they own, in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, bytes_of
from lightning_gnn_dist.batches.device_stream import DeviceStream, handed_out
from lightning_gnn_dist.batches.hetero import SampledHeteroData
from lightning_gnn_dist.batches.loading import Loading, widening
from lightning_gnn_dist.batches.pool import BufferPool, Pool
from lightning_gnn_dist.batches.source import Asked, Inputs, Made
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.layer_sampling import LayerWise, importance_of
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import AnyBulk, begin, check_sampler, finish
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph

MOST_KNOWN = 8  # bulks whose draws are known when rows are chosen for the cache
MOST_AHEAD = 32  # bulks, where they are so small that any number would fit


class ShardedSource:
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``FastGCNSampler`` or a ``TemporalSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
        stays: The type narrower than float32 that a step computes in, if there is one.
    """

    is_remote = True

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        loading: Loading,
        *,
        stream: DeviceStream | None = None,
        stays: torch.dtype | None = None,
    ) -> None:
        self._graph, self._sampler = graph, check_sampler(sampler, graph.shard.bounds.types)
        if isinstance(self._sampler, LayerWise):
            importance_of(graph, self._sampler)  # now, as all ranks are here, and not in the background
        elif isinstance(self._sampler, TemporalSampler) and isinstance(graph, TypedShardedGraph):
            graph.prepare_times(self._sampler.time)
        self._loading, self._stream, self._widen = loading, stream, widening(loading, stays)
        self._pools: dict[str, BufferPool] = {}
        self._num_buffers = self._bulk_bytes = 0
        self.num_ids = graph.num_nodes

    def order(self, seeds: Tensor, seed: int, epoch: int) -> None:
        """Return None, for any order: no sampler of shards groups its seeds."""

    def depth(self, prefetch: int) -> int:
        """Return how many bulks of the largest size so far fit into ``ahead_bytes``, one at least; 0 for no bytes."""
        if not self._loading.ahead_bytes:
            return 0
        return min(max(1, self._loading.ahead_bytes // max(1, self._bulk_bytes)), MOST_AHEAD if self._bulk_bytes else 1)

    def keep_buffers(self, count: int) -> None:
        self._num_buffers = count

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        return next(self.make_in_turn(iter([(seeds, keys, inputs)])))[1]

    def make_in_turn(self, bulks: Iterator[Asked]) -> Iterator[Made]:
        """Make one bulk after the other. With a cache, bulks are drawn some way ahead of those that are made.

        They are two at first for each that is made, so that nobody waits long for the first one.
        """
        drawn: deque[tuple[AnyBulk, Inputs | None]] = deque()
        for made in count(1):
            looks = min(made, MOST_KNOWN) if self._graph.cache.num_rows else 1
            drawn.extend(map(self._drawn, islice(bulks, max(0, looks - len(drawn)))))
            if not drawn:
                return
            bulk, inputs = drawn.popleft()
            coming = [other for other, _ in drawn]
            yield len(bulk.samples), handed_out(partial(self._made, bulk, inputs, coming), self._stream)

    def _drawn(self, asked: Asked) -> tuple[AnyBulk, Inputs | None]:
        seeds, keys, inputs = asked
        return begin(self._graph, self._sampler, seeds, keys), inputs

    def _made(self, bulk: AnyBulk, inputs: Inputs | None, coming: Sequence[AnyBulk]) -> list[SampledData]:
        widen, all_labels = self._widen, self._loading.all_labels
        with self._graph.making:  # what the cache holds stays until the bulk has it
            made = finish(self._graph, bulk, coming, self._pool_of, widen=widen, all_labels=all_labels)
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            store = batch[batch.seed_type] if isinstance(batch, SampledHeteroData) else batch
            store.input_id = given
        self._bulk_bytes = max(self._bulk_bytes, sum(map(bytes_of, made)))
        return made

    def _pool_of(self, name: str) -> Pool | None:
        if self._stream is not None:
            return self._stream.pool
        return self._pools.setdefault(name, BufferPool(self._num_buffers)) if self._num_buffers else None

    def spare_memory(self) -> None:
        """Do nothing: only rows of the own shard are memory-mapped, and few of them are held."""

    def close(self) -> None:
        """Free the buffers. The data module closes the connections."""
        self._pools.clear()
