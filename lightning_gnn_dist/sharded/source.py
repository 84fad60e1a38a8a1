"""The source of batches of a sharded graph: other ranks are asked for what they own, in the background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, bytes_of
from lightning_gnn_dist.batches.device_stream import DeviceStream, handed_out
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.pool import BufferPool, Pool
from lightning_gnn_dist.batches.source import Inputs
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sharded.layer_sampling import LayerWise, importance_of
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import batches, check_sampler

MOST_AHEAD = 32  # bulks, where they are so small that any number would fit


class ShardedSource:
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``FastGCNSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
    """

    is_remote = True

    def __init__(
        self, graph: ShardedGraph, sampler: object, loading: Loading, *, stream: DeviceStream | None = None
    ) -> None:
        self._graph, self._sampler = graph, check_sampler(sampler)
        if isinstance(self._sampler, LayerWise):
            importance_of(graph, self._sampler)  # now, as all ranks are here, and not in the background
        self._loading, self._stream = loading, stream
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
        return handed_out(lambda: self._batches_around(seeds, keys, inputs), self._stream)

    def _batches_around(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None
    ) -> list[SampledData]:
        widen, all_labels = self._loading.widen, self._loading.all_labels
        made = batches(self._graph, self._sampler, seeds, keys, self._pool_of, widen=widen, all_labels=all_labels)
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            batch.input_id = given
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
