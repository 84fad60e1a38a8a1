"""What an evaluation costs on shards: measured by draws, as no rank can count on the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.shards.nodes import SHARE_OF_INPUTS, ShardNodes
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.extensions.shards.source import check_sampler, sample_bulk
from lightning_gnn_dist.homes.access import Costs
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.layers.choice import Evaluated, bytes_of_batch, widest_row
from lightning_gnn_dist.layers.layered_loader import ReadyRows
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.collectives import all_gather_rows


class ShardCosts(Costs):
    """Measures what an evaluation costs.

    Args:
        graph: Returns the whole graph.
        running: The run, and how its batches are made.
        num_shards: How many shards there are.
        folder: Where rows go that take too much memory.
    """

    def __init__(self, graph: Callable[[], ShardedGraph], running: Running, num_shards: int, folder: Path) -> None:
        self._whole, self._running, self._num_shards, self._folder = graph, running, num_shards, folder

    @property
    def place(self) -> int:
        """The place of the share that lies mostly in the own shard."""
        copy, shard = divmod(self._running.rank, self._num_shards)
        return shard * (self._running.num_ranks // self._num_shards) + copy

    def batch_size(self, evaluated: Evaluated, sampler: Sampler, model: ModelLayers | None) -> int:
        """Double the training batch as long as the neighbourhood of a batch fits all ranks' budgets. Collective.

        Trees by time share no nodes: a batch of them is never larger than in training, and halved where it must be.
        """
        size, most = self._running.settings.batch_size, evaluated.most
        if self._running.settings.evaluation.sampler is not None or model is not None:
            return size
        share, of_nodes = evaluated.share(self.place), self._running.sampler_of_evaluation()
        if isinstance(of_nodes, SeesByTime):
            while size > 1 and not self._fits(share[:size], sampler):
                size //= 2
            return size
        while size < most and self._fits(evaluated.nodes_of(share[: 2 * size]), of_nodes):
            size *= 2
        return size

    def ready_rows(self, evaluated: Evaluated, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        if model is None:
            return None
        run, folder = self._running, self._folder
        if model.norm is not None and evaluated.num_ranks > 1:
            raise ValueError(
                f"{model.norm} takes the rows of all nodes at once, and no rank has those of a sharded graph: choose a "
                "norm of single rows such as BatchNorm, or give every host the whole graph."
            )

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> ShardNodes:
            most = run.bytes_of_evaluation // SHARE_OF_INPUTS
            return ShardNodes(self._whole().shard, model.layers, channel, most, folder, widen=run.widen)

        assert run.trainer is not None
        num_ranks, budget = evaluated.num_ranks, (run.bytes_of_evaluation, run.settings.evaluation.bytes)
        return ReadyRows(run.trainer, nodes_of_rank, num_ranks, *budget, folder, run.dtype)

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        sizes = dict[int, int]()
        small, num_hops = list(range(len(some))), self._running.sampler_of_evaluation(1).num_hops
        for hops in range(1, num_hops + 1):  # hop by hop, so that what is large is never drawn whole
            samples = self._drawn([some[at] for at in small], NeighborSampler([-1] * hops))
            grown = {at: sample for at, sample in zip(small, samples, strict=True) if sample.num_sampled_edges[-1]}
            sizes = {at: size for at, sample in grown.items() if (size := self._bytes_of(sample)) <= most}
            small = list(sizes)
        return [sizes.get(at) for at in range(len(some))]

    def is_whole_graph(self, seeds: Tensor) -> bool:
        """Return False: nobody knows."""
        return False

    def _fits(self, seeds: Tensor, sampler: Sampler) -> bool:
        """Return whether batches of each rank's seeds fit the budgets of all ranks. Collective."""
        (sample,) = self._drawn([seeds], sampler)
        return int(all_gather_rows(torch.tensor([self._bytes_of(sample)])).max()) <= self._running.bytes_of_evaluation

    def _drawn(self, seeds: list[Tensor], sampler: Sampler) -> list[Sample]:
        graph, keys = self._whole(), [BatchKey(0, 0, 0)] * len(seeds)
        return graph.answered(sample_bulk(graph, check_sampler(sampler, graph.types), seeds, keys))

    def _bytes_of(self, sample: Sample) -> int:
        rows, widest = self._whole().shard.rows, widest_row(self._running.module)
        return bytes_of_batch(rows, widest, len(sample.nodes), len(sample.indices))
