"""The source of batches of a sharded graph: other ranks are asked for what they own, in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.batches.ahead.source import AheadSource
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.device_stream import DeviceStream
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.sharded.messages import Message, Question
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import (
    Bulk,
    LayerWise,
    begin,
    check_sampler,
    finish,
    importance_of,
)
from lightning_gnn_dist.sharded.temporal.times import prepare_times


class ShardedSource(AheadSource[Bulk]):
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``FastGCNSampler`` or a ``TemporalSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``, or one that samples around edges.
        loading: How batches are made.
        num_ids: Seeds must lie below this number. Default: the number of nodes.
        stream: Brings batches to a device. With None they stay in RAM.
        stays: The type narrower than float32 that a step computes in, if there is one.
    """

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        loading: Loading,
        *,
        num_ids: int | None = None,
        stream: DeviceStream | None = None,
        stays: torch.dtype | None = None,
    ) -> None:
        super().__init__(graph.cache, loading, stream, stays)
        self._graph, self._sampler = graph, check_sampler(sampler, graph.types)
        if isinstance(self._sampler, LayerWise):
            importance_of(graph, self._sampler)  # now, as all ranks are here, and not in the background
        elif isinstance(self._sampler, TemporalSampler):
            prepare_times(graph, self._sampler.time)
        self.num_ids = graph.num_nodes if num_ids is None else num_ids

    def order(self, seeds: Tensor, seed: int, epoch: int) -> None:
        """Return None, for any order: no sampler of shards groups its seeds."""

    def _ask(self, questions: list[Question]) -> list[list[Message]]:
        return self._graph.ask(questions)

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[Bulk]:
        return begin(self._graph, self._sampler, seeds, keys)

    def _fill(self, bulk: Bulk, coming: Sequence[Bulk]) -> Steps[list[SampledData]]:
        widen, all_labels = self._widen, self._loading.all_labels
        with self._graph.making:  # what the cache holds stays until the bulk has it
            made = finish(self._graph, bulk, coming, self._pool_of, widen=widen, all_labels=all_labels)
            return (yield from made)

    def spare_memory(self) -> None:
        """Do nothing: only rows of the own shard are memory-mapped, and few of them are held."""
