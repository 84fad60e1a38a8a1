"""The boundary that ranks compute together: which rows they send each other between the layers, found out once.

    layer L computes the seeds -> their senders -> layer L - 1 computes those, each on the rank that owns it -> ...

Ranks that do not hold a sender ask its owner for it, so that afterwards all know what to send and what will come.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, in_type, store_of_seeds
from lightning_gnn_dist.batches.batches import Deal, Learning, NoSeedsError, Order
from lightning_gnn_dist.batches.one_hop import LayerView, Nodes, RowsOfTypes, one_hop, seen_by_layers
from lightning_gnn_dist.batches.source import WRITTEN, BatchSource, Content, Inputs, made_of, writes_of
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Halo, Outside
from lightning_gnn_dist.checks import Count, Fraction, brief, check_fields
from lightning_gnn_dist.engine.sample import BatchKey, Sample, has_ids
from lightning_gnn_dist.extensions.exchange.row_exchange import Route, RowExchange, tied
from lightning_gnn_dist.extensions.passes.part_batch import PartNodes, RunsLayers, against_running_layers, part_batch_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions, starts_of
from lightning_gnn_dist.graph.typed.types import TypeNames
from lightning_gnn_dist.graph.value_check import check_arrays, check_labels
from lightning_gnn_dist.homes.access import GraphAccess, Owners
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart, WeighsRanks
from lightning_gnn_dist.layers.layer_pass import LayerNodes, LayerPass, Work
from lightning_gnn_dist.layers.through_layers import Layer, layer_rows, layers_in, of_seeds
from lightning_gnn_dist.sampling.block import Block
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import Channel, open_channel


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What a rank does for one layer with the nodes of one type.

    Attributes:
        num_dst: The own nodes whose rows it computes: the first of the batch.
        num_own: The own nodes whose rows it needs: the first of the batch.
        num_remote: The nodes of other ranks whose rows it needs: the first behind all own nodes.
        route: How the rows of the layer before get to the ranks that need them. None for input rows: each rank has
            those that it needs.
    """

    num_dst: int
    num_own: int
    num_remote: int
    route: Route | None


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """What a rank computes, sends and receives in every forward.

    Attributes:
        sample: Its nodes and their edges, by positions in the part: seeds, then other own nodes, then nodes of others.
        num_seeds: The nodes whose rows the last layer computes.
        share: The seeds of this rank, as a share of all ranks'.
        num_own: Of each node type, the nodes of the sample that the rank owns.
        layers: For each layer, the first layer first, what is done for each node type.
    """

    sample: Sample
    num_seeds: int
    share: float
    num_own: list[int]
    layers: list[list[LayerPlan]]


