"""The whole part as the one batch of a pass, whose layers exchange the rows of the boundary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, one_hop
from lightning_gnn_dist.batches.loader import Batches
from lightning_gnn_dist.batches.part_batch import PartBatch
from lightning_gnn_dist.batches.source import WRITTEN, writes_of
from lightning_gnn_dist.boundary.exchange_plan import ExchangePlan, Owners, Step, exchange_plan
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layerwise.layers import Layer
from lightning_gnn_dist.layerwise.through_layers import rows_of_layer
from lightning_gnn_dist.sampling.block import Block
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.row_exchange import RowExchange, tied
from lightning_gnn_dist.wire.shipments import Thrift


class ExchangeLoader:
    """Yields the same batch in every pass: all that a rank computes on its part. It is made by all ranks together.

    Args:
        part: The rank's nodes, and behind them all others that send to them.
        seeds: The nodes that the rank learns from, positions in the part.
        owners: The rank of every node of the part.
        channel: The ranks.
        num_layers: Layers of the model.
        thrift: How the exchange saves bytes and time.
        seed: Decides what is random in that.
        weigh: Whether gradients are weighed by the rank's share of the seeds, for a strategy that takes the mean over
            ranks.
        make: Returns the batch of a sample of the part.
        all_labels: Whether ``y`` has a row for each node.
        device: Where the model computes.
        inputs: A number for each seed, that batches hold as ``input_id``. Default: they hold none.
    """

    waited_seconds = 0.0  # nothing is waited for

    def __init__(
        self,
        part: Graph,
        seeds: Tensor,
        owners: Owners,
        channel: Channel,
        num_layers: int,
        *,
        thrift: Thrift,
        seed: int,
        weigh: bool,
        make: Callable[[Sample], SampledData],
        all_labels: bool,
        device: torch.device,
        inputs: Tensor | None = None,
    ) -> None:
        plan = exchange_plan(part, seeds, owners, channel, num_layers)
        self.num_seeds = plan.num_seeds
        batch = make(plan.sample)
        batch.batch_size = plan.num_seeds
        if "y" in batch and not all_labels:
            batch.y = batch.y[: plan.num_seeds]
        if inputs is not None:
            batch.input_id = inputs
        self._exchange = RowExchange(channel, seed, thrift)
        weight = plan.share * channel.size if weigh else 1.0
        self._batch = PartBatch.of(batch.to(device), _LayerRun(plan, self._exchange, weight))
        self._written = writes_of(self._batch)

    def between(self, start: int, stop: int | None, then: Sequence[range] = ()) -> Batches:
        """Yield the batch as often as the stream has batches from ``start`` to ``stop``, or without end.

        It is there before it is asked for, whatever comes ``then``.
        """
        while stop is None or start < stop:
            if writes_of(self._batch) != self._written:
                raise RuntimeError(WRITTEN)
            start += 1
            self._exchange.begin_step(start)
            yield copy.copy(self._batch)

    def close(self) -> None:
        """End the connections. Not collective."""
        self._exchange.close()


class _LayerRun:
    """Runs layers on the batch of a part, with an exchange before each layer but the first."""

    def __init__(self, plan: ExchangePlan, exchange: RowExchange, weight: float) -> None:
        self._plan, self._exchange, self._weight = plan, exchange, weight
        self._views: list[tuple[Block, Tensor | None]] = []

    def __call__(self, batch: PartBatch, layers: Sequence[Layer]) -> Tensor:
        steps = self._plan.steps
        if len(layers) != len(steps):
            raise ValueError(
                f"layers() returns {len(layers)} layers, and the sampler was told of {len(steps)}: give it as many, "
                f"WholePartSampler({len(layers)})."
            )
        views, thread = self._views_of(batch.outermost), self._exchange.begin()
        first = one_hop(batch, batch.outermost)
        rows = rows_of_layer(layers[0](first), steps[0].num_dst, 0)
        for index in range(1, len(layers)):
            step = steps[index]
            assert step.route is not None
            x, thread = self._exchange.gather(rows, thread, step.route, index - 1)
            block, nodes = views[index]
            rows = rows_of_layer(layers[index](one_hop(first, block, x, nodes)), step.num_dst, index)
        return tied(rows, thread, self._weight)

    def _nodes_of(self, step: Step, device: torch.device) -> Tensor | None:
        """Return the positions in the batch of the nodes that a layer reads, or None if it reads all."""
        num_own, num_all = self._plan.num_own, len(self._plan.sample.nodes)
        if step.num_own + step.num_remote == num_all:
            return None
        others = torch.arange(num_own, num_own + step.num_remote, device=device)
        return torch.cat([torch.arange(step.num_own, device=device), others])

    def _views_of(self, outermost: Block) -> list[tuple[Block, Tensor | None]]:
        """Return the block of each layer and where its nodes stand in the batch, None if it reads all.

        They are built once for the batch's block, which changes with the device alone.
        """
        if not self._views or self._views[0][0] is not outermost:
            device, others = outermost.indices.device, self._plan.steps[1:]
            inner = [(self._block(outermost, step), self._nodes_of(step, device)) for step in others]
            self._views = [(outermost, None), *inner]
        return self._views

    def _block(self, outermost: Block, step: Step) -> Block:
        num_own, num_edges = self._plan.num_own, int(outermost.indptr[step.num_dst])
        block = outermost.head(step.num_dst, step.num_own + step.num_remote, num_edges)
        if step.num_own == num_own:
            return block
        is_other = block.indices >= num_own  # rows of other ranks begin where those of own nodes end
        return replace(block, indices=torch.where(is_other, block.indices - (num_own - step.num_own), block.indices))
