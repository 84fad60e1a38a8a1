"""What an evaluation costs where every host has the graph: counted on it, before batches are made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.layers.evaluating.choice import Counter, Evaluated, seeds_at_once
from lightning_gnn_dist.layers.evaluating.layered_loader import ReadyRows
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.whole_nodes import WholeNodes, folder_beside
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.wire.channel import Channel


class WholeCosts:
    """Counts what an evaluation costs. All ranks have the graph, so they find the same without a word.

    Args:
        graph: The graph.
        running: The run, and how its batches are made.
    """

    def __init__(self, graph: Graph, running: Running) -> None:
        self._graph, self._running = graph, running

    @property
    def place(self) -> int:
        return self._running.rank

    def batch_size(self, evaluated: Evaluated, sampler: Sampler, model: ModelLayers | None) -> int:
        size, budget = self._running.settings.batch_size, self._running.bytes_of_evaluation
        if self._running.settings.evaluation.sampler is not None:
            return size
        if isinstance(self._running.sampler_of_evaluation(), TemporalSampler):
            return seeds_at_once(self._graph, sampler, evaluated, self._counter(), size, budget)
        return self._counter().batch_size(evaluated, size, budget)

    def ready_rows(self, evaluated: Evaluated, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        if model is None or not (model.are_better or self._counter().is_cheaper_by_layer(evaluated, batch_size)):
            return None
        run, (seeds, num_ranks) = self._running, (evaluated.nodes, evaluated.num_ranks)
        if model.norm is not None:  # such a layer takes all rows at once, so every rank computes them
            seeds, num_ranks = torch.arange(self._graph.num_nodes), 1

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> WholeNodes:
            limits = channel.size, run.bytes_of_evaluation
            return WholeNodes(self._graph, seeds, model.layers, *limits, widen=run.widen)

        assert run.trainer is not None
        folder, budget = folder_beside(self._graph), run.bytes_of_evaluation
        return ReadyRows(run.trainer, nodes_of_rank, num_ranks, budget, folder, run.dtype)

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        counter = self._counter(1)
        return [counter.bytes_around(nodes, most) for nodes in some]

    def is_whole_graph(self, seeds: Tensor) -> bool:
        return self._counter().is_whole_graph(seeds)

    def _counter(self, more_hops: int = 0) -> Counter:
        num_hops = self._running.sampler_of_evaluation(more_hops).num_hops
        return Counter(self._graph, num_hops, self._running.module)
