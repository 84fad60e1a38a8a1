"""A round: local steps on every rank, then one meeting."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from typing import Any, ClassVar, Literal

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import check_at_least, check_choice, check_true_or_false, is_number, shown
from lightning_gnn_dist.rounds import estimate, finite, frozen, refusals, replica_state
from lightning_gnn_dist.rounds.clock import (
    EveryPass,
    RoundClock,
    RoundProgress,
    RoundTimer,
    schedule,
    takes_equal_steps,
)
from lightning_gnn_dist.rounds.drift import DriftCorrection, refuse_sparse_tables
from lightning_gnn_dist.rounds.finite import Nonfinite
from lightning_gnn_dist.rounds.gradients import loss_scale, mean_gradient, trained_parameters, unrecorded, without_noise
from lightning_gnn_dist.rounds.lightning_internals import give_back_sigterm, take_over_estimate, take_over_sigterm
from lightning_gnn_dist.rounds.meeting import MeetingCallback, Votes
from lightning_gnn_dist.rounds.round_loader import RoundLoader
from lightning_gnn_dist.rounds.start import StartsTogether
from lightning_gnn_dist.wire import collectives

Weights = Literal["uniform", "nodes"]
Buffers = Literal["average", "local"]
Drift = Literal["ranks"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class RoundStrategy(StartsTogether):
    """Train one replica per rank; let the replicas meet when a round is over.

    A subclass says what happens at a meeting, in one method:

        class MyStrategy(RoundStrategy):
            def end_round(self) -> None:
                self.average_replicas()

    One Lightning epoch is one round: ``max_epochs`` counts rounds, and validation, checkpoints, early stopping
    and schedulers by epoch come right after a meeting, when all replicas are equal. Between meetings the ranks
    exchange nothing.

    A mean over ranks counts those that did not train a weight, too. The row of an ``nn.Embedding`` over nodes is
    trained by the rank that has the node, so that with P ranks it keeps 1/P of what Adam, whose steps are as long
    however small the gradient, has moved it: give such a table P times the learning rate.

    Args:
        clock: Decides when a round ends. Default: after each pass over the training nodes.
        weights: Weigh replicas alike (``"uniform"``) or by the training nodes of their parts (``"nodes"``).
        buffers: ``"average"`` the buffers (statistics of batch normalisation) at a meeting, or keep them
            ``"local"``; then every rank validates with its own.
        average_optimizer: Average the state of the optimizers too (moments, not only weights).
        drift: ``"ranks"`` corrects the drift of the replicas: after a meeting every rank computes its own gradient
            and the mean of all at the averaged model, and shifts each local gradient by their difference. One more
            exchange of the size of the model, and ``anchor_steps`` more gradients, per round. The shift comes before
            clipping; with manual optimisation, which clips in ``training_step``, after it.
        drift_decay: By which the shift fades with each local step: the anchor grows stale. 1 keeps it.
        anchor_steps: Batches of the own part that the anchor gradient is taken over, at most; one pass if fewer.
        nonfinite: A rank that comes to a meeting with NaN or infinite weights ends the fit, and is named
            (``"refuse"``), or is left out of the average and gets that of the others (``"leave_out"``).
        timeout: How long a collective may take before the ranks give up.
        start_timeout: How long the ranks wait for each other at the start. When it is over, those that are there end,
            and name those that are not.
        process_group_backend: ``"gloo"`` or ``"nccl"``; by default what fits the device.
        start_method: How Lightning starts the ranks when no launcher (torchrun, SLURM) did.
    """

    weight_modes: ClassVar[Any] = Weights
    drifts: ClassVar[Any] = Drift | None
    buffer_modes: ClassVar[Any] = Buffers

    def __init__(
        self,
        clock: RoundClock | None = None,
        *,
        weights: Weights = "uniform",
        buffers: Buffers = "average",
        average_optimizer: bool = False,
        drift: Drift | None = None,
        drift_decay: float = 0.8,
        anchor_steps: int = 4,
        nonfinite: Nonfinite = "refuse",
        timeout: timedelta = timedelta(minutes=30),
        start_timeout: timedelta = timedelta(minutes=10),
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        check_choice("weights", weights, self.weight_modes)
        check_choice("buffers", buffers, self.buffer_modes)
        check_choice("start_method", start_method, StartMethod)
        refusals.check_launch(process_group_backend, timeout=timeout, start_timeout=start_timeout)
        refusals.check_clock(clock)
        check_choice("drift", drift, self.drifts)
        check_choice("nonfinite", nonfinite, Nonfinite)
        check_at_least(1, anchor_steps=anchor_steps)
        check_true_or_false(average_optimizer=average_optimizer)
        if not is_number(drift_decay) or not 0.0 <= drift_decay <= 1.0:
            raise ValueError(f"drift_decay must lie in [0, 1] (1: the shift does not fade), got {shown(drift_decay)}.")
        super().__init__(
            start_timeout=start_timeout,
            timeout=timeout,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self.clock: RoundClock = EveryPass() if clock is None else clock
        self.weights: str = weights
        self.buffers: str = buffers
        self.average_optimizer = average_optimizer
        self.drift_correction: DriftCorrection | None = None
        self.drift_decay = drift_decay
        self.drift: str | None = drift
        self.anchor_steps = anchor_steps
        self.nonfinite: str = nonfinite
        self.left_out: list[int] = []  # at the last meeting
        self.round_idx = 0
        self.batches_done = 0
        self.batches_of_ranks: list[int] = []
        self.in_round = self._has_taken_first = False
        self._unequal: set[int] = set()  # parameters that differed between ranks when they met, by number
        self.stop_requested = self.sigterm_received = False
        self.seconds_in_round = 0.0
        self._timer = RoundTimer()
        self._resumed: replica_state.ReplicaState | None = None
        self._round_loader: RoundLoader | None = None
        self._companion = MeetingCallback(self)

    # What a subclass says.

    def end_round(self) -> None:
        """Runs on every rank, right after the last local step of the round."""
        raise NotImplementedError(f"{type(self).__name__} must define end_round().")

    def average_replicas(self) -> None:
        """Replace every replica by the weighted mean of all: parameters, and what else was asked for."""
        tensors, weight = self._averaged_tensors(), self._weight()
        if is_left_out := self.global_rank in self.left_out:
            weight = finite.leave_out_(tensors)
        collectives.average_(tensors, weight)
        if is_left_out and not self.average_optimizer:
            replica_state.forget_moments(self.optimizers)  # they are NaN, too

    def shared_gradient(self, own: list[Tensor]) -> list[Tensor]:
        """The gradient that drift correction steers towards; ``own`` is this rank's. Collective."""
        shared = [gradient.clone() for gradient in own]
        finite.average_gradient_(shared, self._weight(), self.nonfinite, "anchor gradient")
        return shared

    # What Lightning calls.

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        callbacks: list[Callback] = model.trainer.callbacks  # type: ignore[attr-defined]
        if self._companion not in callbacks:
            callbacks.insert(0, self._companion)  # the meeting comes before checkpoints, EMA and the like
        take_over_estimate(model.trainer, self.estimated_steps)

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            refusals.check_trainer(type(self).__name__, trainer, has_layer_sync=self._layer_sync is not None)
            take_over_sigterm(trainer, self._on_sigterm)
            self.in_round = self.stop_requested = self.sigterm_received = False
            if self.drift is not None:
                refusals.require_batches(trainer, "anchor_batches", f"drift={self.drift!r}")
                refusals.require_step(self._module())
                refuse_sparse_tables(self._module())
            self.drift_correction = None if self.drift is None else DriftCorrection(self.drift_decay)
            self._timer = RoundTimer()
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and not takes_equal_steps(self.clock):
            refusals.check_schedulers(type(self).__name__, self.lr_scheduler_configs)

    def configure_ddp(self) -> None:
        # Replicas start equal and exchange nothing during a round, so there is nothing to wrap.
        if self._resumed is None:  # else every rank has read its state from the checkpoint
            module = self._module()
            collectives.broadcast_([*(p.data for p in module.parameters()), *module.buffers()])

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self._module().trainer.training:
            return dataloader
        if sized_len(dataloader) is None:
            raise TypeError(
                f"{type(self).__name__} needs a training loader with a length, to know what a pass is; "
                f"{type(dataloader).__name__} has none. Use PartitionedDataModule, or a map-style dataset."
            )
        refusals.check_ranks_of_loader(dataloader, self.world_size)
        self._round_loader = RoundLoader(dataloader, lambda: self.batches_done, self._round_is_over)
        return self._round_loader

    def on_train_start(self) -> None:
        super().on_train_start()
        rank_zero_info(schedule(self.clock, self._module().trainer.max_epochs, self._steps_per_pass()))
        if self._resumed is None:
            self._set_anchor()
            return
        self.restore_extra_state(self._resumed.extra)
        replica_state.restore_random_state(self._resumed.random_state)
        self._resumed = None

    def extra_state(self) -> dict[str, Any]:
        """What a checkpoint must hold of this rank, beside weights and optimizers."""
        drift = self.drift_correction
        return {} if drift is None or not drift.is_anchored else {"drift": drift.state()}

    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`extra_state` gave."""
        if self.drift_correction is not None:
            if "drift" in state:
                self.drift_correction.restore(state["drift"], trained_parameters(self._module()))
            else:  # the run that wrote the checkpoint did not correct drift, or had not begun
                self._set_anchor()

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_alone("self.log(..., on_step=True, sync_dist=True) exchanges")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._check_alone("all_gather() exchanges")
        return super().all_gather(tensor, *args, **kwargs)

    def teardown(self) -> None:
        if self._round_loader is not None:
            self._round_loader.close()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            give_back_sigterm(self.lightning_module._trainer)
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # Trainer.save_checkpoint() runs on all ranks, so all of them are here to hand over their state.
        if "optimizer_states" not in checkpoint:
            pass  # weights only: nothing to resume
        elif self.in_round:
            # After an exception, perhaps on this rank alone: nothing collective. The weights are one replica's.
            replica_state.mark_in_round(checkpoint)
        else:
            own_buffers = dict(self._module().named_buffers()) if self.buffers == "local" else {}
            replica_state.add_to_checkpoint(
                checkpoint, self.round_idx, self.batches_done, own_buffers, self.extra_state()
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._module().trainer.state.fn == TrainerFn.FITTING:
            self._resumed = replica_state.take_from_checkpoint(checkpoint, checkpoint_path)
            self.round_idx, self.batches_done = self._resumed.round_idx, self._resumed.batches_done
        return checkpoint

    # A round.

    def _round_is_over(self, batches: int) -> bool:
        per_step = self._module().trainer.accumulate_grad_batches
        if batches % per_step:
            return False
        seconds = self._timer.expected(batches)
        return self.clock.is_over(RoundProgress(self.round_idx, batches // per_step, self._steps_per_pass(), seconds))

    def _steps_per_pass(self) -> int:
        return -(-self._batches_per_pass() // self._module().trainer.accumulate_grad_batches)

    def _batches_per_pass(self) -> int:
        if self._round_loader is None:  # asked for by configure_optimizers()
            self._module().trainer.fit_loop.setup_data()  # as Lightning's estimated_stepping_batches does
        assert self._round_loader is not None
        return len(self._round_loader.loader)  # type: ignore[arg-type]

    def estimated_steps(self) -> float:
        """What ``trainer.estimated_stepping_batches`` says."""
        return estimate.estimated_steps(self.clock, self._module().trainer, self._batches_per_pass)

    def begin_round(self) -> None:
        """A batch is here, perhaps the first of a round."""
        self.in_round = True
        self._timer.begin()

    def meet(self, batches: int) -> list[Votes]:
        """End the round: exchange, then agree on who wants to stop. Returns what each rank said."""
        self.seconds_in_round = self._timer.end(batches)
        counts = self._share_batches(finite.tell(batches, trained_parameters(self._module())))
        self.batches_of_ranks, self.left_out = finite.hear(counts, self.nonfinite, self.round_idx)
        self.end_round()
        votes = self._vote(batches)
        if self.processors_differ and len({vote.checksum for vote in votes}) > 1:
            self._take_first()
            votes = self._vote(batches)
        refusals.check_replicas([vote.checksum for vote in votes], self.round_idx)
        self.round_idx += 1
        self.batches_done += batches
        self.stop_requested = False
        self._set_anchor()
        self.in_round = False  # last: what fails before this leaves no checkpoint that could be resumed
        return votes

    def _vote(self, batches: int) -> list[Votes]:
        """What each rank says at the end of a round."""
        equal = collectives.checksum(self._averaged_tensors()) if self.world_size > 1 else 0
        steps = self._module().trainer.global_step
        mine = Votes(batches, self.stop_requested, self.sigterm_received, equal, steps)
        return [
            Votes(b, bool(s), bool(t), c, g) for b, s, t, c, g in collectives.gather_numbers(mine, self.root_device)
        ]

    def _take_first(self) -> None:
        if not self._has_taken_first:
            rank_zero_info(replica_state.TAKES_FIRST)
        self._has_taken_first = True
        replica_state.take_first_(self._averaged_tensors())

    def _share_batches(self, batches: int) -> list[int]:
        """How many batches each rank took in this round, and a check that all are about to exchange the same."""
        parameters = list(self._module().parameters())
        sums = frozen.checksums(parameters if self.world_size > 1 else [])
        sizes = sum(tensor.numel() for tensor in [*self._other_averaged_tensors(), *parameters])
        if self._shares_gradients:
            sizes += sum(parameter.numel() for parameter in trained_parameters(self._module()))
        mine = [batches, sizes, len(parameters), frozen.summary(sums)]
        rows = collectives.gather_numbers(mine, self.root_device)
        refusals.check_sizes([size for _, size, *_ in rows])
        refusals.check_sizes([count for *_, count, _ in rows])
        all_equal = len({row[-1] for row in rows}) == 1
        others = [] if all_equal else collectives.gather_numbers(sums, self.root_device)
        self._unequal = frozen.unequal(others)
        return [count for count, *_ in rows]

    @property
    def _shares_gradients(self) -> bool:
        """Whether a meeting exchanges gradients, so that the same parameters must be frozen on all ranks."""
        return self.drift is not None

    def shift_gradients(self, optimizer: Optimizer) -> None:
        """Correct the drift of the gradients that ``optimizer`` is about to use."""
        if self.drift_correction is not None:
            # Fused optimizers unscale gradients themselves, later.
            still_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
            self.drift_correction.apply_(optimizer, loss_scale(self) if still_scaled else 1.0)

    def _set_anchor(self) -> None:
        """Take the anchor gradients of the round that begins. All ranks are here: at the start, or at a meeting."""
        if self.drift_correction is None:
            return
        module = self._module()
        batches = islice(self._datamodule().anchor_batches(self.round_idx, start=self.batches_done), self.anchor_steps)
        with unrecorded(module), without_noise(module):  # at one point, so dropout would add nothing but variance
            own, _ = mean_gradient(self, batches)
            shared = self.shared_gradient(own)
        self.drift_correction.anchor(trained_parameters(module), shared, own)

    def _averaged_tensors(self) -> list[Tensor]:
        parameters = enumerate(self._module().parameters())
        tensors = [parameter.data for idx, parameter in parameters if parameter.requires_grad or idx in self._unequal]
        return tensors + self._other_averaged_tensors()

    def _other_averaged_tensors(self) -> list[Tensor]:
        tensors = [] if self.buffers == "local" else list(self._module().buffers())
        if self.average_optimizer:
            tensors += replica_state.optimizer_tensors(self.optimizers)
        return tensors

    def _weight(self) -> float:
        if self.weights == "uniform":
            return 1.0
        assert self._round_loader is not None
        return float(refusals.require_num_seeds(self._round_loader.loader))

    def _check_alone(self, what: str) -> None:
        if self.in_round and self._module().trainer.training and not takes_equal_steps(self.clock):
            refusals.refuse_exchange(type(self).__name__, what)

    def _on_sigterm(self) -> None:
        self.sigterm_received = True

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _datamodule(self) -> Any:
        return self._module().trainer.datamodule  # type: ignore[attr-defined]
