"""The meeting of ranks at the end of a round, and the callback that calls it: strategies have no hook there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.joint import HasFigures
from lightning_gnn_dist.rounds import refusals, replica_state
from lightning_gnn_dist.rounds.correction_gradients import trained_parameters
from lightning_gnn_dist.rounds.drift import DriftCorrection
from lightning_gnn_dist.rounds.lightning_internals import (
    HasModule,
    announce_sigterm,
    datamodule_of,
    log_numbers,
    module_of,
    set_global_step,
)
from lightning_gnn_dist.rounds.means import finite
from lightning_gnn_dist.rounds.means.averaging import Averaging, summary
from lightning_gnn_dist.rounds.means.means import Means
from lightning_gnn_dist.rounds.rows.replica_tables import ReplicaTables
from lightning_gnn_dist.rounds.rows.touched_rows import TouchedRows
from lightning_gnn_dist.rounds.walking import parameters_of, unchanged
from lightning_gnn_dist.wire import collectives


@dataclass
class RoundState:
    """Where a rank is in the rounds of a run, and how the last one was. A checkpoint holds the first two fields."""

    round_idx: int = 0
    batches_done: int = 0
    in_round: bool = False
    stop_requested: bool = False  # by this rank, since the last meeting
    seconds: float = 0.0
    distance: float = 0.0  # of replicas from their mean, if it was measured
    batches_of_ranks: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)  # ranks whose weights were not finite


class Votes(NamedTuple):
    """The numbers that a rank sends at a meeting: its batches, what it wants, a checksum of its replica."""

    batches: int
    stop: bool
    sigterm: bool
    checksum: int
    global_step: int


class HoldsMeetings(HasModule, Protocol):
    """What a meeting and its callback read and call of a strategy."""

    state: RoundState
    averaging: Averaging
    means: Means
    drift_correction: DriftCorrection
    touched_rows: TouchedRows
    replicas: ReplicaTables
    nonfinite: str
    processors_differ: bool
    sigterm_received: bool

    @property
    def global_rank(self) -> int: ...
    @property
    def root_device(self) -> torch.device: ...
    @property
    def shares_gradients(self) -> bool: ...
    def lengths_of_means(self) -> list[int]: ...
    def begin_round(self) -> None: ...
    def meet(self, batches: int) -> list[Votes]: ...
    def end_round(self) -> None: ...


class Peers:
    """The ranks that meet: all ranks of the process group, none of which may be missing.

    Args:
        strategy: This rank's strategy.
    """

    def __init__(self, strategy: HoldsMeetings) -> None:
        self._strategy = strategy
        self._has_taken_first = False

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files that only one rank writes."""
        return self._strategy.global_rank == 0

    @property
    def are_several(self) -> bool:
        """Whether there can be others to meet."""
        return collectives.world_size() > 1

    def check(self, trainer: Trainer) -> None:
        """Refuse a fit that these ranks cannot train."""

    def join(self, loader: Any, opened: Callable[[Any], Any]) -> Any:
        """Take part from here on. Returns what ``opened`` makes of this rank's training loader."""
        return opened(loader)

    def meet(self, batches: int) -> list[Votes]:
        """Average, count the round, and return what each rank said. ``batches`` is this rank's number in the round."""
        strategy, state = self._strategy, self._strategy.state
        counts = self._share_batches(batches)
        state.batches_of_ranks, state.left_out = finite.hear(counts, strategy.nonfinite, state.round_idx)
        strategy.end_round()
        votes = self._vote(batches)
        if strategy.processors_differ and len({vote.checksum for vote in votes}) > 1:
            self._take_first()
            votes = self._vote(batches)
        refusals.check_replicas([vote.checksum for vote in votes], state.round_idx)
        state.round_idx += 1
        return votes

    def leave(self) -> None:
        """Called when the fit is over."""

    def _share_batches(self, batches: int) -> list[int]:
        """Return what :func:`finite.tell` gave on each rank; refuse ranks that would exchange different sizes."""
        strategy, module = self._strategy, module_of(self._strategy)
        sums = strategy.averaging.checksums() if collectives.world_size() > 1 else []
        num_values = strategy.averaging.num_values(gradients=strategy.shares_gradients) + strategy.replicas.num_values()
        num_parameters = len(parameters_of(module))
        lengths = strategy.lengths_of_means()
        weights = strategy.replicas.weights_here(trained_parameters(module))
        told, known = finite.tell(batches, weights), summary([*lengths, *sums])
        rows = collectives.gather_numbers([told, num_values, num_parameters, known], strategy.root_device)
        for sizes in ([row[1] for row in rows], [row[2] for row in rows]):
            refusals.check_sizes(sizes)
        all_equal = len({row[-1] for row in rows}) == 1
        strategy.means.agree(lengths if all_equal else [])
        strategy.averaging.compare([] if all_equal else collectives.gather_numbers(sums, strategy.root_device))
        return [row[0] for row in rows]

    def _vote(self, batches: int) -> list[Votes]:
        """Return what each rank says at the end of a round. Collective."""
        strategy, module = self._strategy, module_of(self._strategy)
        equal = collectives.checksum(_equal_tensors(strategy)) if collectives.world_size() > 1 else 0
        stop, sigterm = strategy.state.stop_requested, strategy.sigterm_received
        mine = Votes(batches, stop, sigterm, equal, module.trainer.global_step)
        rows = collectives.gather_numbers(mine, strategy.root_device)
        return [Votes(number, bool(stops), bool(told), *others) for number, stops, told, *others in rows]

    def _take_first(self) -> None:
        if not self._has_taken_first:
            rank_zero_info(replica_state.TAKES_FIRST)
        self._has_taken_first = True
        replica_state.take_first_(_equal_tensors(self._strategy))