def exchange_plan(
    part: Graph, seeds: Tensor, owners: Owners, channel: Channel, num_layers: int, work: Work
) -> ExchangePlan:
    """Find out what the ranks compute and send. Collective.

    Args:
        part: The rank's nodes, and all others that send to them. In a graph without types its own come first.
        seeds: The nodes whose rows the last layer computes, positions in the part.
        owners: The rank of every node of the part.
        channel: The ranks.
        num_layers: The number of layers.
        work: How rows are computed: routes are on its device, so that no step waits for a copy of them.
    """
    total = int(torch.cat(channel.exchange([torch.tensor([seeds.numel()])] * channel.size)).sum())
    if total == 0:
        raise NoSeedsError("train_mask marks no node: there is nothing to learn from.")
    nodes, is_own = PartNodes(part, owners, channel.size), owners.ranks == channel.rank
    planned = LayerPass(nodes, channel, work).plan_for(owners.ids[seeds].sort().values, num_layers).planned
    # The last layer that computes an own node, 0 if input rows of it are read, or that reads another's; else -1.
    last, read = torch.full((part.num_nodes,), -1), nodes.senders(planned[0].nodes)
    for layer, computes in enumerate(planned, 1):
        at = nodes.rows_at(read)
        last[at] = torch.where(is_own[at], last[at].clamp(min=layer - 1), layer)
        last[nodes.rows_at(computes.nodes)] = layer
        read = computes.wanted
    order = last.argsort(descending=True, stable=True)  # what the last layers need comes first
    own, others = order[is_own[order] & (last[order] >= 0)], order[~is_own[order] & (last[order] > 0)]
    kinds, num_types = part.types.type_of(torch.arange(part.num_nodes)), len(part.types.node_types)
    place = torch.full((part.num_nodes,), -1)  # among the own nodes of a type, or the others of one
    for some in (own, others):
        for kind in range(num_types):
            of_kind = some[kinds[some] == kind]
            place[of_kind] = torch.arange(len(of_kind))

    def routes(of_layer: LayerNodes) -> list[Route | None]:
        """Return how a layer's rows of each type get to other ranks and to this one."""
        ways = [[nodes.rows_at(ids) for ids in of] for of in (of_layer.told, nodes.by_owner(of_layer.wanted))]
        for way in ways:
            way[channel.rank] = way[channel.rank][:0]
        types = range(num_types)
        return [Route(*([place[at[kinds[at] == kind]].to(work.device) for at in of] for of in ways)) for kind in types]

    no_routes: list[Route | None] = [None] * num_types
    of_layers = list[list[LayerPlan]]()
    of_types = [[last[some[kinds[some] == kind]] for some in (own, others)] for kind in range(num_types)]
    for layer, of_layer in enumerate([no_routes, *map(routes, planned[:-1])], 1):
        made = []
        for (of_own, of_others), route in zip(of_types, of_layer, strict=True):
            computed, needed = (int((of_own >= least).sum()) for least in (layer, layer - 1))
            made.append(LayerPlan(computed, needed, int((of_others >= layer).sum()), route))
        of_layers.append(made)
    num_dst = sum(plan.num_dst for plan in of_layers[0])
    num_own = torch.bincount(kinds[own], minlength=num_types).tolist()
    sample = _sample(part, torch.cat([own, others]), num_dst)
    return ExchangePlan(sample, seeds.numel(), seeds.numel() / total, num_own, of_layers)


def _sample(part: Graph, nodes: Tensor, num_dst: int) -> Sample:
    """The nodes with the edges into the first ``num_dst`` of them."""
    position = torch.full((part.num_nodes,), -1)
    position[nodes] = torch.arange(len(nodes))
    edges = edge_positions(part.indptr, nodes[:num_dst])
    degrees = part.indptr[nodes[:num_dst] + 1] - part.indptr[nodes[:num_dst]]
    small = torch.int32 if max(edges.numel(), len(nodes)) < 2**31 else torch.int64
    return Sample(
        nodes=nodes,
        indptr=starts_of(degrees).to(small),
        indices=position[part.indices[edges].to(torch.int64)].to(small),
        num_sampled_nodes=[num_dst, len(nodes) - num_dst],
        num_sampled_edges=[edges.numel()],
        edge_ids=edges if has_ids(part) else None,
    )


class OneBatch(Deal):
    """Deals all seeds of a rank to one batch. A rank may have none."""

    def __post_init__(self) -> None:
        assert self.num_batches == 1

    def places(self, key: BatchKey, order_of: Order) -> slice:
        return slice(None)


class ExchangeSource(BatchSource):
    """Hands out the same batch in every pass: all that a rank computes on its part. Ranks make theirs together.

    Args:
        batch: The batch, which runs layers by the exchange.
        exchange: Sends rows and gradients.
    """

    def __init__(self, batch: SampledData, exchange: RowExchange) -> None:
        super().__init__(None)
        self._batch, self._exchange, self._written = batch, exchange, writes_of(batch)

    def depth(self, prefetch: int) -> int:
        return 0  # the batch is there

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        for key in keys:
            if writes_of(self._batch) != self._written:
                raise RuntimeError(WRITTEN)
            self._exchange.begin_step(key.epoch + 1)
            yield copy.copy(self._batch)

    def close(self) -> None:
        """End the connections. Not collective."""
        super().close()
        self._exchange.close()


