"""The base of strategies that train in rounds: local steps on every rank, then one meeting."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from itertools import chain
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.checks import check_choice, check_instance, shown
from lightning_gnn_dist.joint import BringsHooks, JudgesParts
from lightning_gnn_dist.rounds import checkpoints, refusals
from lightning_gnn_dist.rounds.clock import (
    EveryPass,
    KnownSteps,
    RoundClock,
    RoundLoader,
    RoundProgress,
    RoundTimer,
    batches_per_step,
    schedule,
)
from lightning_gnn_dist.rounds.drift import Drift, DriftCorrection, Towards, resolved
from lightning_gnn_dist.rounds.launching import Launch
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of, take_over_bar, take_over_estimate
from lightning_gnn_dist.rounds.means import MOMENTS, AveragedMoments, Moments, Outer, OuterStep, Parameters
from lightning_gnn_dist.rounds.meeting import Meeting, MeetingCallback, Peers
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook, RoundState
from lightning_gnn_dist.rounds.partitioned_strategy import Buffers, PartitionedStrategy
from lightning_gnn_dist.rounds.reducer import Nonfinite, Reducer, SendsMeans
from lightning_gnn_dist.wire import collectives

Weights = Literal["uniform", "nodes"]


class RoundStrategy(PartitionedStrategy):
    """Train one replica per rank; let the replicas meet when a round is over.

    A subclass says which hooks meet, in one method:

        class MyStrategy(RoundStrategy):
            def hooks(self, fit: Fit) -> list[MeetingHook]:
                return [*super().hooks(fit), MyHook()]

    One Lightning epoch is one round: ``max_epochs`` counts rounds, and validation, checkpoints, early stopping
    and schedulers by epoch come right after a meeting, when all replicas are equal. Between meetings the ranks
    exchange nothing.

    The mean counts also ranks that did not train a weight. The row of an ``nn.Embedding`` over nodes is trained only by
    the rank that has the node, so with P ranks it keeps 1/P of the way that Adam has moved it. Of an embedding with
    ``sparse=True`` only rows that were touched are sent, and each counts the local steps that have touched it: train it
    with :class:`LazyAdam`.

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
        outer: An optimizer of the meetings, which steps towards the mean of the replicas: :class:`Outer`. None: the
            mean is the model.
        reducer: What takes the means. ``Rounded(8)`` sends a quarter of the bytes; with ``Overlapped()`` the mean of a
            round travels while the next one trains. Default: numbers go as they are, while ranks wait.
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
        reducer: SendsMeans | None = None,
        launch: Launch = Launch(),
    ) -> None:
        refusals.check_says("clock", clock, "is_over", "when a round is over, as EverySteps(16) or EveryPass() do, ")
        refusals.check_reducer(reducer)
        if outer is not None:
            check_instance("outer", outer, Outer, "an Outer, such as Outer(lr=0.7), or None")
        check_choice("nonfinite", nonfinite, Nonfinite)
        named = isinstance(average_optimizer, str) and average_optimizer in MOMENTS
        if not named and not isinstance(average_optimizer, bool):
            raise ValueError(
                'average_optimizer must be True, False, "momentum" (running means of gradients alone) or "variance" '
                f"(of their squares alone), got {shown(average_optimizer)}."
            )
        super().__init__(weights=weights, buffers=buffers, launch=launch)
        self.reducer = Reducer() if reducer is None else reducer.of_rounds()
        if outer is None and self.reducer.takes_ways:
            outer = Outer()  # the mean, taken as the way there, which is what travels
        self.clock: RoundClock = EveryPass() if clock is None else clock
        self.average_optimizer = average_optimizer
        self.drift = None if drift is None else resolved(drift, self.drift_modes, type(self).__name__)
        self.nonfinite: str = nonfinite
        self.state = RoundState()
        self.meeting = Meeting()  # those of the running fit, or of the last one
        self.outer = outer
        self.peers = Peers()
        self.timer = RoundTimer()  # of a fit
        self.loader: RoundLoader | None = None
        self._has_failed = False
        self._companion = MeetingCallback(self)

    # What a subclass says.

    def end_round(self) -> None:
        """Exchange; called on every rank, right after the last local step of the round."""
        self.average_replicas()

    def average_replicas(self) -> None:
        """Let all hooks meet: they share one exchange, and those behind the means go on from it. Collective."""
        self.meeting.exchange()

    def hooks(self, fit: Fit) -> list[MeetingHook]:
        """Return the hooks of the meetings of a fit, those that are on."""
        moments = AveragedMoments(self.average_optimizer) if self.average_optimizer else None
        averages: Callable[[str], bool] = (lambda _: False) if moments is None else moments.has
        outer = None
        if self.outer is not None and self.peers.are_several and fit.dense_parameters(frozen=True):
            outer = OuterStep(self.outer)
        data = datamodule_of(fit.lightning_module.trainer)
        first, late = self.reducer.stage(outer, moments)
        hooks = [
            *chain.from_iterable(state.hooks(averages) for state in fit.states),
            Parameters(trained=outer is None, with_buffers=self.buffers != "local"),
            outer if outer in first else None,
            moments if moments in first else None,
            *(data.meeting_hooks() if isinstance(data, BringsHooks) else ()),
            DriftCorrection(self.drift) if self.drift is not None and self.peers.are_several else None,
            *late,
        ]
        return [hook for hook in hooks if hook is not None]

    def own_weight(self) -> float:
        """Return the weight of this rank in a mean over ranks."""
        if self.weights == "uniform":
            return 1.0
        assert self.loader is not None
        num_seeds = getattr(self.loader.loader, "num_seeds", None)
        return refusals.refuse_weights(self.loader.loader) if num_seeds is None else float(num_seeds)

    def weight_of_rows(self) -> float:
        """Return what a local step of this rank counts for in the mean of a row that it has touched."""
        return self.own_weight()

    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        if "outer" in state and self.outer is None:
            rank_zero_warn("The checkpoint holds the state of outer=Outer(...), which this fit leaves out.")
        if "under_way" in state and not self.reducer.is_late:
            rank_zero_warn(
                "The checkpoint holds what ranks trained in its last round, whose mean was under way; with a reducer "
                "that takes means at once this fit goes on from the mean before it."
            )
        self.meeting.restore(state)
        assert self.loader is not None
        self.loader.read_again()

    @property
    def resumed_state(self) -> dict[str, Any]:
        """The hooks' states in a checkpoint that are not restored yet."""
        return {} if self._resumed is None else self._resumed.extra

    # What Lightning calls.

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        take_over_estimate(model.trainer, self.estimated_steps)
        take_over_bar(model.trainer, lambda: self.batches_of_round(self.state.round_idx))

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        by_steps = any(config.interval == "step" for config in self.lr_scheduler_configs)
        if by_steps and not isinstance(self.clock, KnownSteps):
            raise ValueError(
                f"{type(self).__name__} lets ranks take unequal numbers of steps in a round, so a scheduler by steps "
                'would give every rank another learning rate: use {"scheduler": ..., "interval": "epoch"}, which steps '
                "once a round, on all ranks alike."
            )
        if self.peers.are_several:
            self.reducer.begin()
        fit = self._fit()
        self.meeting.begin(fit, self.hooks(fit))

    def configure_ddp(self) -> None:
        # Replicas start equal and exchange nothing during a round, so there is nothing to wrap.
        if self._resumed is None:  # else every rank has read its state from the checkpoint
            collectives.broadcast_([each.data for each in self._alike(buffers=True).values()])

    def on_train_start(self) -> None:
        trainer = self._module().trainer
        per_pass = -(-self._batches_per_pass() // trainer.accumulate_grad_batches)
        rank_zero_info(schedule(self.clock, trainer.max_epochs, per_pass))
        data = datamodule_of(trainer)
        if isinstance(data, JudgesParts):
            looks_beyond = any(hook.looks_beyond_parts for hook in self.meeting.hooks)
            if self.is_global_zero and not looks_beyond and (reason := data.against_averaging()):
                rank_zero_info(f"Averaging alone loses accuracy on these parts. {reason}")
            if self.world_size > 1:
                _warn_of_dense_tables(self._module(), data.counts_of_nodes(), self.world_size)
        self.reducer.begin_meeting(self.state.round_idx)
        self.state.is_training = False
        if self._resumed is None:
            self.meeting.tell("begin_round")
            self.meeting.state()  # refuses two hooks of one name before the first step
        super().on_train_start()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        finally:
            self.meeting.tell("after_step")

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = not isinstance(exception, SIGTERMException)
        super().on_exception(exception)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_alone("self.log(..., on_step=True, sync_dist=True) exchanges")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_alone("all_gather() exchanges")
        return super().all_gather(tensor, *args, **kwargs)

    def teardown(self) -> None:
        if self.loader is not None:
            self.loader.close()
        self.meeting.end()
        self.reducer.close()
        self.peers.leave()
        super().teardown()

    # How long rounds are.

    def batches_of_round(self, round_idx: int) -> float:
        """Return the batches of this rank in a round, infinity where the clock does not say before."""
        if not isinstance(self.clock, KnownSteps):
            return math.inf
        per_step = batches_per_step(self._module().trainer, round_idx)
        return self.clock.steps_of_round(round_idx, -(-self._batches_per_pass() // per_step)) * per_step

    def estimated_steps(self) -> float:
        """Return the local steps of the whole run, the value of ``trainer.estimated_stepping_batches``.

        Those before a resume are among them; of a fit without end it is infinite.
        """
        trainer, clock = self._module().trainer, self.clock
        if trainer.max_epochs == -1:
            return math.inf
        if not isinstance(clock, KnownSteps):
            refusals.refuse_estimate(clock, "it does not say before how many steps a rank takes in a round")
        num_batches = self._batches_per_pass() if isinstance(clock, EveryPass) else 0
        per_step = [batches_per_step(trainer, epoch) for epoch in range(max(trainer.max_epochs or 0, 1))]
        steps = (clock.steps_of_round(r, -(-num_batches // batches)) for r, batches in enumerate(per_step))
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return min(next(steps), -(-int(trainer.limit_train_batches) // per_step[0]))
        return sum(steps)

    def _batches_per_pass(self) -> int:
        if self.loader is None:  # asked for by configure_optimizers()
            self._module().trainer.fit_loop.setup_data()  # as Lightning's estimated_stepping_batches does
        assert self.loader is not None
        return len(self.loader.loader)

    def _is_over(self, batches: int) -> bool:
        """Return whether the round ends with batch number ``batches`` of it, counted from 1."""
        assert self.loader is not None
        per_step: int = self._module().trainer.accumulate_grad_batches
        if batches % per_step:
            return False
        per_pass, seconds = -(-len(self.loader.loader) // per_step), 0.0
        if not isinstance(self.clock, KnownSteps):  # which counts steps alone
            seconds = self.timer.expected(batches)
        return self.clock.is_over(RoundProgress(self.state.round_idx, batches // per_step, per_pass, seconds))

    # What all strategies have.

    @property
    def is_alone(self) -> bool:
        return self.state.in_round

    def _begin_fit(self, trainer: Trainer) -> None:
        refusals.check_trainer(type(self).__name__, trainer, has_layer_sync=self._layer_sync is not None)
        for state in self.states if self.world_size > 1 else []:
            state.refuse_replicas(type(self).__name__)
        self.peers.check(trainer)
        self.timer = RoundTimer()
        self.reducer.forget()
        self.meeting = Meeting()
        self.state.in_round = self.state.is_training = self.state.stop_requested = self._has_failed = False
        self.state.gradients_beyond = 0

    def _fit(self) -> Fit:
        return Fit(
            lightning_module=self._module(),
            optimizers=self.optimizers,
            precision_plugin=self.precision_plugin,
            batch_to_device=self.batch_to_device,
            round=self.state,
            reducer=self.reducer,
            weight=self.own_weight,
            weight_of_rows=self.weight_of_rows,
            nonfinite=self.nonfinite,
            processors_differ=self.processors_differ,
            states=self.states,
            device=self.root_device,
        )

    def _training_loader(self, loader: Any) -> RoundLoader:
        self.loader = self.peers.join(loader, self._in_rounds)
        return self.loader

    def _in_rounds(self, loader: Any) -> RoundLoader:
        if sized_len(loader) is None:
            raise TypeError(
                f"{type(self).__name__} needs a training loader with a length, to know what a pass is; "
                f"{type(loader).__name__} has none. Use PartitionedDataModule, or a map-style dataset."
            )
        refusals.check_ranks_of_loader(loader, self.world_size)
        return RoundLoader(loader, self.state, self._is_over)

    def _of_run(self) -> dict[str, Any]:
        return {"round_idx": self.state.round_idx}

    def _of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return {
            "batches_done": self.state.batches_done,
            "optimizer_states": checkpoint["optimizer_states"],
            "buffers": checkpoints.cpu_buffers(self._module()) if self.buffers == "local" else {},
            "extra": self.meeting.state(),
        }

    def _take_state(self, checkpoint: dict[str, Any], path: object) -> checkpoints.Resumed:
        taken = checkpoints.take_from_checkpoint(checkpoint, path)
        self.state.round_idx, self.state.batches_done = taken.round_idx, taken.batches_done
        return taken

    def _must_leave_at_once(self) -> bool:
        return self._has_failed or super()._must_leave_at_once()

    def _check_alone(self, what: str) -> None:
        if self.state.in_round and self._module().trainer.training and not isinstance(self.clock, KnownSteps):
            raise RuntimeError(
                f"{what} inside a round: with {type(self).__name__} ranks take unequal numbers of steps between "
                "meetings, so nobody answers. Log with on_step=False, on_epoch=True, which exchanges once a round, or "
                "without sync_dist."
            )


def _warn_of_dense_tables(module: nn.Module, num_rows: Container[int], num_ranks: int) -> None:
    """Warn of trained embeddings with dense gradients and a row for each of so many nodes."""
    for name, child in module.named_modules():
        is_one = isinstance(child, nn.Embedding) and not child.sparse and child.weight.requires_grad
        if is_one and child.num_embeddings in num_rows:
            rank_zero_warn(
                f"{name} has a row for each of {child.num_embeddings} nodes, and a mean of {num_ranks} ranks keeps "
                f"about 1/{num_ranks} of the way that one of them moves it: make it with sparse=True, and train with "
                "LazyAdam."
            )
