"""Lets ranks that exchange gradients at every step leave together: a stop on one of them is a vote."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_gnn_dist.rounds.lightning_internals import Replaced, announce_sigterm, hear_skips
from lightning_gnn_dist.wire import collectives


class StepVotes(NamedTuple):
    """How many ranks want to leave, at a step and for each reason, and how many have unused parameters."""

    stop: int
    sigterm: int
    skips: int  # of the rest of the epoch, by on_train_batch_start
    unused: int  # some parameters had no part in the loss


class Leaving:
    """Turns what one rank wants into what all of them do, after the same step.

    Lightning lets a rank go as soon as its own ``trainer.should_stop`` is set, and the others wait for its gradients
    for ever. So inside an epoch the exchange of the next step carries the wish, and all ranks leave after that step.
    After a validation and at the end of an epoch all ranks vote at once, and leave there. Beside their votes they send
    a checksum of weights and settings, which ends ranks that have come to train different models.

    Args:
        strategy: The strategy: whether this rank has received SIGTERM, the parameters that its loss has used, and what
            all ranks must have alike.
        trainer: The trainer whose loops the ranks leave.
    """

    def __init__(self, strategy: Any, trainer: Trainer) -> None:
        self.skips = False  # what on_train_batch_start of the module said for the step that begins
        self.has_validated = False
        self._strategy, self._trainer = strategy, trainer
        self._wants_to_stop = self._is_agreed = False
        self._sums: Tensor | None = None  # of the votes of the step that runs
        self._votes: StepVotes | None = None  # the same, once they are read

    def watch(self, replaced: Replaced) -> None:
        """Stand around the loops' looks at ``trainer.should_stop``, where Lightning has no hooks."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        replaced.watch(epoch_loop, "on_run_start", after=self.hold)
        replaced.watch(epoch_loop, "on_advance_end", before=self.before_step_ends, after=self.after_step)
        replaced.watch(self._trainer.fit_loop, "on_advance_end", after=self.vote)
        hear_skips(replaced, self._trainer.lightning_module, self)

    def own(self) -> list[bool]:
        """Return this rank's votes for the exchange of a step, in the order of :class:`StepVotes`."""
        strategy = self._strategy
        return [self._wants_to_stop, strategy.sigterm_received, self.skips, strategy.used.is_unfinished]

    def take(self, sums: Tensor) -> None:
        """Take the sums of all ranks' votes; refuse ranks that disagree on whether there is a step at all."""
        self._sums, self._votes = sums, None
        # A rank that leaves may wait for the numbers. Where they are summed on the CPU, so may all.
        if (self.skips or not sums.is_cuda) and 0 < (skips := self._read().skips) < collectives.world_size():
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
        found, *votes = torch.cat([number.to(self._sums.dtype).view(1), self._sums]).tolist()
        self._votes = StepVotes(*map(int, votes))
        return float(found)

    def before_step_ends(self) -> None:
        """Act on the votes of the step before Lightning looks at ``should_stop`` to validate or leave. Collective."""
        if self._sums is not None:
            self._act_on(self._read())
        self._sums = None
        self.hold()

    def after_step(self) -> None:
        """Vote if a validation has run. Collective then."""
        if self.has_validated:  # on all ranks or on none: they count the same steps
            self.has_validated = False
            self.vote()

    def hold(self) -> None:
        """Keep this rank until the others know that it wants to leave."""
        if self._is_agreed or collectives.world_size() == 1:
            self._trainer.should_stop |= self._is_agreed
        elif self._trainer.should_stop:
            self._wants_to_stop, self._trainer.should_stop = True, False

    def vote(self) -> None:
        """Stop here if any rank wants to; refuse ranks that have come to train different models. Collective."""
        wants, strategy = self._wants_to_stop or self._trainer.should_stop, self._strategy
        replica = strategy._replica(weights=not strategy.processors_differ)
        own = [wants, strategy.used.is_unfinished, replica.checksum()]
        stops, unused, checksums = zip(*collectives.gather_numbers(own, strategy.root_device), strict=True)
        self._act_on(StepVotes(sum(stops), 0, 0, sum(unused)))
        replica.compare(checksums)
        self._trainer.should_stop |= self._is_agreed

    def _read(self) -> StepVotes:
        if self._votes is None:
            assert self._sums is not None
            self._votes = StepVotes(*map(int, self._sums.tolist()))
        return self._votes

    def _act_on(self, votes: StepVotes) -> None:
        if votes.unused == collectives.world_size():
            self._strategy.judge_unused()
        if votes.sigterm:
            rank_zero_info("SIGTERM: all ranks stop after this step.")
            announce_sigterm(self._trainer)
        self._is_agreed |= votes.stop > 0