class LayerRun:
    """Runs layers on the batch of a part, with an exchange before each layer but the first.

    Args:
        plan: What the rank computes, sends and receives.
        types: The types of the graph.
        exchange: Sends and receives.
        weight: What gradients are multiplied by.
    """

    def __init__(self, plan: ExchangePlan, types: TypeNames, exchange: RowExchange, weight: float) -> None:
        self._plan, self._exchange, self._weight = plan, exchange, weight
        self._ends = [tuple(map(types.node_types.index, kind[::2])) for kind in types.edge_types]
        self._seen: tuple[Block, list[LayerView]] | None = None

    def __call__(self, batch: RunsLayers, layers: Sequence[Layer]) -> Tensor:
        plans = self._plan.layers
        if len(layers) != len(plans):
            raise ValueError(
                f"layers() returns {len(layers)} layers, and the sampler was told of {len(plans)}: give it as many, "
                f"WholePartSampler({len(layers)})."
            )
        seen, thread = self._seen_by_layers(batch), self._exchange.begin()
        first = one_hop(batch, seen[0])
        rows = layer_rows(layers[0], first, 0)
        for index in range(1, len(layers)):
            x = RowsOfTypes()
            for kind, (plan, of_kind) in enumerate(zip(plans[index], rows, strict=True)):
                if of_kind is not None:
                    assert plan.route is not None
                    number = (index - 1) * len(rows) + kind
                    of_kind, thread = self._exchange.gather(of_kind, thread, plan.route, number, len(rows))
                x.append(of_kind)
            rows = layer_rows(layers[index], one_hop(first, seen[index], x), index)
        return tied(of_seeds(batch, rows), thread, self._weight)

    def _seen_by_layers(self, batch: RunsLayers) -> list[LayerView]:
        """Return what each layer sees of the batch. It is found once for its blocks, which change with the device."""
        outermost = batch.outermost
        if self._seen is None or self._seen[0] is not outermost[0]:
            (first,) = seen_by_layers(batch)
            inner = [self._seen_in(outermost, of_types) for of_types in self._plan.layers[1:]]
            self._seen = outermost[0], [first, *inner]
        return self._seen[1]

    def _seen_in(self, outermost: list[Block], of_types: list[LayerPlan]) -> LayerView:
        device = outermost[0].indices.device
        nodes = [self._nodes(kind, plan, device) for kind, plan in enumerate(of_types)]
        blocks = [
            self._block(block, of_types[receiver], of_types[sender], self._plan.num_own[sender])
            for block, (sender, receiver) in zip(outermost, self._ends, strict=True)
        ]
        return LayerView(nodes, blocks)

    def _nodes(self, kind: int, plan: LayerPlan, device: torch.device) -> Nodes:
        """Return the nodes of a type that a layer sees, and where they stand in the batch if it does not see all."""
        first, num_own = self._plan.layers[0][kind], self._plan.num_own[kind]
        num_src = plan.num_own + plan.num_remote
        if num_src == num_own + first.num_remote:
            return Nodes(plan.num_dst, num_src)
        others = torch.arange(num_own, num_own + plan.num_remote, device=device)
        return Nodes(plan.num_dst, num_src, torch.cat([torch.arange(plan.num_own, device=device), others]))

    @staticmethod
    def _block(outermost: Block, receivers: LayerPlan, senders: LayerPlan, num_own: int) -> Block:
        num_edges = int(outermost.indptr[receivers.num_dst])
        block = outermost.head(receivers.num_dst, senders.num_own + senders.num_remote, num_edges)
        if senders.num_own == num_own:
            return block
        is_other = block.indices >= num_own  # rows of other ranks begin where those of own nodes end
        left_out = num_own - senders.num_own
        return replace(block, indices=torch.where(is_other, block.indices - left_out, block.indices))


