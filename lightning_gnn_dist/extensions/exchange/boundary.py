"""The boundary that ranks compute together: what a user passes, and what it adds to a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_gnn_dist.batches.batch import in_type, store_of_seeds
from lightning_gnn_dist.batches.batches import Learning
from lightning_gnn_dist.batches.source import Content, made_of
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Halo, Outside
from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.extensions.exchange.batch import ExchangeSource, LayerRun, OneBatch, exchange_plan
from lightning_gnn_dist.extensions.exchange.row_exchange import RowExchange
from lightning_gnn_dist.extensions.passes.part_batch import against_running_layers, part_batch_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import check_arrays, check_labels
from lightning_gnn_dist.homes.access import GraphAccess
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.joint import TrainsReplicasApart, WeighsRanks
from lightning_gnn_dist.layers.through_layers import layers_in
from lightning_gnn_dist.rules import Count, Fraction, check_fields
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import open_channel


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
        plan = exchange_plan(whole, seeds, owners, channel, num_layers, run.device)
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
