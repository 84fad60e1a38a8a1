"""The base of strategies that train in rounds: local steps on every rank, then one meeting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.checks import check_choice
from lightning_gnn_dist.joint import CountsNodes, JudgesParts, KeepsRows
from lightning_gnn_dist.rounds import refusals, replica_state
from lightning_gnn_dist.rounds.clock import AdaptiveSteps, EveryPass, RoundClock, takes_equal_steps
from lightning_gnn_dist.rounds.drift import Drift, DriftCorrection, Towards, resolved
from lightning_gnn_dist.rounds.launchers import Launch
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of, take_over_bar, take_over_estimate
from lightning_gnn_dist.rounds.means import finite
from lightning_gnn_dist.rounds.means.averaging import Averaging, Moments, check_moments
from lightning_gnn_dist.rounds.means.finite import Nonfinite
from lightning_gnn_dist.rounds.means.means import Means, is_rounded
from lightning_gnn_dist.rounds.means.outer import Outer, OuterStep, check_outer
from lightning_gnn_dist.rounds.meeting import MeetingCallback, Peers, RoundState, Votes
from lightning_gnn_dist.rounds.pace import Pace
from lightning_gnn_dist.rounds.partitioned_strategy import Buffers
from lightning_gnn_dist.rounds.replica_strategy import ReplicaStrategy
from lightning_gnn_dist.rounds.round_loader import RoundLoader
from lightning_gnn_dist.rounds.rows.owned_embedding import owned_parameters
from lightning_gnn_dist.rounds.rows.replica_tables import ReplicaTables
from lightning_gnn_dist.rounds.rows.tables import dense_parameters, warn_of_dense_tables
from lightning_gnn_dist.rounds.rows.touched_rows import TouchedRows
from lightning_gnn_dist.wire import collectives

Weights = Literal["uniform", "nodes"]


class RoundStrategy(ReplicaStrategy):
    """Train one replica per rank; let the replicas meet when a round is over.

    A subclass says what happens at a meeting, in one method:

        class MyStrategy(RoundStrategy):
            def end_round(self) -> None:
                self.average_replicas()

    One Lightning epoch is one round: ``max_epochs`` counts rounds, and validation, checkpoints, early stopping
    and schedulers by epoch come right after a meeting, when all replicas are equal. Between meetings the ranks
    exchange nothing.

    The mean counts also ranks that did not train a weight. The row of an ``nn.Embedding`` over nodes is trained only by
    the rank that has the node, so with P ranks it keeps 1/P of the way that Adam has moved it. Of an embedding with
    ``sparse=True`` only rows that were touched are sent, and each counts the local steps that have touched it
    (:mod:`~lightning_gnn_dist.rounds.rows.touched_rows`): train it with :class:`LazyAdam`.

    Args:
        clock: Decides when a round ends. Default: after each pass over the training nodes.
        weights: Weigh replicas alike (``"uniform"``) or by the training nodes (or edges) of their parts (``"nodes"``).
        buffers: ``"average"`` the buffers (statistics of batch normalisation) at a meeting, or keep them
            ``"local"``; then every rank validates with its own.
        average_optimizer: Average the optimizers' state too: True, or one kind alone, ``"momentum"`` (running means of
            gradients, as Adam's first moments) or ``"variance"`` (of their squares). With the latter all ranks divide
            their steps alike, which is what averaging needs most where parts differ. ``"momentum"`` is not for learned
            rows of nodes: a rank has no second moment of those that it has not trained.
        drift: ``Drift("ranks")`` corrects the drift of the replicas: after a meeting every rank computes its own
            gradient and the mean of all at the averaged model, and shifts each local gradient by their difference. One
            more exchange of the size of the model, and ``drift.anchor_steps`` more gradients, per round. The shift
            comes before clipping, but with manual optimisation after it. None: no correction.
        nonfinite: What to do with a rank whose weights are NaN or infinite at a meeting: end the fit and name the rank
            (``"refuse"``), or leave it out and give it the average of the others (``"leave_out"``).
        outer: An optimizer of the meetings, which steps towards the mean of the replicas, and fewer bytes on the wire:
            :class:`Outer`. None: the mean is the model.
        launch: How ranks are started, and how long they wait for each other.
    """

    weight_modes: ClassVar[Any] = Weights
    drift_modes: ClassVar[tuple[Towards, ...]] = ("ranks",)  # the first is the default

    def __init__(
        self,
        clock: RoundClock | None = None,
        *,
        weights: Weights = "uniform",
        buffers: Buffers = "average",
        average_optimizer: Moments = False,
        drift: Drift | None = None,
        nonfinite: Nonfinite = "refuse",
        outer: Outer | None = None,
        launch: Launch = Launch(),
    ) -> None:
        refusals.check_clock(clock)
        check_outer(outer)
        check_choice("nonfinite", nonfinite, Nonfinite)
        check_moments(average_optimizer)
        super().__init__(weights=weights, buffers=buffers, launch=launch)
        if outer is None and isinstance(clock, AdaptiveSteps):
            outer = Outer(lr=1.0, momentum=0.0)  # the mean, taken as the way there, whose length says how far ranks are
        self.clock: RoundClock = EveryPass() if clock is None else clock
        self.average_optimizer = average_optimizer
        self.drift = None if drift is None else resolved(drift, self.drift_modes, type(self).__name__)
        self.nonfinite: str = nonfinite
        self.state = RoundState()
        self.outer = outer
        self.means = Means(None if outer is None else outer.bits)
        self.outer_step = OuterStep(self, outer, self.means, measures=isinstance(clock, AdaptiveSteps))
        self.averaging = Averaging(self, buffers=buffers != "local", moments=average_optimizer)
        self.touched_rows = TouchedRows(self, self.averaging)
        self.replicas = ReplicaTables(self, self.averaging.averages)
        self.peers = Peers(self)
        self.pace = Pace(self, self.clock)
        self.drift_correction = DriftCorrection(self, self.shared_gradient, self.drift, self._agreement)
        self._companion = MeetingCallback(self)

    # What a subclass says.

    def end_round(self) -> None:
        """Exchange; called on every rank, right after the last local step of the round."""
        raise NotImplementedError(f"{type(self).__name__} must define end_round().")

    def average_replicas(self) -> None:
        """Replace parameters, and buffers and moments if asked for, by the weighted mean of all ranks. Collective."""
        self.means.begin_meeting(self.state.round_idx)
        moments, weight = self.averaging.moments(), self.own_weight()
        others = self.averaging.tensors(trained=self.outer is None, moments=False)
        is_left_out = self.global_rank in self.state.left_out
        for tables in (self.touched_rows, self.replicas):
            tables.average_(0.0 if is_left_out else self.weight_of_rows())
        if is_left_out:
            weight = finite.leave_out_([*others, *moments])
        self.outer_step.take(lambda ways: self.means.average_(ways, others, moments, weight), is_left_out=is_left_out)
        if is_left_out:
            replica_state.forget_moments(self.optimizers)  # those that are its own are NaN, too
            self.replicas.forget_moments()

    def own_weight(self) -> float:
        """Return the weight of this rank in a mean over ranks."""
        if self.weights == "uniform":
            return 1.0
        assert self.pace.loader is not None
        return float(refusals.require_num_seeds(self.pace.loader.loader))

    def weight_of_rows(self) -> float:
        """Return what a local step of this rank counts for in the mean of a row that it has touched."""
        return self.own_weight()

    def shared_gradient(self, own: list[Tensor]) -> list[Tensor]:
        """Return the gradient that drift correction steers towards; ``own`` is this rank's. Collective."""
        shared = [gradient.clone() for gradient in own]
        average = self.means.average_gradient_
        finite.average_gradient_(shared, self.own_weight(), self.nonfinite, "anchor gradient", average)
        return shared

    def lengths_of_means(self) -> list[int]:
        """Return how many numbers the means of a meeting have that go in fewer bits: of weights and of moments."""
        moments = [each for each in self.averaging.moments() if is_rounded(each)]
        return self.means.lengths(dense_parameters(self._module()), moments)

    @property
    def shares_gradients(self) -> bool:
        """Whether a meeting exchanges gradients, so that the same parameters must be frozen on all ranks."""
        return self.drift is not None

    def extra_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank, beside weights and optimizers."""
        more = {"outer": self.outer_step.state(), "rows": self.replicas.lasting()}
        more = {name: state for name, state in more.items() if state}
        return self.drift_correction.state() | self.pace.state() | more

    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        if "rows" in state:
            self.replicas.take_lasting(state["rows"])
        self.outer_step.restore(state.get("outer", {}))
        self.drift_correction.restore(state, self.state.round_idx, self.state.batches_done)

    def restore_outer(self) -> None:
        """Go on with the state of the meetings' optimizer in a checkpoint before others may ask for it."""
        if self._resumed is not None and "outer" in self._resumed.extra:
            others = {**self._resumed.extra}
            self.outer_step.restore(others.pop("outer"))
            self._resumed = replace(self._resumed, extra=others)

    # What Lightning calls.

    @property
    def is_global_zero(self) -> bool:
        return self.peers.is_first

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        take_over_estimate(model.trainer, self.estimated_steps)
        take_over_bar(model.trainer, lambda: self.pace.batches_of_round(self.state.round_idx))

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and not takes_equal_steps(self.clock):
            refusals.check_schedulers(type(self).__name__, self.lr_scheduler_configs)

    def configure_ddp(self) -> None:
        # Replicas start equal and exchange nothing during a round, so there is nothing to wrap.
        if self._resumed is None:  # else every rank has read its state from the checkpoint
            module = self._module()
            owned = owned_parameters(module)
            equal = [each.data for each in module.parameters() if id(each) not in owned]
            collectives.broadcast_([*equal, *module.buffers()])

    def on_train_start(self) -> None:
        rank_zero_info(self.pace.schedule())
        if self.is_global_zero and not self.shares_gradients:
            self._say_what_is_lost()
        data, whole = self._keeper_of_rows(), datamodule_of(self._module().trainer)
        if isinstance(whole, CountsNodes) and self.world_size > 1:
            warn_of_dense_tables(self._module(), whole.counts_of_nodes(), self.world_size)
        if data is not None:
            self.pace.check_parts(data.batches_of_part(), self.state.round_idx, self.state.batches_done)
        self._refresh_rows()
        # Also where a search of the learning rate was here before.
        self.touched_rows.begin()
        self.means.begin_meeting(self.state.round_idx)
        if self._resumed is None:
            self.drift_correction.anchor(self.state.round_idx, self.state.batches_done)
        super().on_train_start()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_alone("self.log(..., on_step=True, sync_dist=True) exchanges")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_alone("all_gather() exchanges")
        return super().all_gather(tensor, *args, **kwargs)

    def teardown(self) -> None:
        if self.pace.loader is not None:
            self.pace.loader.close()
        self.means.close()
        self.peers.leave()
        super().teardown()

    # What the callback calls.

    def begin_round(self) -> None:
        """Note that a round runs, and start its timer; called for every batch."""
        self.state.in_round = True
        self.replicas.begin_round()
        self.pace.timer.begin()

    def meet(self, batches: int) -> list[Votes]:
        """End the round: exchange, then agree on who wants to stop. Returns what each rank said."""
        self.state.seconds = self.pace.timer.end(batches)
        self.replicas.end_round()
        votes = self.peers.meet(batches)
        self.state.distance = self.outer_step.distance
        self.pace.plan(self.state.distance)
        self.outer_step.begin_round()
        self.state.batches_done += batches
        self.state.stop_requested = False
        self._refresh_rows()  # before the anchors, whose batches read them
        if self.drift is not None and not self.drift.corrects:  # else the correction has taken it
            self.drift_correction.anchor(self.state.round_idx, self.state.batches_done)
        self.state.in_round = False  # last: what fails before this leaves no checkpoint that could be resumed
        return votes

    def estimated_steps(self) -> float:
        """Return the value of ``trainer.estimated_stepping_batches``."""
        return self.pace.estimated_steps()

    # What all strategies have.

    @property
    def is_alone(self) -> bool:
        return self.state.in_round

    def _agreement(self) -> float:
        return self.outer_step.agreement

    def _begin_fit(self, trainer: Trainer) -> None:
        refusals.check_trainer(type(self).__name__, trainer, has_layer_sync=self._layer_sync is not None)
        self.peers.check(trainer)
        self.drift_correction.begin(trainer)
        self.pace.begin({} if self._resumed is None else self._resumed.extra)
        self.outer_step.forget()
        self.state.in_round = self.state.stop_requested = False

    def _training_loader(self, loader: Any) -> RoundLoader:
        if self.peers.are_several:
            self.outer_step.begin()
        self.pace.loader = self.peers.join(loader, self._in_rounds)
        return self.pace.loader

    def _in_rounds(self, loader: Any) -> RoundLoader:
        if sized_len(loader) is None:
            raise TypeError(
                f"{type(self).__name__} needs a training loader with a length, to know what a pass is; "
                f"{type(loader).__name__} has none. Use PartitionedDataModule, or a map-style dataset."
            )
        refusals.check_ranks_of_loader(loader, self.world_size)
        return RoundLoader(loader, lambda: self.state.batches_done, self._round_is_over)

    def _of_run(self) -> dict[str, Any]:
        return {"round_idx": self.state.round_idx}

    def _of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return {
            "batches_done": self.state.batches_done,
            "optimizer_states": self.replicas.without_whole(checkpoint["optimizer_states"]),
            "buffers": replica_state.cpu_buffers(self._module()) if self.buffers == "local" else {},
            "extra": self.extra_state(),
        }

    def _take_state(self, checkpoint: dict[str, Any], path: object) -> replica_state.ReplicaState:
        taken = replica_state.take_from_checkpoint(checkpoint, path)
        self.state.round_idx, self.state.batches_done = taken.round_idx, taken.batches_done
        return taken

    def _say_what_is_lost(self) -> None:
        data = datamodule_of(self._module().trainer)
        if isinstance(data, JudgesParts) and (reason := data.against_averaging()):
            rank_zero_info(f"Averaging alone loses accuracy on these parts. {reason}")

    def _keeper_of_rows(self) -> KeepsRows | None:
        data = datamodule_of(self._module().trainer)
        return data if isinstance(data, KeepsRows) and data.keeps_rows() else None

    def _refresh_rows(self) -> None:
        """Let ranks compute rows of inner layers for each other, with the model that all have alike. Collective."""
        data = self._keeper_of_rows()
        if data is not None:
            data.refresh_rows(self.state.batches_done)

    def _round_is_over(self, batches: int) -> bool:
        return self.pace.is_over(self.state.round_idx, batches)

    def _check_alone(self, what: str) -> None:
        if self.state.in_round and self._module().trainer.training and not takes_equal_steps(self.clock):
            refusals.refuse_exchange(type(self).__name__, what)
