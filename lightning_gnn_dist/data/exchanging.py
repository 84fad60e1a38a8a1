"""What data modules share whose ranks may exchange rows in every step: of graphs that all hosts have, and of shards."""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData, assemble, in_type
from lightning_gnn_dist.batches.loading import widening
from lightning_gnn_dist.batches.placement import device_of
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.precision import type_that_stays, warn_of_slow_bfloat16
from lightning_gnn_dist.boundary.boundary import Exchange
from lightning_gnn_dist.boundary.exchange_loader import ExchangeLoader
from lightning_gnn_dist.boundary.exchange_plan import Owners
from lightning_gnn_dist.boundary.exchange_refusals import check_exchange
from lightning_gnn_dist.boundary.halo_seeds import check_learns_apart
from lightning_gnn_dist.data.explained_errors import guard_plain_ddp
from lightning_gnn_dist.data.graph_datamodule import GraphDataModule
from lightning_gnn_dist.data.train_loader import PassLoader, TrainLoader
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import WeighsRanks
from lightning_gnn_dist.layerwise.layers import HasLayers, Layer, layers_in, with_arrays
from lightning_gnn_dist.wire.channel import Channel, open_channel


class ExchangingDataModule(GraphDataModule):
    """Training batches of the rank's own part; with ``boundary=Exchange()`` all of it, as the one batch of a pass."""

    _exchange_channel: Channel | None = None

    @abstractmethod
    def _around(self, part: Graph, num_ranks: int) -> tuple[Graph, Owners]:
        """Return a part as batches show it, with all nodes that send to it, and who owns its nodes. Collective."""

    @abstractmethod
    def _whole_arrays(self, layers: list[Layer], owners: Owners) -> dict[str, Tensor]:
        """Return what layers read of the whole graph, with a row for each node of the part. Collective."""

    def setup(self, stage: str) -> None:
        warn_of_slow_bfloat16(self.trainer)
        self._agree_on_budget()
        if stage == "fit" and self._exchanges():
            assert self.trainer is not None
            check_exchange(self.trainer, self.trainer.lightning_module)
        if stage == "fit":
            check_learns_apart(self.boundary, self.trainer)
            guard_plain_ddp(self.trainer)  # before DDP takes rows that are not made

    def train_dataloader(self) -> TrainLoader:
        loader = super().train_dataloader()
        if self._exchanges():
            loader.move_to(0)  # now, as all ranks are here
        return loader

    def on_exception(self, exception: BaseException) -> None:
        if self._exchange_channel is not None:
            self._exchange_channel.explain(exception)
        super().on_exception(exception)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self._exchange_channel = None

    def _widening(self) -> Widen:
        """Return which narrow types batches have as float32."""
        return widening(self.loading, type_that_stays(self.trainer))

    def _exchanges(self) -> bool:
        """Return whether ranks exchange rows in every step."""
        return isinstance(self.boundary, Exchange) and self._is_cut()

    def _num_batches(self) -> int:
        return 1 if self._exchanges() else super()._num_batches()

    def _local_batches(self, part: Graph, num_batches: int, rank: int, num_ranks: int) -> PassLoader:
        if not self._exchanges():
            return super()._local_batches(part, num_batches, rank, num_ranks)
        assert self.trainer is not None and isinstance(self.boundary, Exchange)
        seeds = part.split("train")
        shown, owners = self._around(part, num_ranks)
        self._values.of_training(shown, seeds)
        inputs = self._inputs_of(part, seeds)
        layers = layers_in(cast(HasLayers, self.trainer.lightning_module))
        self._exchange_channel = open_channel(num_ranks)
        part, widen, dtype = with_arrays(shown, self._whole_arrays(layers, owners)), self._widening(), self._dtype()

        def make(sample: Sample) -> SampledData:
            return in_type(assemble(part, sample, widen=widen), dtype)

        return ExchangeLoader(
            part,
            seeds,
            owners,
            self._exchange_channel,
            self.sampler.num_hops,
            thrift=self.boundary.thrift,
            seed=self.seed,
            weigh=not isinstance(self.trainer.strategy, WeighsRanks),
            make=make,
            all_labels=self.loading.all_labels,
            device=device_of(self.trainer),
            inputs=inputs,
        )
