"""What an evaluation costs: counted on the graph where every host has it, or on shards by draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.layers.choice import Counter, Evaluated, seeds_at_once
from lightning_gnn_dist.layers.layered_loader import ReadyRows
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.whole_nodes import WholeNodes, folder_beside
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime
from lightning_gnn_dist.wire.channel import Channel


class Costs(Protocol):
    """Knows what an evaluation costs."""

    @property
    def place(self) -> int:
        """The place of this rank's share among the equal shares of an evaluation."""

    def batch_size(self, evaluated: Evaluated, sampler: Sampler, model: ModelLayers | None) -> int:
        """Return how many seeds a batch has, the same on all ranks. Collective."""

    def ready_rows(self, evaluated: Evaluated, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        """Return what computes the rows of all seeds layer by layer, or None where batches do it at less cost."""

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        """Return the bytes of a batch around each of some lists of nodes, with one hop more than an evaluation has.

        None where these are more than ``most``, or where that hop brings no edge. Collective.
        """

    def is_whole_graph(self, seeds: Tensor) -> bool:
        """Return whether a batch of an evaluation around these nodes is known to be the whole graph."""


class WholeCosts:
    """Counts what an evaluation costs, so that it is done at the least cost.

    All ranks have the graph, so they find the same without a word.

    Args:
        graph: The graph.
        running: The run, and how its batches are made.
    """

    def __init__(self, graph: Graph, running: Running) -> None:
        self._graph, self._running = graph, running

    @property
    def place(self) -> int:
        """The place of this rank's share among the equal shares of an evaluation."""
        return self._running.rank

    def batch_size(self, evaluated: Evaluated, sampler: Sampler, model: ModelLayers | None) -> int:
        """Return how many seeds a batch has, the same on all ranks. Collective."""
        size, budget = self._running.settings.batch_size, self._running.bytes_of_evaluation
        if self._running.settings.evaluation.sampler is not None:
            return size
        if isinstance(self._running.sampler_of_evaluation(), SeesByTime):
            return seeds_at_once(self._graph, sampler, evaluated, self._counter(), size, budget)
        return self._counter().batch_size(evaluated, size, budget)

    def ready_rows(self, evaluated: Evaluated, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        """Return what computes the rows of all seeds layer by layer, or None where batches do it at less cost."""
        if model is None or not (model.are_better or self._counter().is_cheaper_by_layer(evaluated, batch_size)):
            return None
        run, (seeds, num_ranks) = self._running, (evaluated.nodes, evaluated.num_ranks)
        if model.norm is not None:  # such a layer takes all rows at once, so every rank computes them
            seeds, num_ranks = torch.arange(self._graph.num_nodes), 1

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> WholeNodes:
            limits = channel.size, run.bytes_of_evaluation
            return WholeNodes(self._graph, seeds, model.layers, *limits, widen=run.widen)

        assert run.trainer is not None
        budget = run.bytes_of_evaluation, run.settings.evaluation.bytes
        return ReadyRows(run.trainer, nodes_of_rank, num_ranks, *budget, folder_beside(self._graph), run.dtype)

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        """Return the bytes of a batch around each of some lists of nodes, with one hop more than an evaluation has.

        None where these are more than ``most``, or where that hop brings no edge. Collective.
        """
        counter = self._counter(1)
        return [counter.bytes_around(nodes, most) for nodes in some]

    def is_whole_graph(self, seeds: Tensor) -> bool:
        """Return whether a batch of an evaluation around these nodes is known to be the whole graph."""
        return self._counter().is_whole_graph(seeds)

    def _counter(self, more_hops: int = 0) -> Counter:
        num_hops = self._running.sampler_of_evaluation(more_hops).num_hops
        return Counter(self._graph, num_hops, self._running.module)
