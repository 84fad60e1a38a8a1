"""The whole part as the one batch of a pass, whose layers exchange the rows of the boundary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.hetero import store_of_seeds
from lightning_gnn_dist.batches.loader import Batches
from lightning_gnn_dist.batches.one_hop import LayerView, Nodes, RowsOfTypes, one_hop, seen_by_layers
from lightning_gnn_dist.batches.part_batch import OfPart, part_batch_of
from lightning_gnn_dist.batches.source import WRITTEN, writes_of
from lightning_gnn_dist.boundary.exchange_plan import ExchangePlan, Owners, Step, exchange_plan
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.definition import Layer
from lightning_gnn_dist.layers.through_layers import layer_rows, of_seeds
from lightning_gnn_dist.sampling.block import Block
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.row_exchange import RowExchange, tied
from lightning_gnn_dist.wire.shipments import Thrift


class ExchangeLoader:
    """Yields the same batch in every pass: all that a rank computes on its part. It is made by all ranks together.

    Args:
        part: The rank's nodes, and all others that send to them.
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
        make: Callable[[Sample], Any],
        all_labels: bool,
        device: torch.device,
        inputs: Tensor | None = None,
    ) -> None:
        plan = exchange_plan(part, seeds, owners, channel, num_layers)
        self.num_seeds = plan.num_seeds
        batch = make(plan.sample)
        seeds_of, batch.batch_size = store_of_seeds(batch), plan.num_seeds
        seeds_of.batch_size = plan.num_seeds
        if "y" in seeds_of and not all_labels:
            seeds_of.y = seeds_of.y[: plan.num_seeds]
        if inputs is not None:
            seeds_of.input_id = inputs
        self._exchange = RowExchange(channel, seed, thrift)
        weight = plan.share * channel.size if weigh else 1.0
        types = part.types
        ends = [tuple(map(types.node_types.index, kind[::2])) for kind in types.edge_types]
        run = _LayerRun(plan, ends, self._exchange, weight)
        self._batch = part_batch_of(batch.to(device), run)
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
    """Runs layers on the batch of a part, with an exchange before each layer but the first.

    Args:
        plan: What the rank computes, sends and receives.
        ends: The numbers of the two node types of each edge type.
        exchange: Sends and receives.
        weight: What gradients are multiplied by.
    """

    def __init__(
        self, plan: ExchangePlan, ends: Sequence[tuple[int, ...]], exchange: RowExchange, weight: float
    ) -> None:
        self._plan, self._ends, self._exchange, self._weight = plan, ends, exchange, weight
        self._seen: tuple[Block, list[LayerView]] | None = None

    def __call__(self, batch: OfPart, layers: Sequence[Layer]) -> Tensor:
        steps = self._plan.steps
        if len(layers) != len(steps):
            raise ValueError(
                f"layers() returns {len(layers)} layers, and the sampler was told of {len(steps)}: give it as many, "
                f"WholePartSampler({len(layers)})."
            )
        seen, thread = self._seen_by_layers(batch), self._exchange.begin()
        first = one_hop(batch, seen[0])
        rows = layer_rows(layers[0], first, 0)
        for index in range(1, len(layers)):
            x = RowsOfTypes()
            for kind, (step, of_kind) in enumerate(zip(steps[index], rows, strict=True)):
                if of_kind is not None:
                    assert step.route is not None
                    number = (index - 1) * len(rows) + kind
                    of_kind, thread = self._exchange.gather(of_kind, thread, step.route, number)
                x.append(of_kind)
            rows = layer_rows(layers[index], one_hop(first, seen[index], x), index)
        return tied(of_seeds(batch, rows), thread, self._weight)

    def _seen_by_layers(self, batch: OfPart) -> list[LayerView]:
        """Return what each layer sees of the batch. It is found once for its blocks, which change with the device."""
        outermost = batch.outermost
        if self._seen is None or self._seen[0] is not outermost[0]:
            (first,) = seen_by_layers(batch)
            self._seen = outermost[0], [first, *(self._seen_in(outermost, steps) for steps in self._plan.steps[1:])]
        return self._seen[1]

    def _seen_in(self, outermost: list[Block], steps: list[Step]) -> LayerView:
        device = outermost[0].indices.device
        nodes = [self._nodes(kind, step, device) for kind, step in enumerate(steps)]
        blocks = [
            self._block(block, steps[receiver], steps[sender], self._plan.num_own[sender])
            for block, (sender, receiver) in zip(outermost, self._ends, strict=True)
        ]
        return LayerView(nodes, blocks)

    def _nodes(self, kind: int, step: Step, device: torch.device) -> Nodes:
        """Return the nodes of a type that a layer sees, and where they stand in the batch if it does not see all."""
        first, num_own = self._plan.steps[0][kind], self._plan.num_own[kind]
        num_src = step.num_own + step.num_remote
        if num_src == num_own + first.num_remote:
            return Nodes(step.num_dst, num_src)
        others = torch.arange(num_own, num_own + step.num_remote, device=device)
        return Nodes(step.num_dst, num_src, torch.cat([torch.arange(step.num_own, device=device), others]))

    @staticmethod
    def _block(outermost: Block, receivers: Step, senders: Step, num_own: int) -> Block:
        num_edges = int(outermost.indptr[receivers.num_dst])
        block = outermost.head(receivers.num_dst, senders.num_own + senders.num_remote, num_edges)
        if senders.num_own == num_own:
            return block
        is_other = block.indices >= num_own  # rows of other ranks begin where those of own nodes end
        left_out = num_own - senders.num_own
        return replace(block, indices=torch.where(is_other, block.indices - left_out, block.indices))