def _equal_tensors(strategy: HoldsMeetings) -> list[Tensor]:
    """What all ranks have alike after a meeting."""
    return strategy.averaging.tensors() + strategy.averaging.tables()


class MeetingCallback(Callback):
    """Calls the meeting after the last batch of a round, and lets no rank leave before."""

    def __init__(self, strategy: HoldsMeetings) -> None:
        self.strategy = strategy
        self.min_epochs: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.min_epochs = trainer.fit_loop.min_epochs

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # One rank that stops in mid-round would leave the others waiting at the meeting. Lightning finishes an
        # epoch that min_epochs asks for, so a stop takes effect at its end, after the vote.
        running = trainer.fit_loop.epoch_progress.current.processed + 1  # type: ignore[attr-defined]
        trainer.fit_loop.min_epochs = max(running, self.min_epochs or 0)

    def on_train_batch_start(self, *args: Any) -> None:
        self.strategy.begin_round()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # After mixed precision has unscaled the gradients, and before they are clipped.
        self.strategy.touched_rows.count(optimizer)
        self.strategy.drift_correction.shift(optimizer)
        self.strategy.replicas.begin_step(optimizer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.is_last_batch:
            return
        state = self.strategy.state
        state.stop_requested |= trainer.should_stop
        with unchanged(pl_module):
            votes = self.strategy.meet(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        # ModelCheckpoint names files by it and decides by it whether to save; ranks may have taken unequal steps.
        set_global_step(trainer, max(vote.global_step for vote in votes))
        if any(vote.stop for vote in votes):
            trainer.should_stop = True
        if any(vote.sigterm for vote in votes):
            rank_zero_info(f"SIGTERM: stopping after round {state.round_idx}.")
            announce_sigterm(trainer)
        log_figures(
            pl_module,
            {
                "round/index": float(state.round_idx),
                "round/batches": float(sum(vote.batches for vote in votes)),
                "round/seconds": state.seconds,
                **({"round/distance": state.distance} if state.distance else {}),
            },
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.strategy.state.in_round:
            raise RuntimeError(
                "The epoch ended without a meeting. A hook on_train_batch_start that returns -1 leaves it early: end "
                "rounds by the strategy's clock instead."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.min_epochs = self.min_epochs


def log_figures(module: LightningModule, figures: Mapping[str, float] = MappingProxyType({})) -> None:
    """Log the bytes that this rank sent, the seconds it waited, and ``figures``. Not collective."""
    traffic = collectives.traffic
    own = {"comm/bytes_sent": traffic.bytes_sent, "comm/seconds": traffic.seconds, **traffic.boundary_figures}
    data: HasFigures | None = datamodule_of(module.trainer)
    of_data: Mapping[str, float] = getattr(data, "figures", {})  # isinstance() would compute them once more
    log_numbers(module, {**figures, **own, **of_data})
