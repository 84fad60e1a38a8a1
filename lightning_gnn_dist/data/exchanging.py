"""What data modules share whose ranks may exchange rows in every step: of graphs that all hosts have, and of shards."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.batch import SampledData, in_type
from lightning_gnn_dist.batches.loading import widening
from lightning_gnn_dist.batches.placement import device_of
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.precision import type_that_stays, warn_of_slow_bfloat16
from lightning_gnn_dist.boundary.boundary import Exchange
from lightning_gnn_dist.boundary.exchange_loader import ExchangeLoader
from lightning_gnn_dist.boundary.exchange_plan import Owners
from lightning_gnn_dist.boundary.exchange_refusals import check_exchange
from lightning_gnn_dist.boundary.halo_seeds import check_learns_apart
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.data.explained_errors import guard_plain_ddp
from lightning_gnn_dist.data.graph_datamodule import GraphDataModule
from lightning_gnn_dist.data.train_loader import PassLoader, TrainLoader
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.evaluation.budget import agreed_budget
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import WeighsRanks
from lightning_gnn_dist.layerwise.layers import HasLayers, Layer, layers_in, with_arrays
from lightning_gnn_dist.wire.channel import open_channel
from lightning_gnn_dist.wire.collectives import gather_numbers

if TYPE_CHECKING:
    from lightning_gnn_dist.joint import CountsSeeds, ForStrategies


class ExchangingDataModule(GraphDataModule):
    """Training batches of the rank's own part; with ``boundary=Exchange()`` all of it, as the one batch of a pass."""

    @abstractmethod
    def _around(self, part: Graph, num_ranks: int) -> tuple[Graph, Owners]:
        """Return a part as batches show it, with all nodes that send to it, and who owns its nodes. Collective."""

    @abstractmethod
    def _whole_arrays(self, layers: list[Layer], owners: Owners) -> dict[str, Tensor]:
        """Return what layers read of the whole graph, with a row for each node of the part. Collective."""

    def setup(self, stage: str) -> None:
        """Find out what all ranks have alike: the memory of an evaluation, and in a fit the seed. Collective."""
        warn_of_slow_bfloat16(self.trainer)
        if stage == "fit":
            self._seed_of_fit = None  # of a fit before
        self._agree()
        if stage == "fit" and self._exchanges():
            assert self.trainer is not None
            check_exchange(self.trainer, self.trainer.lightning_module)
        if stage == "fit":
            check_learns_apart(self.boundary, self.trainer)
            guard_plain_ddp(self.trainer)  # before DDP takes rows that are not made

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed fit keeps: the seed of its batches."""
        return {"seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept, given = state_dict.get("seed"), self._settings.seed
        if kept is None or self._trainer_fn() not in (None, TrainerFn.FITTING):
            return
        if given is not None and int(given) != kept:
            raise ValueError(
                f"The checkpoint is of a fit with seed {kept}, and this data module has seed={given}, so that its "
                f"batches would be others: give seed={kept} to go on, or begin a new fit with the weights alone, "
                "Model.load_from_checkpoint(path)."
            )
        self._seed_of_fit = kept

    def train_dataloader(self) -> TrainLoader:
        loader = super().train_dataloader()
        if self._exchanges():
            loader.move_to(0)  # now, as all ranks are here
        return loader

    def _trainer_fn(self) -> TrainerFn | None:
        return self.trainer.state.fn if self.trainer is not None else None

    def _agree(self) -> None:
        """Find out how much memory an evaluation may take, and the seed, which is that of rank 0. Collective."""
        device = device_of(self.trainer)
        self._eval_bytes = agreed_budget(self.evaluation.bytes, device, self.trainer)
        said = [self.seed, self._settings.seed is not None]
        of_ranks = gather_numbers(said, device) if self._world_size() > 1 else [said]
        seeds = [seed for seed, _ in of_ranks]
        if len(set(seeds)) > 1 and any(is_given for _, is_given in of_ranks):
            raise ValueError(f"All ranks need the same seed, and theirs are {shown(seeds)}: give the same to each.")
        self._seed_of_fit = seeds[0]

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
        part, widen, dtype = with_arrays(shown, self._whole_arrays(layers, owners)), self._widening(), self._dtype()

        def make(sample: Sample) -> SampledData:
            return in_type(assemble(part, sample, widen=widen), dtype)

        return ExchangeLoader(
            part,
            seeds,
            owners,
            open_channel(num_ranks),
            self.sampler.num_hops,
            thrift=self.boundary.thrift,
            seed=self.seed,
            weigh=not isinstance(self.trainer.strategy, WeighsRanks),
            make=make,
            all_labels=self.loading.all_labels,
            device=device_of(self.trainer),
            inputs=inputs,
        )


if TYPE_CHECKING:

    def _offers(data: GraphDataModule, loader: TrainLoader) -> tuple[ForStrategies, CountsSeeds]:
        """Let mypy check that these have what the Protocols of ``joint`` ask for."""
        return data, loader
