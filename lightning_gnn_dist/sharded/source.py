"""The source of batches of a sharded graph: all ranks make them together, when they are due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.device_stream import DeviceStream, handed_out
from lightning_gnn_dist.batches.source import Inputs
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import batches, check_sampler


class ShardedSource:
    """Makes the batches that a source of the whole graph would make. Making them is collective.

    All ranks need the same number of batches, in bulks of one size: features are fetched once for all nodes of a bulk.
    Nothing runs in the background: a rank would wait for ever in a bulk that another never asks for.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``.
        widen: Make float32 of narrower features.
        all_labels: Give ``y`` a row for each node, not for each seed alone.
        stream: Brings batches to a device. With None they stay in RAM.
    """

    may_run_ahead = False

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        *,
        widen: bool = True,
        all_labels: bool = True,
        stream: DeviceStream | None = None,
    ) -> None:
        self._graph, self._sampler = graph, check_sampler(sampler)
        self._widen, self._all_labels, self._stream = widen, all_labels, stream
        self.num_ids = graph.num_nodes

    def order(self, seeds: Tensor, seed: int, epoch: int) -> None:
        """Return None, for any order: no sampler of shards groups its seeds."""

    def keep_buffers(self, count: int) -> None:
        """Do nothing: rows come from other ranks, each bulk in memory of its own."""

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        return handed_out(lambda: self._batches_around(seeds, keys, inputs), self._stream)

    def _batches_around(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None
    ) -> list[SampledData]:
        form = {"widen": self._widen, "all_labels": self._all_labels}
        made = batches(self._graph, self._sampler, seeds, keys, **form)
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            batch.input_id = given
        return made

    def spare_memory(self) -> None:
        """Do nothing: only rows of the own shard are memory-mapped, and few of them are held."""

    def close(self) -> None:
        """Do nothing: the data module closes the connections."""
