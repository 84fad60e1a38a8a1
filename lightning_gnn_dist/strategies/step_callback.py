"""What ranks that exchange gradients at every step do about each other around a step: a stop on one of them is a vote.

Lightning lets a rank go as soon as its own ``trainer.should_stop`` is set, and the others wait for its gradients for
ever. So inside an epoch the exchange of the next step carries the wish, and all ranks leave after that step. After a
validation and at the end of an epoch all ranks vote at once, and leave there. Beside their votes they send a checksum
of weights and settings, which ends ranks that have come to train different models.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_gnn_dist.rounds.lightning_internals import Replaced, announce_sigterm, hear_skips
from lightning_gnn_dist.rounds.meeting import log_figures
from lightning_gnn_dist.wire import collectives


class StepCallback(Callback):
    """Stands where strategies have no hook: at the end of a batch or an epoch, and where Lightning looks to leave.

    Args:
        strategy: The strategy, which begins each fit.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def begin(self, trainer: Trainer, replaced: Replaced) -> None:
        """Begin a fit, and stand around the loops' looks at ``trainer.should_stop``."""
        self.skips = False  # what on_train_batch_start of the module said for the step that begins
        self._has_spoken = self._has_validated = self._wants_to_stop = self._is_agreed = False
        self._sums: Tensor | None = None  # of the votes of the step that runs
        self._votes: list[float] | None = None  # the same, once they are read
        self._trainer, loop = trainer, trainer.fit_loop.epoch_loop
        replaced.watch(loop, "on_run_start", after=self._hold)
        replaced.watch(loop, "on_advance_end", before=self._before_step_ends, after=self._after_step)
        replaced.watch(trainer.fit_loop, "on_advance_end", after=self.vote)
        hear_skips(replaced, trainer.lightning_module, self)

    # Votes: for a stop, for SIGTERM, for the end of the epoch, and that some parameter had no part in the loss.

    def own_votes(self) -> list[bool]:
        """Return this rank's votes for the exchange of a step."""
        strategy = self.strategy
        return [self._wants_to_stop, strategy.sigterm_received, self.skips, strategy.used.is_unfinished]

    def take(self, sums: Tensor) -> None:
        """Take the sums of all ranks' votes; refuse ranks that disagree on whether there is a step at all."""
        self._sums, self._votes = sums, None
        # A rank that leaves may wait for the numbers. Where they are summed on the CPU, so may all.
        if (self.skips or not sums.is_cuda) and 0 < (skips := int(self._read()[2])) < collectives.world_size():
            here = "this one too" if self.skips else "but not on this one"
            raise RuntimeError(
                f"on_train_batch_start returned -1, which leaves the epoch, on {skips} of {collectives.world_size()} "
                f"ranks, {here}. Gradients are exchanged at every step, so all ranks must leave at the same one: decide"
                " by what is the same on all ranks, or set trainer.should_stop = True, which one rank may do for all."
            )

    def read_with(self, number: Tensor) -> float:
        """Return the number in a tensor of the device, and read the votes with it: the host waits once for both."""
        if self._sums is None or self._votes is not None:
            return float(number)
        found, *self._votes = torch.cat([number.to(self._sums.dtype).view(1), self._sums]).tolist()
        return float(found)

    def vote(self) -> None:
        """Stop here if any rank wants to; refuse ranks that have come to train different models. Collective."""
        wants, strategy = self._wants_to_stop or self._trainer.should_stop, self.strategy
        replica = strategy._replica(weights=not strategy.processors_differ)
        own = [wants, strategy.used.is_unfinished, replica.checksum()]
        stops, unused, checksums = zip(*collectives.gather_numbers(own, strategy.root_device), strict=True)
        self._act_on(sum(stops), 0, sum(unused))
        replica.compare(checksums)
        self._trainer.should_stop |= self._is_agreed

    def _read(self) -> list[float]:
        if self._votes is None:
            assert self._sums is not None
            self._votes = self._sums.tolist()
        return self._votes

    def _act_on(self, stop: float, sigterm: float, unused: float) -> None:
        if unused == collectives.world_size():
            self.strategy.used.judge(type(self.strategy).__name__, self.strategy.root_device)
        if sigterm:
            rank_zero_info("SIGTERM: all ranks stop after this step.")
            announce_sigterm(self._trainer)
        self._is_agreed |= stop > 0

    def _hold(self) -> None:
        """Keep this rank until the others know that it wants to leave."""
        if self._is_agreed or collectives.world_size() == 1:
            self._trainer.should_stop |= self._is_agreed
        elif self._trainer.should_stop:
            self._wants_to_stop, self._trainer.should_stop = True, False

    def _before_step_ends(self) -> None:
        """Act on the votes of the step before Lightning looks at ``should_stop`` to validate or leave. Collective."""
        if self._sums is not None:
            stop, sigterm, _, unused = self._read()
            self._act_on(stop, sigterm, unused)
        self._sums = None
        self._hold()

    def _after_step(self) -> None:
        if self._has_validated:  # on all ranks or on none: they count the same steps
            self._has_validated = False
            self.vote()

    # What Lightning calls.

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_spoken:
            self._has_spoken = True
            _say_what_is_weighed(batch, self.strategy.weights)
            _say_what_is_not_learned(batch, trainer, self.strategy.root_device)
        if trainer.is_last_batch:  # a checkpoint may be written next
            self.strategy.average_buffers()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.strategy.average_buffers()  # max_steps ends an epoch at any batch
        log_figures(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.strategy.average_buffers()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_validated = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # First of all callbacks. A SIGTERM ends all ranks at one place, whatever else may end this one alone.
        self.strategy.is_alone = not isinstance(exception, SIGTERMException)


def _say_what_is_weighed(batch: Any, weights: str) -> None:
    coverage = getattr(batch, "coverage", None)
    if coverage is None or getattr(batch, "weighed_by_coverage", False) or weights != "coverage":
        return
    seeds = coverage[: batch.batch_size]
    if bool((seeds != seeds[:1]).any()):
        rank_zero_info(
            "training_step returns one number for a batch, so whole batches are weighed, by the mean coverage of "
            "their seeds. To weigh nodes, return coverage_mean(losses, batch)."
        )


def _say_what_is_not_learned(batch: Any, trainer: Any, device: torch.device) -> None:
    """Log how many training nodes of all ranks have weight 0. Collective."""
    own = getattr(trainer.datamodule, "uncovered", (0, 0))  # another's does not say
    uncovered, seeds = (sum(numbers) for numbers in zip(*collectives.gather_numbers(own, device), strict=True))
    if uncovered and getattr(batch, "weighed_by_coverage", False):
        rank_zero_info(
            f"Training nodes without a neighbour in their part: {uncovered} of {seeds}. Beside others coverage_mean "
            "gives them weight 0. Coverage(shrinkage=1.0) gives them some; boundary=Halo() or MetisPartitioner() show "
            "them their neighbours."
        )