@dataclass(frozen=True, repr=False, kw_only=True)
class Exchange(Boundary):
    """Senders outside a part are computed by the ranks that own them, layer by layer, in every step.

    Before each layer but the first, ranks send each other the rows that the layer before has made of the nodes at the
    boundary; in the backward pass the gradients go back. So a step on all parts is the step of one process on the whole
    graph, however the graph is cut, if ``training_step`` returns the mean of a loss of each seed. No step sends
    features: those of the nodes at the boundary are read once, when the fit starts, from the graph, or on shards from
    the ranks that own them.

    It takes ``sampler=WholePartSampler(num_layers)``, a module with a method ``layers`` (see :func:`through_layers`),
    and a strategy that exchanges gradients at every step: :class:`GrappaStrategy` or DDP. A pass is one step, on all
    training nodes.

    Args:
        every: Steps for which received rows are used: with ``every=5`` rows and gradients are sent in one step of five,
            and rows are up to four steps old. Gradients are added in that step alone.
        overlap: Whether a step uses what was sent in the step before, while its own rows are under way. So no step but
            the first waits for the wire, and rows and gradients are a step older than without (PipeGCN).
        share: The share of the rows, in (0, 1], that two ranks send each other, with their gradients: as many of those
            that they share, drawn anew each time, and multiplied so that sums and means over neighbours are right in
            the mean (BNS-GCN). The others are zero in that step, which is not for attention or maxima.
    """

    every: Count = 1
    overlap: bool = False
    share: Fraction = 1.0
    exchanges = takes_shards = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.share == 0:
            raise ValueError("share=0.0 sends no row at all: take boundary=Isolated(), or a share above 0.")

    def __repr__(self) -> str:
        return brief(self)

    def check_settings(self, settings: BatchSettings) -> None:
        if not isinstance(settings.sampler, WholePartSampler):
            raise ValueError(
                "boundary=Exchange() exchanges the rows of whole parts, so it takes "
                "sampler=WholePartSampler(num_hops), with a hop for each layer of the model, got "
                f"{settings.sampler}."
            )

    def check_in_fit(self, trainer: Trainer) -> None:
        if (found := _against(trainer)) is not None:
            raise ValueError("boundary=Exchange() computes the layers of all ranks together, in every step. " + found)

    def wrap(self, home: GraphAccess) -> ExchangedRows:
        return ExchangedRows(home, {"every": self.every, "overlap": self.overlap, "share": self.share})

    def around(self, graph: Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        return Halo().around(graph, residents, edges_into, seed)


class ExchangedRows(Outside):
    """Makes the one batch of a pass.

    Args:
        home: Where the graph lives.
        savings: How the exchange saves bytes and time.
    """

    home: GraphAccess

    def __init__(self, home: GraphAccess, savings: dict[str, Any]) -> None:
        super().__init__(home)
        self._savings = savings

    def learning(self, part: Graph, inputs: Tensor | None) -> Learning:
        home, run, trainer = self.home, self.home.running, self.home.running.trainer
        assert trainer is not None
        whole, seeds, owners = home.with_senders(part, layers_in(trainer.lightning_module))
        if run.settings.loading.check_values:
            check_arrays(whole)
            check_labels(whole, seeds, "train_mask")
        channel = open_channel(run.num_ranks, run.device)
        num_layers = run.settings.training_sampler.num_hops
        plan = exchange_plan(whole, seeds, owners, channel, num_layers, run.work)
        batch = in_type(made_of(Content.of(whole, plan.sample, home.types.seed_type()), widen=run.widen), run.dtype)
        of_seeds, batch.batch_size = store_of_seeds(batch), plan.num_seeds
        of_seeds.batch_size = plan.num_seeds
        if "y" in of_seeds and not run.settings.loading.all_labels:
            of_seeds.y = of_seeds.y[: plan.num_seeds]
        if inputs is not None:
            of_seeds.input_id = inputs
        exchange = RowExchange(channel, run.seed, **self._savings)
        weight = 1.0 if isinstance(trainer.strategy, WeighsRanks) else plan.share * channel.size
        layer_run = LayerRun(plan, whole.types, exchange, weight)
        source = ExchangeSource(part_batch_of(batch.to(run.device), layer_run), exchange)
        return Learning(source, OneBatch(seeds, 1, run.seed))


def _against(trainer: Trainer) -> str | None:
    """Return why rows cannot be exchanged in a fit, and what to do; None where they can."""
    strategy, name = trainer.strategy, type(trainer.strategy).__name__
    if isinstance(strategy, TrainsReplicasApart):
        return (
            f"{name} does not exchange gradients at every step: use GrappaStrategy() or DDP, or for this strategy "
            "boundary=Halo()."
        )
    if not isinstance(strategy, DDPStrategy):
        return f"{name} is no strategy for it: use GrappaStrategy() or DDP."
    if isinstance(strategy, WeighsRanks) and strategy.weights == "uniform":
        return 'weights="uniform" counts ranks, whatever their seeds: leave it out.'
    if trainer.precision == "16-mixed":
        return 'precision="16-mixed" skips steps on single ranks: use "bf16-mixed" or "32-true".'
    if trainer.accumulate_grad_batches != 1:
        return (
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} has nothing to add up: a pass is one batch, of "
            "all training nodes. Leave it out."
        )
    return against_running_layers(trainer.lightning_module)
