"""Loaders over a sharded graph: all ranks make their batches together, when they are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.device_stream import DeviceStream
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sharded.graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import batches, check_sampler


class ShardedLoader(BatchLoader):
    """The batches that :class:`BatchLoader` would make of the whole graph. Making a bulk is collective.

    All ranks need as many batches, of the same ``bulk_size``. Nothing runs in the background: a bulk that one rank has
    begun and another will never ask for would leave it waiting.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``.
        seeds: Ids of the nodes to compute on, of the whole graph.
        num_batches: Batches a pass.
        seed: Decides every random choice.
        shuffle: Deal the seeds in another order every pass.
        bulk_size: Batches that are sampled together. Features are fetched once for all nodes of a bulk.
        widen: Make float32 of narrower features.
        lane: Brings batches to a device, where they are handed out. None: they stay in RAM.
    """

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        seeds: Tensor,
        num_batches: int,
        *,
        seed: int,
        shuffle: bool,
        bulk_size: int,
        widen: bool,
        lane: DeviceStream | None = None,
    ) -> None:
        self._drawn_by, self._whole = check_sampler(sampler), graph
        super().__init__(
            graph.shard.rows,
            self._drawn_by,
            seeds,
            num_batches,
            seed=seed,
            shuffle=shuffle,
            bulk_size=bulk_size,
            num_threads=0,
            widen=widen,
            num_ids=graph.num_nodes,
            lane=lane,
        )

    def _batches_around(self, seeds: list[Tensor], places: list[BatchKey]) -> list[SampledData]:
        return batches(self._whole, self._drawn_by, seeds, places, widen=self._widen)


@dataclass(frozen=True, eq=False)
class ShardedGlobalBatches(GlobalBatches):
    """Correction batches of a sharded graph. Making a bulk is collective, so every rank has a slice of each batch.

    Args:
        whole: The graph to sample, in place of ``graph``.
    """

    whole: ShardedGraph | None = None

    def make(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[SampledData]:
        assert self.whole is not None
        return batches(self.whole, check_sampler(self.sampler), seeds, keys, widen=self.widen)
